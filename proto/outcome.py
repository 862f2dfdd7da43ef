"""The answers that are not exceptions: how a lookup ends, why a key is refused, how a job ended."""

from enum import IntEnum


class Next(IntEnum):
    """What a lookup says of the first key that is not a hit."""

    MISS = 0  # not here and not on its way
    PENDING = 1  # a store of it is copying: ask again
    END = 2  # every key asked for is a hit


class Reason(IntEnum):
    """Why keys of a store or a whole load were refused at acceptance, or a lookup missed outright."""

    NONE = 0  # not refused
    POOL_FULL = 1  # no free slot and nothing evictable
    RANKS_AWAY = 2  # not every rank of the engine is attached
    MISSING = 3  # a load's key is no longer held
    REQUEST_CLOSED = 4  # the request has ended
    LOAD_OR_STORE = 5  # the request incarnation already has jobs of the other kind
    NEVER_FITS = 6  # the chain is longer than the whole pool
    BUSY = 7  # too many bytes of this engine are in flight
    REPEATED = 8  # the ticket was used before
    STALE_EPOCH = 9  # the message names an epoch of the namespace that a reset has ended
    BAD_BLOCKS = 10  # a block id is outside the engine's range, or twice in one load
    KEY_WIDTH = 11  # keys are not as wide as registered
    GROUP = 12  # a KV group that the engine did not register
    OFF = 13  # said by the client alone: no sidecar
    RESTARTING = 14  # 1.1: the daemon is new, and workers of an earlier one have not said that they drained
    DRAINING = 15  # 1.1: the sidecar takes nothing new, it is about to stop


class Kind(IntEnum):
    """The direction of a job."""

    STORE = 0  # GPU -> host
    LOAD = 1  # host -> GPU


class Outcome(IntEnum):
    """How a rank's copy, or a whole job, ended. Everything but OK is a failure."""

    OK = 0
    COPY_FAILED = 1  # the device reported an error
    REVOKED = 2  # the engine went on without waiting: the bytes may be mixed
    CANCELLED = 3  # voided by client or daemon before it ended
    DEADLINE = 4  # not ended in time (a store's answer; a load waits for proof)
    WORKER_DIED = 5  # the worker was reaped before it reported
    TORN = 6  # a slot's generation is not the plan's
    NOT_BEGUN = 7  # accepted, but no rank began it within its bound
    NOT_PLANNED = 8  # begun, but the plan never came or refused it
    ENGINE_GONE = 9  # the engine's rank or scheduler went away
    BAD_PLAN = 10  # a plan names blocks or slots outside their memory


class Ended(IntEnum):
    """Why a request incarnation ended."""

    FINISHED = 0
    ABORTED = 1
    PREEMPTED = 2
