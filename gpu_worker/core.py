"""What one worker does about plans, begins, marks, copies and cancels. Decides only: touches no byte of KV,
sends nothing, reads no clock.

    Plan ──┐                                   ┌─▶ SubmitCopy ─▶ device ─▶ Copied ──┐
           ├─▶ paired ─▶ marked ─▶ queue ──────┘                                    ▼
    Begin ─┘                         header guard before the first byte     after the last byte:
                                     (store: open; load: compare)           store: copy_ended, revokes, close
                                                                            load: compare again
                                                                                    │
                                                        one word per ticket, one done per job

Laws, each with a test:
  * nothing is submitted before its mark; nothing is OK without its last byte and its guard;
  * a store asks for revokes after its last byte, never before: a copy that read under a new owner's
    write can only be told by a revoke written before that write;
  * a ticket whose copy runs is over only when its last batch is, whatever was cancelled meanwhile;
  * each begun ticket gets one word, each planned job one done, in any order of messages;
  * what a daemon planned is told to no other: its jobs end in silence towards the next one.
"""

from typing import Any

import numpy as np

from kvferry.gpu_worker.api import (
    ORDER,
    Action,
    Begun,
    Copied,
    DaemonFound,
    DaemonLost,
    Event,
    JobsCancelled,
    Planned,
    RankLost,
    SharedPage,
    SlotHeaders,
    TicketsCancelled,
    TimePassed,
    WorkerSettings,
)
from kvferry.gpu_worker.guards import Guards, failed_blocks
from kvferry.gpu_worker.plans import PlannedJob, jobs_of, what_is_wrong
from kvferry.gpu_worker.queue import CopyQueue
from kvferry.gpu_worker.reports import Reports, microseconds
from kvferry.gpu_worker.tickets import RUNNING, Ending, Move, State, Tickets, Transfer
from kvferry.proto.columns import u64
from kvferry.proto.hot import Cancel, Plan
from kvferry.proto.ids import BootId, JobId, job_is_of_boot
from kvferry.proto.outcome import Kind, Outcome
from kvferry.proto.tether import Begin, CancelTickets


class WorkerCore:
    """The state of one worker that serves one rank.

    Invariants: a ticket is live or ended, never both; `COPYING` and `ABANDONED` tickets, and only they,
    have batches at the device or in the queue behind their first one.
    """

    def __init__(self, settings: WorkerSettings, page: SharedPage, headers: SlotHeaders) -> None:
        self._settings = settings
        self._page = page
        self._guards = Guards(page, headers)
        self._tickets = Tickets()
        self._queue = CopyQueue(settings)
        self._reports = Reports()
        self._boot = BootId(settings.boot)
        self._planned_to = 0  # of this boot
        self._rank_lost = False
        self._daemon_lost = False
        self.counters: dict[str, int] = {}

    # ---- the door ------------------------------------------------------------------------------

    def step(self, event: Event, now_ns: int) -> list[Action]:
        """Take one event; the actions it leads to, at most one TellRank and one TellDaemon among them."""
        self._reports = Reports()
        match event:
            case Planned(message):
                self._on_plan(message, now_ns)
            case Begun(message):
                self._on_begin(message, now_ns)
            case Copied(token, ok):
                self._on_copied(token, ok, now_ns)
            case JobsCancelled(message):
                self._on_jobs_cancelled(message, now_ns)
            case TicketsCancelled(message):
                self._on_tickets_cancelled(message, now_ns)
            case RankLost():
                self._on_rank_lost(now_ns)
            case DaemonLost():
                self._on_daemon_lost(now_ns)
            case DaemonFound(boot):
                self._on_daemon_found(boot)
            case TimePassed():
                pass
        self._look_at_marks(now_ns)
        self._look_at_bounds(now_ns)
        actions: list[Action] = []
        self._fill_device(actions, now_ns)
        # Words first: what has ended is waited for, and planning the next copies takes its time.
        return self._reports.actions() + actions

    def next_due_ns(self, now_ns: int) -> int | None:
        """When to pass time at the latest; None if only events can change anything."""
        dues = [self._tickets.first_due_ns(state) for state in (State.PLANNED, State.BEGUN, State.PAIRED)]
        if self._tickets.count(State.PAIRED):
            dues.append(now_ns + self._settings.mark_poll_ns)
        known = [due for due in dues if due is not None]
        return max(min(known), now_ns) if known else None

    def at_rest(self) -> bool:
        """Whether no ticket is live and no batch runs."""
        return not len(self._tickets)

    def describe(self) -> dict[str, Any]:
        """Gauges and counters, for status and logs."""
        return {
            "states": {state.name.lower(): self._tickets.count(state) for state in State if state is not State.ENDED},
            "waiting": {kind.name.lower(): self._queue.waiting(kind) for kind in Kind},
            "batches_in_flight": {kind.name.lower(): self._queue.running(kind) for kind in Kind},
            "bytes_in_flight": {kind.name.lower(): self._queue.bytes_running(kind) for kind in Kind},
            "planned_to": self._planned_to,
            "revoke_overruns": self._guards.overruns,
            "counters": dict(self.counters),
        }

    # ---- plans and begins meet -----------------------------------------------------------------

    def _on_plan(self, message: Plan, now_ns: int) -> None:
        if not self._is_of_this_boot(message):
            self._count("plans_of_other_boots")
            return
        for job in jobs_of(message):
            self._take_plan(job, now_ns)
        self._planned_to = max(self._planned_to, message.planned_to)
        # What was begun and decided, but not planned, was refused: it ends now and not by its bound.
        for transfer in self._tickets.in_state(State.BEGUN):
            if transfer.ticket <= self._planned_to:
                self._end(transfer, Outcome.NOT_PLANNED, now_ns)

    def _is_of_this_boot(self, message: Plan) -> bool:
        """Whether the daemon that we serve made this. One without jobs names no boot: its link vouches for it."""
        return not self._boot or all(job_is_of_boot(JobId(job), self._boot) for job in u64(message.jobs).tolist())

    def _take_plan(self, job: PlannedJob, now_ns: int) -> None:
        transfer = self._tickets.get(job.ticket)
        ending = self._tickets.ending(job.ticket)
        if transfer is not None and transfer.job:
            if transfer.job == job.job:
                self._count("repeated_plans")
            else:
                self._refuse(job, Outcome.BAD_PLAN)
            return
        if transfer is None and ending is not None:
            if ending.job == job.job:
                self._count("repeated_plans")
            elif ending.job:
                self._refuse(job, Outcome.BAD_PLAN)
            else:
                self._count("plans_for_tombstones")
                self._refuse(job, Outcome.CANCELLED)
                self._tickets.remember(job.ticket, Ending(job.job, ending.kind, ending.outcome, ending.is_told))
            return
        if self._rank_lost:
            self._refuse(job, Outcome.ENGINE_GONE)
            self._tickets.remember(job.ticket, Ending(job.job, job.kind, Outcome.ENGINE_GONE, is_told=False))
            return
        wrong = what_is_wrong(job, self._settings)
        if wrong:
            self._count("bad_plans")
        if transfer is None:
            transfer = Transfer(job.ticket, State.PLANNED, now_ns + self._settings.unbegun_ns, job=job.job)
            self._adopt(transfer, job)
            self._tickets.add(transfer)
        else:
            self._adopt(transfer, job)
            self._tickets.planned(transfer)
            self._tickets.move(transfer, Move.PLAN, now_ns + self._settings.mark_ns)
        if wrong:
            self._end(transfer, Outcome.BAD_PLAN, now_ns)

    @staticmethod
    def _adopt(transfer: Transfer, job: PlannedJob) -> None:
        transfer.job, transfer.kind, transfer.group = job.job, job.kind, job.group
        transfer.slots, transfer.generations, transfer.blocks = job.slots, job.generations, job.blocks

    def _refuse(self, job: PlannedJob, outcome: Outcome) -> None:
        """End a planned job that never became a transfer."""
        self._reports.done(job.job, outcome)

    def _on_begin(self, message: Begin, now_ns: int) -> None:
        if self._rank_lost:
            return
        for ticket in u64(message.tickets).tolist():
            self._begin_one(ticket, message.mark, now_ns)

    def _begin_one(self, ticket: int, mark: int, now_ns: int) -> None:
        transfer = self._tickets.get(ticket)
        if transfer is not None and transfer.is_begun:
            self._count("repeated_begins")
            return
        if transfer is None:
            ending = self._tickets.ending(ticket)
            if ending is not None and ending.is_told:
                self._count("repeated_begins")
                return
            if ending is not None or ticket <= self._planned_to or self._daemon_lost:
                known = ending or Ending(0, Kind.LOAD, Outcome.NOT_PLANNED, is_told=False)
                self._reports.word(ticket, known.kind, known.outcome)
                self._tickets.remember(ticket, Ending(known.job, known.kind, known.outcome, is_told=True))
                self._count("begins_without_plan")
                return
            transfer = Transfer(ticket, State.BEGUN, now_ns + self._settings.begin_ns)
            self._tickets.add(transfer)
        else:
            self._tickets.move(transfer, Move.BEGIN, now_ns + self._settings.mark_ns)
        transfer.is_begun, transfer.mark, transfer.begun_ns = True, mark, now_ns

    # ---- marks, bounds, the queue --------------------------------------------------------------

    def _look_at_marks(self, now_ns: int) -> None:
        paired = self._tickets.in_state(State.PAIRED)
        if not paired:
            return
        reached = self._page.mark()
        for transfer in paired:
            if transfer.mark <= reached:
                self._tickets.move(transfer, Move.MARK)
                transfer.to_copy = np.arange(len(transfer.blocks), dtype=np.uint32)
                self._queue.push(transfer)

    def _look_at_bounds(self, now_ns: int) -> None:
        for state, outcome in (
            (State.PLANNED, Outcome.NOT_BEGUN),
            (State.BEGUN, Outcome.NOT_PLANNED),
            (State.PAIRED, Outcome.NOT_BEGUN),
        ):
            due = self._tickets.first_due_ns(state)
            if due is None or due > now_ns:
                continue
            for transfer in self._tickets.in_state(state):
                if transfer.due_ns <= now_ns:
                    self._count("ended_by_bound")
                    self._end(transfer, outcome, now_ns)

    def _fill_device(self, actions: list[Action], now_ns: int) -> None:
        for kind in ORDER:
            while (transfer := self._queue.head(kind)) is not None:
                if transfer.state is State.READY:
                    if transfer.kind is Kind.STORE and self._guards.is_revoked(transfer):
                        self._end(transfer, Outcome.REVOKED, now_ns)  # spares a copy; proves nothing for others
                        continue
                    self._tickets.move(transfer, Move.START)
                    transfer.submitted_ns = now_ns
                    self._guards.before_the_first_byte(transfer)
                    if not len(transfer.to_copy):
                        self._queue.remove(transfer)
                        self._over(transfer, now_ns)
                        continue
                actions.append(self._queue.next_batch(transfer))

    # ---- ends ----------------------------------------------------------------------------------

    def _on_copied(self, token: int, ok: bool, now_ns: int) -> None:
        ended = self._queue.copied(token)
        if ended is None:
            self._count("unknown_copies")
            return
        transfer, positions = ended
        if ok and transfer.kind is Kind.LOAD:
            transfer.arrived.append(positions)
        if not ok:
            self._count("failed_batches")
            if transfer.outcome is Outcome.OK:
                transfer.outcome = Outcome.COPY_FAILED
            if transfer.state is State.COPYING and not transfer.is_submitted:
                self._abandon(transfer, Outcome.COPY_FAILED, now_ns)
                return
        if transfer.is_submitted and not transfer.num_running:
            self._over(transfer, now_ns)

    def _over(self, transfer: Transfer, now_ns: int) -> None:
        """The last byte has been moved: judge the copy, then report it."""
        self._guards.after_the_last_byte(transfer)
        self._report(transfer, transfer.outcome, now_ns)
        self._tickets.move(transfer, Move.OVER)

    def _end(self, transfer: Transfer, outcome: Outcome, now_ns: int) -> None:
        """End a ticket that is not being copied: nothing of it touches memory."""
        transfer.outcome = outcome
        self._report(transfer, outcome, now_ns)
        self._queue.remove(transfer)
        self._tickets.move(transfer, Move.DROP)

    def _abandon(self, transfer: Transfer, outcome: Outcome, now_ns: int) -> None:
        """Copy nothing more of it; what runs ends first."""
        transfer.outcome = outcome
        self._queue.remove(transfer)
        self._tickets.move(transfer, Move.DROP)
        if not transfer.num_running:
            self._over(transfer, now_ns)

    def _drop(self, transfer: Transfer, outcome: Outcome, now_ns: int) -> None:
        """End it as soon as it is safe."""
        if transfer.state is State.COPYING:
            self._abandon(transfer, outcome, now_ns)
        elif transfer.state not in RUNNING:
            self._end(transfer, outcome, now_ns)

    def _report(self, transfer: Transfer, outcome: Outcome, now_ns: int) -> None:
        copy_us = microseconds(transfer.submitted_ns, now_ns)
        is_told = transfer.is_begun and not self._rank_lost
        if transfer.job and not transfer.is_orphan:
            self._reports.done(transfer.job, outcome, copy_us)
        if is_told:
            wait_us = microseconds(transfer.begun_ns, transfer.submitted_ns or now_ns)
            failed = failed_blocks(transfer).tolist()
            self._reports.word(transfer.ticket, transfer.kind, outcome, wait_us, copy_us, failed)
        self._tickets.remember(transfer.ticket, Ending(transfer.job, transfer.kind, outcome, is_told))
        self._page.forget([transfer.ticket])
        # Without its plan nobody here knows whether a begun ticket is a load or a store.
        what = transfer.kind.name.lower() if transfer.job else "begin"
        self._count(f"{what}_{outcome.name.lower()}")

    # ---- cancels and losses --------------------------------------------------------------------

    def _on_jobs_cancelled(self, message: Cancel, now_ns: int) -> None:
        for job in u64(message.jobs).tolist():
            transfer = self._tickets.of_job(job)
            if transfer is None:
                self._count("late_cancels")
            else:
                self._drop(transfer, Outcome.CANCELLED, now_ns)

    def _on_tickets_cancelled(self, message: CancelTickets, now_ns: int) -> None:
        if self._rank_lost:
            return
        for ticket in u64(message.tickets).tolist():
            transfer = self._tickets.get(ticket)
            if transfer is not None:
                transfer.is_begun = True  # named by the rank: it is owed its word, begun or not
                self._drop(transfer, Outcome.CANCELLED, now_ns)
                continue
            ending = self._tickets.ending(ticket)
            if ending is not None and ending.is_told:
                self._count("late_cancels")
                continue
            known = ending or Ending(0, Kind.LOAD, Outcome.CANCELLED, is_told=False)
            self._reports.word(ticket, known.kind, known.outcome)
            self._tickets.remember(ticket, Ending(known.job, known.kind, known.outcome, is_told=True))

    def _on_rank_lost(self, now_ns: int) -> None:
        self._rank_lost = True
        for transfer in list(self._tickets):
            self._drop(transfer, Outcome.ENGINE_GONE, now_ns)

    def _on_daemon_lost(self, now_ns: int) -> None:
        self._daemon_lost = True
        for transfer in list(self._tickets):
            transfer.is_orphan = True
            if transfer.state is State.BEGUN:
                self._end(transfer, Outcome.NOT_PLANNED, now_ns)
            elif transfer.state is State.PLANNED:
                self._end(transfer, Outcome.NOT_BEGUN, now_ns)
            elif transfer.kind is Kind.STORE:
                # Nobody is left to publish it.
                self._drop(transfer, Outcome.CANCELLED, now_ns)
            elif transfer.state is State.PAIRED:
                # The next daemon takes no store until this is over: a rank that hangs must not hold it up for long.
                transfer.due_ns = min(transfer.due_ns, now_ns + self._settings.orphan_ns)

    def _on_daemon_found(self, boot: int) -> None:
        self._boot = BootId(boot)
        self._planned_to = 0
        self._daemon_lost = False

    def _count(self, name: str) -> None:
        self.counters[name] = self.counters.get(name, 0) + 1
