"""What the client library hands out: plain frozen values that an engine may send between its processes."""

from dataclasses import dataclass, field

from kvferry.proto.outcome import Kind, Next, Outcome, Reason


class ArgumentError(ValueError):
    """The caller's own mistake: a key of another width, a block outside the engine's range."""


@dataclass(frozen=True, slots=True)
class Hits:
    """What a lookup knows.

    `ready` is False while the answer may still come within the request's patience: ask again next step.
    """

    ready: bool
    count: int = 0  # leading keys that can be loaded
    next: Next = Next.MISS  # of the key after them
    retry_ms: int = 0
    reason: Reason = Reason.NONE


@dataclass(frozen=True, slots=True)
class Directive:
    """What the ranks must do in this step: made by `Client.end_step`, carried by the engine, obeyed by `RankClient`.

    Order of use on a rank: `revoke` before anything is launched that overwrites blocks; `begin_loads`
    before or after that, but after zeroing of fresh blocks; `begin_stores` after the forward is launched.
    """

    step: int
    loads: tuple[tuple[int, tuple[int, ...]], ...] = ()  # (ticket, block ids it fills)
    stores: tuple[int, ...] = ()  # tickets
    revokes: tuple[int, ...] = ()  # store tickets whose blocks will be overwritten
    cancels: tuple[int, ...] = ()  # load tickets nobody wants any more; their word is still awaited
    failed_loads: tuple[tuple[int, tuple[int, ...]], ...] = ()  # never sent: every rank reports them failed

    def __bool__(self) -> bool:
        return bool(self.loads or self.stores or self.revokes or self.cancels or self.failed_loads)


@dataclass(frozen=True, slots=True)
class JobEnd:
    """A ticket is over for the scheduler side."""

    ticket: int
    request: str
    kind: Kind
    outcome: Outcome
    reason: Reason = Reason.NONE  # of a refusal; then no job ever existed
    accepted: int = 0  # leading keys accepted


@dataclass(frozen=True, slots=True)
class LoadEnd:
    """One rank's word on a load: its blocks are safe to read (ok) or must be computed (failed_blocks)."""

    ticket: int
    ok: bool
    failed_blocks: tuple[int, ...] = ()  # all of the load's when nothing was copied
    outcome: Outcome = Outcome.OK
    wait_us: int = 0  # begin to first byte
    copy_us: int = 0  # first to last byte


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one `RankClient.poll` learned."""

    loads: tuple[LoadEnd, ...] = ()
    stores: tuple[int, ...] = ()  # tickets whose copy no longer reads their blocks at this rank

    def __bool__(self) -> bool:
        return bool(self.loads or self.stores)


@dataclass(slots=True)
class ClientCounters:
    """What the client did not do, by reason: every drop is counted."""

    lookups: int = 0
    hits: int = 0  # keys
    late_lookups: int = 0  # answered after the engine went on without them
    stores: int = 0
    stores_off: int = 0  # no sidecar, ranks away, or too much unanswered
    lost_stores: int = 0  # unended when the daemon was lost
    wait_for: int = 0  # stores that the daemon's fence met and this client's mirror had not
    loads: int = 0
    loads_failed: int = 0
    revokes: int = 0
    withdrawn: int = 0  # stores taken back before any rank began them
    attaches: int = 0
    detaches: int = 0
    stale: int = 0  # late or unknown messages, dropped
    refused: dict[str, int] = field(default_factory=dict)  # keys by Reason name


@dataclass(slots=True)
class RankCounters:
    """What one rank did and did not do."""

    loads: int = 0  # begun at a worker
    loads_failed: int = 0
    load_deadlines: int = 0  # loads that passed their deadline and were cancelled
    stores: int = 0  # begun at a worker
    stores_dropped: int = 0  # no worker to begin them at
    attaches: int = 0
    detaches: int = 0
    stale: int = 0  # late or unknown messages and repeated directives, dropped
