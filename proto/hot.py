"""The messages of every engine step and every worker wake-up: columnar, checked by hand.

    client ──Lookup, Step, Renew──▶ daemon ──LookupAnswer, StepAnswer, JobsEnded──▶ client
    daemon ──Plan, Cancel──▶ worker ──Done──▶ daemon

All travel on numbered links (`link.py`): each arrives once and in order, or the link is closed.
"""

from dataclasses import dataclass
from typing import ClassVar

from kvferry.proto import limits
from kvferry.proto.columns import sum_counts
from kvferry.proto.errors import RemoteProtocolError
from kvferry.proto.ids import U32_MAX
from kvferry.proto.outcome import Ended, Kind, Next, Outcome, Reason
from kvferry.proto.schema import col_keys, col_u8, col_u32, col_u64, integer, message, same_length


def _check_keys(keys: bytes, key_bytes: int, count: int) -> None:
    if not limits.MIN_KEY_BYTES <= key_bytes <= limits.MAX_KEY_BYTES:
        raise RemoteProtocolError(
            "message.limit", f"key_bytes is {key_bytes}; it may be {limits.MIN_KEY_BYTES}..{limits.MAX_KEY_BYTES}"
        )
    if len(keys) != count * key_bytes:
        raise ValueError(f"keys have {len(keys)} bytes; {count} keys of {key_bytes} bytes are {count * key_bytes}")


@message("lookup")
@dataclass(frozen=True, slots=True)
class Lookup:
    """Client -> daemon: how many leading keys of this chain are held? One LookupAnswer answers it.

    The hits are leased to `request`. Asking again with a new `lookup` starts afresh.
    """

    TAG: ClassVar[str]
    lookup: int = integer()  # unique on the link
    request: int = integer()  # request incarnation
    epoch: int = integer(U32_MAX)  # of the namespace, as the client last heard it
    group: int = integer(limits.MAX_GROUPS - 1)
    key_bytes: int = integer(limits.MAX_KEY_BYTES)
    keys: bytes = col_keys()  # (n,) in prefix order

    def check(self) -> None:
        _check_keys(self.keys, self.key_bytes, len(self.keys) // self.key_bytes if self.key_bytes else 0)


@message("lookup.answer")
@dataclass(frozen=True, slots=True)
class LookupAnswer:
    """Daemon -> client: `hits` leading keys are loadable; `next` tells of the one after them."""

    TAG: ClassVar[str]
    lookup: int = integer()
    hits: int = integer(limits.MAX_KEYS)
    next: int = integer(max(Next))  # outcome.Next
    lease: int = integer()  # 0: the hits are not leased and may be gone when loaded
    lease_ms: int = integer(U32_MAX)  # the lease ends this long after the last renewal
    retry_ms: int = integer(U32_MAX)  # PENDING: when asking again may help
    reason: int = integer(max(Reason))  # outcome.Reason of a miss that has one
    epoch: int = integer(U32_MAX)  # the namespace's present epoch

    def check(self) -> None:
        """No relation to check."""


@message("step")
@dataclass(frozen=True, slots=True)
class Step:
    """Client -> daemon: everything the engine's scheduler did in one step. One StepAnswer answers it.

    The daemon takes it in this order: stores, loads, ended requests, fences of written blocks and of
    the loads' blocks, revokes, cancels, releases. Tickets only ever rise within a client process; those
    of stores and loads of one step may interleave.
    """

    TAG: ClassVar[str]
    step: int = integer()  # the client's count of steps within the incarnation
    epoch: int = integer(U32_MAX)
    key_bytes: int = integer(limits.MAX_KEY_BYTES)
    store_tickets: bytes = col_u64()  # (s,)
    store_requests: bytes = col_u64()  # (s,)
    store_groups: bytes = col_u8(limits.MAX_JOBS, limits.MAX_GROUPS - 1)  # (s,)
    store_counts: bytes = col_u32(limits.MAX_JOBS)  # (s,) keys of each store
    store_keys: bytes = col_keys()  # (sum of counts,) prefix order within a store
    store_blocks: bytes = col_u32()  # (sum of counts,) the same block ids on every rank
    load_tickets: bytes = col_u64()  # (l,)
    load_requests: bytes = col_u64()  # (l,)
    load_leases: bytes = col_u64()  # (l,) 0: no lease
    load_groups: bytes = col_u8(limits.MAX_JOBS, limits.MAX_GROUPS - 1)  # (l,)
    load_counts: bytes = col_u32(limits.MAX_JOBS)  # (l,)
    load_keys: bytes = col_keys()  # (sum of counts,)
    load_blocks: bytes = col_u32()  # (sum of counts,)
    end_requests: bytes = col_u64()  # (e,)
    end_reasons: bytes = col_u8(limits.MAX_JOBS, max(Ended))  # (e,) outcome.Ended
    written: bytes = col_u32()  # block ids that a new owner will write from this step on
    revoked: bytes = col_u64()  # store tickets the engine went on without waiting for
    cancelled: bytes = col_u64()  # tickets the client voided
    released: bytes = col_u64()  # leases given back

    def check(self) -> None:
        same_length(self, "store_tickets", "store_requests", "store_groups", "store_counts")
        same_length(self, "load_tickets", "load_requests", "load_leases", "load_groups", "load_counts")
        same_length(self, "end_requests", "end_reasons")
        stored, loaded = sum_counts(self.store_counts), sum_counts(self.load_counts)
        if stored != len(self.store_blocks) // 4:
            raise ValueError(f"store_counts add up to {stored}, store_blocks has {len(self.store_blocks) // 4}")
        if loaded != len(self.load_blocks) // 4:
            raise ValueError(f"load_counts add up to {loaded}, load_blocks has {len(self.load_blocks) // 4}")
        _check_keys(self.store_keys, self.key_bytes, stored)
        _check_keys(self.load_keys, self.key_bytes, loaded)


@message("step.answer")
@dataclass(frozen=True, slots=True)
class StepAnswer:
    """Daemon -> client: what became of each ticket of one step.

    A ticket with job 0 has no job: refused whole, or nothing to do (every accepted key is held or
    already on its way). Keys from `accepted` on were refused for `reason`.
    """

    TAG: ClassVar[str]
    step: int = integer()
    epoch: int = integer(U32_MAX)
    tickets: bytes = col_u64()  # (t,) stores, then loads, as in the step
    jobs: bytes = col_u64()  # (t,)
    accepted: bytes = col_u32(limits.MAX_JOBS)  # (t,) leading keys that are or will be held / loaded
    reasons: bytes = col_u8(limits.MAX_JOBS, max(Reason))  # (t,) outcome.Reason
    wait_for: bytes = col_u64()  # store tickets met by this step's writes that the client had not revoked

    def check(self) -> None:
        same_length(self, "tickets", "jobs", "accepted", "reasons")


@message("jobs.ended")
@dataclass(frozen=True, slots=True)
class JobsEnded:
    """Daemon -> client: these jobs ended. A store that ended OK is loadable from this moment."""

    TAG: ClassVar[str]
    tickets: bytes = col_u64()
    jobs: bytes = col_u64()
    outcomes: bytes = col_u8(limits.MAX_JOBS, max(Outcome))  # outcome.Outcome

    def check(self) -> None:
        same_length(self, "tickets", "jobs", "outcomes")


@message("renew")
@dataclass(frozen=True, slots=True)
class Renew:
    """Client -> daemon: these leases live on. Unknown ones are counted and harmless."""

    TAG: ClassVar[str]
    leases: bytes = col_u64()

    def check(self) -> None:
        """No relation to check."""


@message("plan")
@dataclass(frozen=True, slots=True)
class Plan:
    """Daemon -> worker: what to copy once the rank says begin. Same slots and blocks on every rank.

    `planned_to` says that every ticket up to it has been decided: one without a plan was refused.
    """

    TAG: ClassVar[str]
    planned_to: int = integer()
    tickets: bytes = col_u64()  # (j,)
    jobs: bytes = col_u64()  # (j,)
    kinds: bytes = col_u8(limits.MAX_JOBS, max(Kind))  # (j,) outcome.Kind
    groups: bytes = col_u8(limits.MAX_JOBS, limits.MAX_GROUPS - 1)  # (j,)
    counts: bytes = col_u32(limits.MAX_JOBS)  # (j,) blocks of each job
    slots: bytes = col_u32()  # (sum,)
    generations: bytes = col_u64(limits.MAX_KEYS)  # (sum,)
    blocks: bytes = col_u32()  # (sum,)

    def check(self) -> None:
        same_length(self, "tickets", "jobs", "kinds", "groups", "counts")
        same_length(self, "slots", "generations", "blocks")
        if sum_counts(self.counts) != len(self.slots) // 4:
            raise ValueError(f"counts add up to {sum_counts(self.counts)}, slots has {len(self.slots) // 4}")


@message("cancel")
@dataclass(frozen=True, slots=True)
class Cancel:
    """Daemon -> worker: end these jobs as soon as it is safe. Each still gets its one `done`."""

    TAG: ClassVar[str]
    jobs: bytes = col_u64()

    def check(self) -> None:
        """No relation to check."""


@message("done")
@dataclass(frozen=True, slots=True)
class Done:
    """Worker -> daemon: this rank's part of these jobs is over; nothing of them touches memory any more.

    One message a wake-up, for all that ended since.
    """

    TAG: ClassVar[str]
    jobs: bytes = col_u64()
    outcomes: bytes = col_u8(limits.MAX_JOBS, max(Outcome))
    copy_us: bytes = col_u32(limits.MAX_JOBS)  # from the first byte's submission to the last one's end

    def check(self) -> None:
        same_length(self, "jobs", "outcomes", "copy_us")
