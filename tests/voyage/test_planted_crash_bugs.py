"""Bugs planted on purpose that only deaths, stalls and broken links show."""

from typing import Any

import numpy as np
import pytest

from kvferry.client.core import ClientCore
from kvferry.client.rank_core import RankCore
from kvferry.gpu_worker.core import WorkerCore
from kvferry.proto.outcome import Outcome, Reason
from kvferry.scheduler_daemon.core import drain, ending, people, recovery, reset
from kvferry.scheduler_daemon.core.intake import Intake
from kvferry.scheduler_daemon.core.namespaces import Namespace
from kvferry.scheduler_daemon.core.slots import SlotState, checksums

from .memory import PoolFile
from .planting import Plant, find
from .table import TableBytes

DAEMON = ("daemon_crash", "daemon_crash_within")
ANY_BOOT = (*DAEMON, "sidecar_crash")
ENGINE = ("engine_crash", "cut_client")


def slots_are_given_away_before_all_have_drained(patch: pytest.MonkeyPatch) -> None:
    """Rule 10: the supervisor's list is read and forgotten."""

    def await_nobody(desk: Any, workers: Any) -> None:
        desk.list_awaited = False

    patch.setattr(recovery, "await_workers", await_nobody)


def a_worker_says_drained_while_it_copies(patch: pytest.MonkeyPatch) -> None:
    """Rule 10: the worker takes its own word for rest too early."""
    patch.setattr(WorkerCore, "at_rest", lambda self: True)


def what_was_being_written_is_served(patch: pytest.MonkeyPatch) -> None:
    """WRITING records are taken for READY ones."""
    recover = recovery.recover

    def recover_all(desk: Any, left: Any) -> None:
        writing = np.flatnonzero(left.table["state"] == SlotState.WRITING)
        left.table["state"][writing] = SlotState.READY
        left.table["checksum"][writing] = checksums(left.table[writing])
        recover(desk, left)

    patch.setattr(recovery, "recover", recover_all)


def torn_records_are_served(patch: pytest.MonkeyPatch) -> None:
    """The checksum of a record is not looked at."""
    patch.setattr(recovery, "sound", lambda table: table["format"] == 1)


def recovered_keys_are_dropped(patch: pytest.MonkeyPatch) -> None:
    """A restart that forgets what it was promised to keep."""
    patch.setattr(recovery, "recover", lambda desk, left: None)


def generations_begin_anew_with_each_boot(patch: pytest.MonkeyPatch) -> None:
    """Rule 4: the next boot goes on from the highest generation that it can read."""
    patch.setattr(recovery, "BOOT_SHIFT", 0)


def headers_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    """A load does not look at its slots' generations."""
    patch.setattr(PoolFile, "torn", lambda self, slots, generations: np.zeros(0, dtype=np.uint32))


def epochs_are_not_put_on_record(patch: pytest.MonkeyPatch) -> None:
    """Rule 12: a reset lasts as long as its daemon."""
    patch.setattr(TableBytes, "keep_epochs", lambda self, epochs: None)


def a_reset_keeps_its_epoch(patch: pytest.MonkeyPatch) -> None:
    """Rule 12: the keys are dropped under the old number."""
    patch.setattr(reset, "_reset", lambda desk, space, epoch: Namespace.begin_epoch(space, space.epoch))


def a_reset_forgets_the_jobs_under_way(patch: pytest.MonkeyPatch) -> None:
    """Rule 12: what the old epoch was storing is published."""
    patch.setattr(reset, "void", lambda desk, job, cause: None)


def a_killed_worker_counts_as_dead(patch: pytest.MonkeyPatch) -> None:
    """Law 1: the kill is taken for the reap, and the stopped worker's slots are given away."""
    kill = ending.kill

    def bury_at_once(desk: Any, worker: Any, why: str) -> None:
        kill(desk, worker, why)
        ending.worker_ended(desk, worker, Outcome.WORKER_DIED)

    patch.setattr(ending, "kill", bury_at_once)


def a_lost_link_is_taken_for_death(patch: pytest.MonkeyPatch) -> None:
    """Law 1: the notice is taken for the proof."""
    leave = people.leave

    def bury_at_once(desk: Any, worker: Any) -> None:
        leave(desk, worker)
        ending.worker_ended(desk, worker, Outcome.WORKER_DIED)

    patch.setattr(people, "leave", bury_at_once)


def old_jobs_expect_the_new_worker(patch: pytest.MonkeyPatch) -> None:
    """Rule 5: a rank that re-attaches takes over what its last worker owed."""
    take_attach = people.take_attach

    def inherit(desk: Any, link: Any, attach: Any) -> None:
        take_attach(desk, link, attach)
        heir = desk.worker_links.get(link)
        for job in desk.jobs if heir is not None else ():
            if job.session.engine is heir.engine:
                job.workers = tuple(heir if worker.rank == heir.rank else worker for worker in job.workers)

    patch.setattr(people, "take_attach", inherit)


def loads_fail_with_the_tether(patch: pytest.MonkeyPatch) -> None:
    """Rule 1: the rank takes its tether's end for its worker's death."""
    lost = RankCore.lost

    def give_up(self: RankCore) -> None:
        worker = self.worker
        lost(self)
        if worker:
            self.dead(worker)

    patch.setattr(RankCore, "lost", give_up)


def a_lost_clients_stores_are_published(patch: pytest.MonkeyPatch) -> None:
    """Rule 8: a closed incarnation's jobs go on."""

    def void(desk: Any, job: Any, cause: Outcome) -> None:
        if cause is not Outcome.ENGINE_GONE:
            ending.void(desk, job, cause)

    patch.setattr(people, "void", void)


def a_lost_daemons_stores_are_not_revoked(patch: pytest.MonkeyPatch) -> None:
    """I3: the client forgets its stores with the link, though a daemon that lives on may publish them."""
    lost = ClientCore.lost

    def forget(self: ClientCore, now_ns: int) -> None:
        self._revoke = lambda tickets: None  # type: ignore[method-assign]
        try:
            lost(self, now_ns)
        finally:
            del self._revoke

    patch.setattr(ClientCore, "lost", forget)


def a_drain_is_answered_at_once(patch: pytest.MonkeyPatch) -> None:
    """Rest is told before it is there."""
    take_drain = drain.take_drain

    def answer_at_once(desk: Any, link: Any, ask: Any) -> None:
        take_drain(desk, link, ask)
        if desk.drain is not None:
            drain._answer(desk, desk.drain)

    patch.setattr(drain, "take_drain", answer_at_once)


def a_drain_goes_on_admitting(patch: pytest.MonkeyPatch) -> None:
    """Only lookups are turned away."""
    refusal = Intake._step_refusal

    def admit(self: Intake) -> Reason:
        reason = refusal(self)
        return Reason.NONE if reason is Reason.DRAINING and self._space is not None else reason

    patch.setattr(Intake, "_step_refusal", admit)


PLANTS: list[tuple[Plant, str, tuple[tuple[str, ...], ...]]] = [
    (slots_are_given_away_before_all_have_drained, "rule 10", (DAEMON,)),
    (a_worker_says_drained_while_it_copies, "rule 10", ((*DAEMON, "cut_worker"),)),
    (what_was_being_written_is_served, "crash: the table says|I1: load", (ANY_BOOT,)),
    (torn_records_are_served, "do not match their checksum", (ANY_BOOT,)),
    (recovered_keys_are_dropped, "rule 4", (ANY_BOOT,)),
    (generations_begin_anew_with_each_boot, "rule 4", (("daemon_crash_within",),)),
    (headers_are_not_compared, "I1", (("scribble",),)),
    (epochs_are_not_put_on_record, "crash", (("reset",), ANY_BOOT)),
    (a_reset_keeps_its_epoch, "rule 12", (("reset",),)),
    (a_reset_forgets_the_jobs_under_way, "AssertionError", (("reset",),)),
    (a_killed_worker_counts_as_dead, "law 1", (("worker_hang",),)),
    (a_lost_link_is_taken_for_death, "law 1", (("cut_worker", "cut_tether"),)),
    (old_jobs_expect_the_new_worker, "owing nothing|I2", (("worker_crash", "cut_tether"),)),
    (loads_fail_with_the_tether, "law 1", (("cut_tether",),)),
    (a_lost_clients_stores_are_published, "I2/I8", (ENGINE,)),
    (a_lost_daemons_stores_are_not_revoked, "I1", (("cut_client",),)),
    (a_drain_is_answered_at_once, "drain", (("drain",),)),
    (a_drain_goes_on_admitting, "drain", (("drain",),)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "promise", "needs"), PLANTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_bug_is_found(
    plant: Plant, promise: str, needs: tuple[tuple[str, ...], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    find(plant, promise, monkeypatch, needs)
