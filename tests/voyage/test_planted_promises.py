"""Every promise, law and rule of docs/architecture.md has a bug that breaks it, and the simulator finds it.

Most bugs stand in the files beside this one; here are those that a promise lacked, and the list of who breaks what.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from kvferry.proto.outcome import Outcome, Reason
from kvferry.scheduler_daemon.core import intake, people, steps
from kvferry.scheduler_daemon.core.ending import turn, void
from kvferry.scheduler_daemon.core.intake import Intake
from kvferry.scheduler_daemon.core.pool import HostPool
from kvferry.supervise import api as up
from kvferry.supervise.core import Supervisor

from . import test_planted_bugs, test_planted_crash_bugs, test_planted_stalls
from .planting import Plant, find

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


def a_repeated_step_is_taken_anew(patch: pytest.MonkeyPatch) -> None:
    """I5: the number of a step is not looked at."""
    take_step = steps.take_step

    def take_anew(desk: Any, session: Any, step: Any) -> None:
        session.last_step = None
        take_step(desk, session, step)

    patch.setattr(steps, "take_step", take_anew)


def a_dead_engine_takes_its_neighbours_jobs_along(patch: pytest.MonkeyPatch) -> None:
    """I7: the end of a client voids all jobs that the daemon has."""
    close = people.close_session

    def close_all(desk: Any, session: Any) -> None:
        close(desk, session)
        for job in list(desk.jobs):
            void(desk, job, Outcome.ENGINE_GONE)

    patch.setattr(people, "close_session", close_all)


def a_dead_worker_fails_the_jobs_of_its_rank(patch: pytest.MonkeyPatch) -> None:
    """I7: of every engine's."""

    def fail_all(desk: Any, worker: Any, outcome: Outcome) -> None:
        for job in list(desk.jobs):
            if worker.rank < len(job.workers) and (what := job.report(worker.rank, outcome)) is not None:
                turn(desk, job, what)

    patch.setattr(people, "worker_ended", fail_all)


def those_that_are_there_are_enough(patch: pytest.MonkeyPatch) -> None:
    """Rule 5: a step is taken while a rank is away, for the others."""
    refusal = Intake._step_refusal

    def admit(self: Intake) -> Reason:
        reason = refusal(self)
        return Reason.NONE if reason is Reason.RANKS_AWAY and self._workers and self._space is not None else reason

    patch.setattr(Intake, "_step_refusal", admit)


def jobs_wait_for_ever(patch: pytest.MonkeyPatch) -> None:
    """Rule 7: a job that nobody begins, or whose worker hangs, is never given up."""
    patch.setattr(intake, "set_deadline", lambda desk, job: None)


def a_lookups_own_hits_do_not_count(patch: pytest.MonkeyPatch) -> None:
    """Rule 9: leases are granted while there is room, and may then be any number."""
    patch.setattr(HostPool, "num_new_leases", lambda self, hits: 0)


def the_next_daemon_is_started_with_the_kill(patch: pytest.MonkeyPatch) -> None:
    """Rule 11: a daemon that hangs is killed, and taken for dead before it is reaped."""
    seen = Supervisor._seen

    def see_and_replace(self: Supervisor, child: int, vitals: Any) -> list[Any]:
        actions = seen(self, child, vitals)
        daemon = self._daemon()
        if daemon is not None and any(isinstance(action, up.Kill) and action.child == daemon.id for action in actions):
            actions = [*actions, up.SpawnDaemon(self._new_child(-1))]
        return actions

    patch.setattr(Supervisor, "_seen", see_and_replace)


def a_pin_is_counted_and_never_uncounted(patch: pytest.MonkeyPatch) -> None:
    """Rule 13: the sum of what is pinned goes up only."""
    unpin = HostPool.unpin

    def forget(self: HostPool, entries: Any) -> None:
        before = self.num_pinned
        unpin(self, entries)
        self.num_pinned = before

    patch.setattr(HostPool, "unpin", forget)


PLANTS: list[tuple[Plant, str, tuple[tuple[str, ...], ...]]] = [
    (a_repeated_step_is_taken_anew, "I5", ()),
    (a_dead_engine_takes_its_neighbours_jobs_along, "I7", (("engine_crash", "rank_crash", "cut_client"),)),
    (a_dead_worker_fails_the_jobs_of_its_rank, "I7", (("worker_crash", "engine_crash", "rank_crash"),)),
    (those_that_are_there_are_enough, "rule 5", (("worker_crash", "cut_tether"),)),
    (jobs_wait_for_ever, "rule 7", (("worker_hang",),)),
    (a_lookups_own_hits_do_not_count, "rule 9", ()),
    (the_next_daemon_is_started_with_the_kill, "rule 11", (("daemon_hang",),)),
    (a_pin_is_counted_and_never_uncounted, "keys are pinned", ()),
]

# Who breaks what, by the names of the page. A plant may stand at several.
BREAKS = {
    "I1": (
        "a_failed_copy_is_ok links_take_frames_as_they_come headers_are_not_compared"
        " what_was_being_written_is_served torn_records_are_served"
    ),
    "I2": "publish_at_the_first_rank count_reports_instead_of_ranks a_drain_goes_on_admitting",
    "I3": "no_fence no_revoke_in_the_page marks_are_not_waited_for a_lost_daemons_stores_are_not_revoked",
    "I4": "a_load_fails_with_its_first_rank a_rank_gives_a_late_load_up a_drain_is_answered_at_once",
    "I5": "a_repeated_step_is_taken_anew",
    "I6": "an_ended_lease_keeps_its_pins pins_do_not_hold a_chain_may_evict_itself",
    "I7": (
        "a_dead_engine_takes_its_neighbours_jobs_along a_dead_worker_fails_the_jobs_of_its_rank"
        " nobody_is_ever_hung spares_are_not_asked want_of_a_processor_is_taken_for_a_hang"
        " silence_is_measured_by_the_clock a_hung_daemon_is_killed_and_not_replaced"
        " a_spare_that_does_not_start_is_not_tried_again a_daemon_that_could_not_be_started_is_not_tried_again"
    ),
    "I8": "namespaces_are_ignored",
    "law 1": (
        "slots_are_freed_while_ranks_still_copy a_cancel_ends_a_running_copy a_killed_worker_counts_as_dead"
        " a_lost_link_is_taken_for_death"
    ),
    "law 2": "revokes_are_read_before_the_copy revokes_do_not_reach_the_daemons_jobs",
    "rule 1": "deadlines_end_loads loads_fail_with_the_tether",
    "rule 2": "no_fence revokes_are_read_before_the_copy",
    "rule 3": "marks_are_not_waited_for",
    "rule 4": "generations_begin_anew_with_each_boot",
    "rule 5": "those_that_are_there_are_enough old_jobs_expect_the_new_worker publish_at_the_first_rank",
    "rule 6": "links_take_frames_as_they_come",
    "rule 7": "jobs_wait_for_ever",
    "rule 8": "a_lost_clients_stores_are_published",
    "rule 9": "a_lookups_own_hits_do_not_count",
    "rule 10": (
        "slots_are_given_away_before_all_have_drained a_worker_says_drained_while_it_copies recovered_keys_are_dropped"
    ),
    "rule 11": "the_next_daemon_is_started_with_the_kill",
    "rule 12": "epochs_are_not_put_on_record a_reset_keeps_its_epoch a_reset_forgets_the_jobs_under_way",
    "rule 13": "a_pin_is_counted_and_never_uncounted",
}


def test_every_promise_law_and_rule_of_the_page_has_a_planted_bug_and_every_bug_breaks_one() -> None:
    page = PAGE.read_text()
    promises = re.findall(r"^\| (I\d) \w", page, re.MULTILINE)
    laws = page.split("Two laws carry")[1].split("\nA deadline")[0].count("\n* **")
    rules = re.findall(r"^(\d+)\. \*\*", page.split("## The rules")[1].split("\n## ")[0], re.MULTILINE)
    named = [*promises, *(f"law {n + 1}" for n in range(laws)), *(f"rule {n}" for n in rules)]
    assert list(BREAKS) == named
    files = (test_planted_bugs, test_planted_crash_bugs, test_planted_stalls)
    planted = {entry[0].__name__ for file in files for entry in file.PLANTS} | {entry[0].__name__ for entry in PLANTS}
    assert not planted - {name for names in BREAKS.values() for name in names.split()}, "it breaks nothing by name"
    for name, plants in BREAKS.items():
        assert planted & set(plants.split()), f"nothing is planted against {name}"


def test_where_the_simulator_has_a_promises_name_a_planted_bug_is_found_under_it() -> None:
    sources = "".join(path.read_text() for path in Path(__file__).parent.glob("[a-su-z]*.py"))
    spoken = set(re.findall(r"""["/](I\d|law \d|rule \d+)(?=[:/])""", sources))
    assert {f"I{n}" for n in range(1, 9)} <= spoken
    expected = {
        entry[0].__name__: entry[1]
        for plants in (test_planted_bugs.PLANTS, test_planted_crash_bugs.PLANTS, test_planted_stalls.PLANTS, PLANTS)
        for entry in plants
    }
    for name, plants in BREAKS.items():
        words = {expected.get(plant, "") for plant in plants.split()}
        if name in spoken:
            assert any(word.startswith(name) for word in words), f"{name}: found as {words}"
    living = {expected.get(plant) for plant in BREAKS["I7"].split()}
    assert {"liveness", "which lives"} <= living, "its other half: nobody is stopped, and who lives is not killed"
    assert all(expected.values()), "each bug is found for what it breaks, not for anything at all"


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "promise", "needs"), PLANTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_bug_is_found(
    plant: Plant, promise: str, needs: tuple[tuple[str, ...], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    find(plant, promise, monkeypatch, needs)
