"""Bugs planted on purpose: a simulator that finds none of these is worth nothing.

Each plant is a small change to a real core, of the kind that somebody makes while tidying up. The
simulator must find it within a few dozen seeds.
"""

from collections.abc import Iterable
from typing import Any

import pytest

from kvferry.client.fence import FenceMirror
from kvferry.client.rank_core import RankCore
from kvferry.gpu_worker.api import Copied, JobsCancelled, TellDaemon
from kvferry.gpu_worker.core import WorkerCore
from kvferry.proto.columns import pack_u8, pack_u32, pack_u64, u64
from kvferry.proto.hot import Done
from kvferry.proto.link import FrameKind, Link
from kvferry.proto.outcome import Kind, Outcome
from kvferry.proto.page import PageReader
from kvferry.proto.tether import CancelTickets, Words
from kvferry.scheduler_daemon.core import engines, jobs, steps
from kvferry.scheduler_daemon.core.desk import Desk
from kvferry.scheduler_daemon.core.jobs import Effect, State, TransferJobStatus, Turn
from kvferry.scheduler_daemon.core.pool import HostPool

from .planting import Plant, find


def publish_at_the_first_rank(patch: pytest.MonkeyPatch) -> None:
    """Completion counted on one rank instead of all."""

    def report(self: TransferJobStatus, rank: int, outcome: Outcome) -> Turn | None:
        if self.reported:
            return None
        self.reported = self.expected
        return Turn.LAST_OK if outcome is Outcome.OK else Turn.LAST_FAILED

    patch.setattr(TransferJobStatus, "report", report)


def count_reports_instead_of_ranks(patch: pytest.MonkeyPatch) -> None:
    """A repeated report counts twice."""
    counts: dict[int, int] = {}

    def report(self: TransferJobStatus, rank: int, outcome: Outcome) -> Turn:
        counts[self.id] = counts.get(self.id, 0) + 1
        self.reported |= 1 << rank
        if outcome is not Outcome.OK:
            self.blame(outcome)
        last = counts[self.id] == len(self.workers)
        if last:
            self.reported = self.expected
        if outcome is Outcome.OK:
            return Turn.LAST_OK if last else Turn.PROGRESS
        return Turn.LAST_FAILED if last else Turn.FAILED

    patch.setattr(TransferJobStatus, "report", report)


def no_fence(patch: pytest.MonkeyPatch) -> None:
    """The client's mirror forgets which blocks stores read: nothing is revoked."""
    patch.setattr(FenceMirror, "readers", lambda self, blocks: set())


def no_revoke_in_the_page(patch: pytest.MonkeyPatch) -> None:
    """The worker never looks at the revokes and leaves them to the daemon."""
    patch.setattr(PageReader, "revoked", lambda self, tickets: set())


def revokes_are_read_before_the_copy(patch: pytest.MonkeyPatch) -> None:
    """The worker judges a store by what it had read of the revokes when it last looked."""
    look = PageReader.revoked
    known: dict[int, set[int]] = {}

    def last_look(self: PageReader, tickets: Iterable[int]) -> set[int]:
        before = known.get(id(self), set())
        known[id(self)] = look(self, range(1, 1000))
        return set(tickets) & before

    patch.setattr(PageReader, "revoked", last_look)


def marks_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """A begin is taken as leave to copy at once."""
    patch.setattr(PageReader, "mark", lambda self: 1 << 62)


def slots_are_freed_while_ranks_still_copy(patch: pytest.MonkeyPatch) -> None:
    """A revoked store gives its slots back with its answer."""
    abandon, let_go = HostPool.abandon, HostPool.let_go

    def free_at_once(self: HostPool, entries: Any, slots: Any) -> None:
        abandon(self, entries, slots)
        let_go(self, slots)

    patch.setattr(HostPool, "abandon", free_at_once)
    patch.setattr(HostPool, "let_go", lambda self, slots: None)


def a_load_fails_with_its_first_rank(patch: pytest.MonkeyPatch) -> None:
    """The daemon tells that a load failed while other ranks still write its blocks."""
    at_once = (State.OVER, (Effect.TELL, Effect.CANCEL, Effect.RELEASE))
    patch.setitem(jobs.NEXT, (Kind.LOAD, State.COPYING, Turn.FAILED), at_once)


def pins_do_not_hold(patch: pytest.MonkeyPatch) -> None:
    """What a load reads stays in the list of what may be evicted; the daemon's own sums are kept quiet."""

    def pin(self: HostPool, entries: Any) -> None:
        for entry in entries:
            self.num_pinned += not entry.pins
            entry.pins += 1

    def unpin(self: HostPool, entries: Any) -> None:
        for entry in entries:
            entry.pins -= 1
            self.num_pinned -= not entry.pins

    patch.setattr(HostPool, "pin", pin)
    patch.setattr(HostPool, "unpin", unpin)
    patch.setattr("kvferry.scheduler_daemon.core.status.check", lambda desk: None)


def namespaces_are_ignored(patch: pytest.MonkeyPatch) -> None:
    """Model and salt are left out of the identity."""
    patch.setattr(engines, "identity", lambda **facts: "00" * 32)


def a_failed_copy_is_ok(patch: pytest.MonkeyPatch) -> None:
    """The device's error is dropped on the way."""
    step = WorkerCore.step

    def all_is_well(self: WorkerCore, event: Any, now_ns: int) -> Any:
        return step(self, Copied(event.token, True) if isinstance(event, Copied) else event, now_ns)

    patch.setattr(WorkerCore, "step", all_is_well)


def a_cancel_ends_a_running_copy(patch: pytest.MonkeyPatch) -> None:
    """Cancelled while it copies: reported at once, though the device goes on writing."""
    step = WorkerCore.step

    def report_at_once(self: WorkerCore, event: Any, now_ns: int) -> Any:
        actions = step(self, event, now_ns)
        if isinstance(event, JobsCancelled) and not any(isinstance(action, TellDaemon) for action in actions):
            jobs = u64(event.message.jobs).tolist()
            cancelled = pack_u8([Outcome.CANCELLED] * len(jobs))
            done = Done(jobs=pack_u64(jobs), outcomes=cancelled, copy_us=pack_u32([0] * len(jobs)))
            actions = [*actions, TellDaemon(done)]
        return actions

    patch.setattr(WorkerCore, "step", report_at_once)


def a_rank_gives_a_late_load_up(patch: pytest.MonkeyPatch) -> None:
    """A cancelled load is taken as failed by the rank itself, without its worker's word."""
    outgoing = RankCore.outgoing

    def give_up(self: RankCore) -> list[Any]:
        messages = outgoing(self)
        for message in messages:
            if isinstance(message, CancelTickets):
                count = len(message.tickets) // 8
                columns = {"wait_us": pack_u32([0] * count), "copy_us": pack_u32([0] * count)}
                words = {"kinds": pack_u8([Kind.LOAD] * count), "outcomes": pack_u8([Outcome.CANCELLED] * count)}
                failed = pack_u32([0] * count)
                self.on_message(Words(tickets=message.tickets, **words, **columns, failed_counts=failed), self.worker)
        return messages

    patch.setattr(RankCore, "outgoing", give_up)


def links_take_frames_as_they_come(patch: pytest.MonkeyPatch) -> None:
    """Repeats and gaps are not looked at."""
    receive = Link.receive

    def take_all(self: Link, frame: Any, now_ns: int) -> list[bytes]:
        receive(self, frame, now_ns)
        return [frame.body] if frame.kind is FrameKind.DATA else []

    patch.setattr(Link, "receive", take_all)


def revokes_do_not_reach_the_daemons_jobs(patch: pytest.MonkeyPatch) -> None:
    """The daemon publishes what the engine has revoked and written over."""
    patch.setattr(steps, "void", lambda desk, job, cause: None)


def a_chain_may_evict_itself(patch: pytest.MonkeyPatch) -> None:
    """Held ancestors are not kept from eviction by their own chain."""
    reserve = HostPool.reserve
    patch.setattr(HostPool, "reserve", lambda self, index, keys, held, job: reserve(self, index, keys, [], job))


def an_ended_lease_keeps_its_pins(patch: pytest.MonkeyPatch) -> None:
    """Time ends a lease without unpinning what it held."""

    def forget(self: Desk, lease: Any) -> None:
        self.leases.remove(lease)
        lease.owner.requests.unlease(lease.request, lease.group, lease.id)

    patch.setattr(Desk, "end_lease", forget)


def deadlines_end_loads(patch: pytest.MonkeyPatch) -> None:
    """A load past its deadline is over for the daemon, whatever still copies."""
    over = (State.OVER, (Effect.TELL, Effect.CANCEL, Effect.RELEASE))
    patch.setitem(jobs.NEXT, (Kind.LOAD, State.COPYING, Turn.VOIDED), over)


PLANTS: list[tuple[Plant, str]] = [
    (publish_at_the_first_rank, "I2: job"),
    (count_reports_instead_of_ranks, "I2: job"),
    (no_fence, "I3"),
    (no_revoke_in_the_page, "I3"),
    (revokes_are_read_before_the_copy, "I3"),
    (marks_are_not_waited_for, "before its mark"),
    (slots_are_freed_while_ranks_still_copy, "slots in quarantine by jobs"),
    (a_load_fails_with_its_first_rank, "I4: load"),
    (pins_do_not_hold, "I6"),
    (namespaces_are_ignored, "I8"),
    (a_failed_copy_is_ok, "I1"),
    (a_cancel_ends_a_running_copy, "I4"),
    (a_rank_gives_a_late_load_up, "law 1"),
    (links_take_frames_as_they_come, "message.unexpected"),
    (revokes_do_not_reach_the_daemons_jobs, "I3"),
    (a_chain_may_evict_itself, "before it in its chain"),
    (an_ended_lease_keeps_its_pins, "pins, held"),
    (deadlines_end_loads, "I4: load"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "promise"), PLANTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_bug_is_found(plant: Plant, promise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find(plant, promise, monkeypatch)
