"""The tickets of one client: each is given once and ends once. Sans-IO.

    begin ──▶ open ──StepAnswer without a job─┐
                   ──JobsEnded────────────────┤
                   ──the ranks' words─────────┼──▶ one JobEnd
                   ──withdrawn, daemon lost───┘

A store reads its blocks until it ends: that is the fence. A load's blocks are its ranks' to give back, so
its end here says nothing of them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvferry.client.fence import FenceMirror
from kvferry.client.lookups import reason_of
from kvferry.client.types import ClientCounters, JobEnd
from kvferry.proto.columns import u8, u32, u64
from kvferry.proto.hot import JobsEnded, StepAnswer
from kvferry.proto.outcome import Kind, Outcome, Reason


@dataclass(slots=True)
class _Open:
    """A ticket whose JobEnd is due."""

    name: str
    kind: Kind
    num_keys: int
    accepted: int
    reason: Reason = Reason.NONE
    is_revoked: bool = False


class Transfers:
    """Open tickets, and ends that nobody fetched yet."""

    def __init__(self, counters: ClientCounters, tickets: Iterator[int]) -> None:
        self.fence = FenceMirror()
        self._counters = counters
        self._open: dict[int, _Open] = {}
        self._ended: list[JobEnd] = []
        self._untold: set[int] = set()  # loads that the ranks ended; the daemon's word on them is due
        self._tickets = tickets

    def begin_load(self, name: str, num_keys: int) -> int:
        """A new ticket."""
        ticket = next(self._tickets)
        self._open[ticket] = _Open(name, Kind.LOAD, num_keys, 0)
        return ticket

    def begin_store(self, name: str, blocks: tuple[int, ...]) -> int:
        """A new ticket, which reads these blocks from now on."""
        ticket = next(self._tickets)
        self._open[ticket] = _Open(name, Kind.STORE, len(blocks), len(blocks))
        self.fence.add(ticket, blocks)
        return ticket

    def end(self, ticket: int, outcome: Outcome) -> bool:
        """The one exit of every ticket; False if it had ended already."""
        job = self._open.pop(ticket, None)
        if job is None:
            return False
        if job.kind is Kind.STORE:
            self.fence.end(ticket)
        self._ended.append(JobEnd(ticket, job.name, job.kind, outcome, job.reason, job.accepted))
        return True

    def end_unaccepted(self, ticket: int, reason: Reason = Reason.NONE) -> None:
        """Withdrawn by us, or lost with its daemon: nothing of it is kept."""
        job = self._open[ticket]
        job.accepted, job.reason = 0, reason
        self.end(ticket, Outcome.CANCELLED)

    def end_by_ranks(self, ticket: int, ok: bool, *, daemon_will_tell: bool) -> None:
        """All ranks have given their word on a load."""
        if self.end(ticket, Outcome.OK if ok else Outcome.COPY_FAILED) and daemon_will_tell:
            self._untold.add(ticket)

    def losers(self, blocks: Iterable[int]) -> list[int]:
        """Stores that a write to these blocks would spoil and that are not revoked yet, in ticket order."""
        return [ticket for ticket in sorted(self.fence.readers(blocks)) if not self._open[ticket].is_revoked]

    def revoke(self, tickets: Iterable[int]) -> list[int]:
        """These stores lose; those of them that had not lost before."""
        fresh = [ticket for ticket in tickets if not self._open[ticket].is_revoked]
        for ticket in fresh:
            self._open[ticket].is_revoked = True
        self._counters.revokes += len(fresh)
        return fresh

    def answer(self, msg: StepAnswer) -> None:
        """What became of each ticket of one step."""
        columns = (u64(msg.tickets), u64(msg.jobs), u32(msg.accepted), u8(msg.reasons))
        for ticket, job_id, accepted, number in zip(*(column.tolist() for column in columns), strict=True):
            if job_id == 0:
                self._untold.discard(ticket)
            job = self._open.get(ticket)
            if job is None:
                continue  # the ranks ended it first
            job.accepted, job.reason = min(accepted, job.num_keys), reason_of(number)
            if job.reason is not Reason.NONE:
                refused, name = self._counters.refused, job.reason.name
                refused[name] = refused.get(name, 0) + job.num_keys - job.accepted
            if job_id == 0:
                is_held = job.reason is Reason.NONE and job.kind is Kind.STORE
                self.end(ticket, Outcome.OK if is_held else Outcome.CANCELLED)
            elif job.kind is Kind.STORE:
                self.fence.keep_first(ticket, job.accepted)
        self._counters.wait_for += len(msg.wait_for) // 8

    def jobs_ended(self, msg: JobsEnded) -> None:
        """The daemon says that these are over."""
        for ticket, number in zip(u64(msg.tickets).tolist(), u8(msg.outcomes).tolist(), strict=True):
            if not self.end(ticket, _outcome_of(number)) and ticket not in self._untold:
                self._counters.stale += 1
            self._untold.discard(ticket)

    def lost(self) -> None:
        """The daemon is gone: stores end, loads are left to their ranks' words."""
        for ticket in self.fence.tickets():
            self._counters.lost_stores += 1
            self.end_unaccepted(ticket, Reason.OFF)
        self._untold.clear()

    def poll(self) -> list[JobEnd]:
        """Ends since the last call."""
        ended, self._ended = self._ended, []
        return ended


def _outcome_of(number: int) -> Outcome:
    """The outcome of that number; a failure for one that this build does not know."""
    return Outcome(number) if number in Outcome._value2member_map_ else Outcome.COPY_FAILED
