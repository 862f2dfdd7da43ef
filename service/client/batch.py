"""What one engine step has to say: gathered call by call, told once, as columns.

    store, load, end, written, revoke, cancel, release ──▶ StepBatch ──build──▶ Step (to the daemon)
                                                               └──────────────▶ Directive (to the ranks)

What was gathered and not yet told can still be taken back: a store whose block is given away before its
step was sent is withdrawn, and no rank ever hears of it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from kvferry.client.types import Directive
from kvferry.proto import limits
from kvferry.proto.columns import pack_u8, pack_u32, pack_u64
from kvferry.proto.hot import Step
from kvferry.proto.outcome import Ended

# Keys of one step, both directions together: well inside one frame, and far above any real step.
MAX_STEP_KEY_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class Job:
    """One store or load, as the engine asked for it. `keys` holds one key per block."""

    ticket: int
    request: int  # incarnation
    name: str  # the engine's name of the request
    group: int
    keys: bytes
    blocks: tuple[int, ...]
    lease: int = 0


@dataclass(slots=True)
class StepBatch:
    """The step being gathered."""

    stores: dict[int, Job] = field(default_factory=dict)
    loads: dict[int, Job] = field(default_factory=dict)
    failed_loads: dict[int, tuple[int, ...]] = field(default_factory=dict)
    ends: dict[int, Ended] = field(default_factory=dict)  # request incarnation -> why
    written: dict[int, None] = field(default_factory=dict)
    revoked: dict[int, None] = field(default_factory=dict)
    orphans: dict[int, None] = field(default_factory=dict)  # revoked too, but by a daemon that is gone: ranks only
    cancelled: dict[int, None] = field(default_factory=dict)  # stores and loads
    cancelled_loads: dict[int, None] = field(default_factory=dict)
    released: list[int] = field(default_factory=list)
    key_bytes: int = 0  # gathered so far
    since_ns: int = -1  # when the oldest end or release was gathered

    def has_room(self, nbytes: int, num_blocks: int) -> bool:
        """Whether a job of that many key bytes and blocks may join this step."""
        jobs = max(len(self.stores), len(self.loads))
        return (
            jobs < limits.MAX_JOBS
            and self.key_bytes + nbytes <= MAX_STEP_KEY_BYTES
            and num_blocks <= limits.MAX_KEYS >> 2
        )

    def add_store(self, job: Job) -> None:
        self.stores[job.ticket] = job
        self.key_bytes += len(job.keys)
        # Said before this store, a write of these blocks is what the store reads: it must not meet it. The
        # stores that such a write does meet are named in `revoked` already.
        for block in job.blocks:
            self.written.pop(block, None)

    def add_load(self, job: Job) -> None:
        self.loads[job.ticket] = job
        self.key_bytes += len(job.keys)

    def write(self, blocks: Iterable[int]) -> None:
        """New owners will write these blocks."""
        self.written.update(dict.fromkeys(blocks))

    def remove_store(self, ticket: int) -> None:
        """Take a store back that was not told yet."""
        self.key_bytes -= len(self.stores.pop(ticket).keys)

    def take_rest_of(self, told: "StepBatch") -> None:
        """Gather again what did not fit into the one message made of `told`."""
        for mine, theirs in ((self.revoked, told.revoked), (self.cancelled, told.cancelled)):
            mine.update(dict.fromkeys(list(theirs)[limits.MAX_JOBS :]))
        self.ends.update(list(told.ends.items())[limits.MAX_JOBS :])
        self.released += told.released[limits.MAX_JOBS :]

    def fail_loads(self) -> None:
        """Nobody will serve the loads gathered so far: the ranks report them failed."""
        for job in self.loads.values():
            self.failed_loads[job.ticket] = job.blocks
        self.loads.clear()

    def lost(self) -> None:
        """The daemon is gone: what only it could hear is dropped; the ranks still hear of revokes and cancels."""
        self.orphans.update(self.revoked)
        self.fail_loads()
        for gathered in (self.revoked, self.cancelled, self.ends, self.written, self.released):
            gathered.clear()

    @property
    def has_transfers(self) -> bool:
        return bool(self.stores or self.loads)

    def directive(self, step: int) -> Directive:
        """What the ranks must do."""
        return Directive(
            step=step,
            loads=tuple((job.ticket, job.blocks) for job in self.loads.values()),
            stores=tuple(self.stores),
            revokes=(*self.orphans, *self.revoked),
            cancels=tuple(self.cancelled_loads),
            failed_loads=tuple(self.failed_loads.items()),
        )

    def build(self, step: int, epoch: int, key_bytes: int) -> Step | None:
        """The message to the daemon; None if there is nothing to say."""
        stores, loads = self.stores.values(), self.loads.values()
        if not (stores or loads or self.ends or self.written or self.revoked or self.cancelled or self.released):
            return None
        return Step(
            step=step,
            epoch=epoch,
            key_bytes=key_bytes,
            store_tickets=pack_u64([job.ticket for job in stores]),
            store_requests=pack_u64([job.request for job in stores]),
            store_groups=pack_u8([job.group for job in stores]),
            store_counts=pack_u32([len(job.blocks) for job in stores]),
            store_keys=b"".join(job.keys for job in stores),
            store_blocks=pack_u32(list(chain.from_iterable(job.blocks for job in stores))),
            load_tickets=pack_u64([job.ticket for job in loads]),
            load_requests=pack_u64([job.request for job in loads]),
            load_leases=pack_u64([job.lease for job in loads]),
            load_groups=pack_u8([job.group for job in loads]),
            load_counts=pack_u32([len(job.blocks) for job in loads]),
            load_keys=b"".join(job.keys for job in loads),
            load_blocks=pack_u32(list(chain.from_iterable(job.blocks for job in loads))),
            end_requests=pack_u64(list(self.ends)[: limits.MAX_JOBS]),
            end_reasons=pack_u8(list(self.ends.values())[: limits.MAX_JOBS]),
            written=pack_u32(list(self.written)[: limits.MAX_KEYS]),
            revoked=pack_u64(list(self.revoked)[: limits.MAX_JOBS]),
            cancelled=pack_u64(list(self.cancelled)[: limits.MAX_JOBS]),
            released=pack_u64(self.released[: limits.MAX_JOBS]),
        )
