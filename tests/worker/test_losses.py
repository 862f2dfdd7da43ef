"""What the worker's core does when its rank or its daemon is gone, and when a daemon is found again."""

import pytest

from kvferry.gpu_worker.api import DaemonFound, DaemonLost, RankLost
from kvferry.proto.ids import make_job_id
from kvferry.proto.outcome import Outcome
from tests.worker.fakes import BLOCK_BYTES, LOAD, SECOND, STORE, WAITING, Bench, begun


@pytest.mark.parametrize("state", WAITING)
def test_what_waits_is_discarded_when_the_rank_is_lost(bench, state):
    state(bench)
    told = len(bench.words)
    bench.step(RankLost())
    assert ((101, Outcome.ENGINE_GONE) in bench.dones) is (state is not begun)
    bench.run_dry()
    assert len(bench.words) == told and bench.core.at_rest()
    assert Outcome.OK not in [outcome for _, outcome in bench.dones]


@pytest.mark.parametrize("kind", [STORE, LOAD])
def test_running_copies_drain_and_are_never_ok_after_the_rank_is_lost(kind):
    bench = Bench(batch_bytes=BLOCK_BYTES)
    bench.headers.hold(range(8), 1)
    bench.plan(1, kind, range(8))
    bench.begin(1)
    bench.step(RankLost())
    assert bench.dones == [] and not bench.core.at_rest()
    bench.copied()
    bench.copied()
    assert bench.running == [] and bench.core.at_rest()
    assert bench.dones == [(101, Outcome.ENGINE_GONE)] and bench.words == []


def test_a_plan_that_comes_after_the_rank_was_lost_is_answered(bench):
    """Case 21: a late message about something that is gone is a counted answer, never an error."""
    bench.step(RankLost())
    bench.plan(1, STORE, [4])
    bench.begin(1)
    bench.cancel_tickets(1)
    assert bench.dones == [(101, Outcome.ENGINE_GONE)] and bench.words == []
    bench.plan(1, STORE, [4])
    assert len(bench.dones) == 1, "a repeated plan is counted and changes nothing"


def test_a_begun_ticket_without_a_plan_is_counted_as_neither_kind(bench):
    """Nobody here knows what it was to be; as a load it would be counted where it may have been a store."""
    bench.begin(9)
    bench.step(RankLost())
    counters = bench.core.describe()["counters"]
    assert counters == {"begin_engine_gone": 1}


def test_begun_loads_outlive_the_daemon_and_nothing_else_does(bench):
    bench.headers.hold([1, 2], 1)
    bench.plan(1, LOAD, [1])
    bench.plan(2, LOAD, [2])
    bench.plan(3, STORE, [3])
    bench.plan(4, LOAD, [4])
    bench.begin(1, 3)
    bench.begin(2, mark=bench.engine.mark() + 1)
    bench.begin(9)
    bench.step(DaemonLost())
    assert bench.words == [(9, LOAD, Outcome.NOT_PLANNED, ())]
    bench.engine.signal()
    bench.pass_time()
    bench.run_dry()
    assert sorted(bench.words[1:]) == [
        (1, LOAD, Outcome.OK, ()),
        (2, LOAD, Outcome.OK, ()),
        (3, STORE, Outcome.CANCELLED, ()),
    ]
    bench.begin(10)
    assert bench.words[-1] == (10, LOAD, Outcome.NOT_PLANNED, ())
    assert bench.dones == [] and bench.core.at_rest()


def test_a_begun_load_waits_for_its_mark_no_longer_than_two_seconds_once_the_daemon_is_gone(bench):
    """The next boot gives no slot away until this is over: a rank that hangs must not hold it up."""
    bench.plan(1, LOAD, [4])
    bench.begin(1, mark=1)
    bench.step(DaemonLost())
    bench.pass_time(2 * SECOND)
    assert bench.words == [(1, LOAD, Outcome.NOT_BEGUN, (4,))]
    assert bench.core.at_rest()


def test_a_found_daemon_is_planned_for_anew(bench):
    """Rule 10, rule 11: its decisions count from zero, and a begin may come before its first plan."""
    bench.headers.hold([4], 1)
    bench.planned_to(1000)
    bench.step(DaemonLost())
    bench.step(DaemonFound(boot=7))
    bench.begin(5)
    assert bench.words == []
    bench.plan(5, LOAD, [4], job=make_job_id(7, 1))
    bench.run_dry()
    assert bench.words == [(5, LOAD, Outcome.OK, ())]
    assert bench.dones == [(make_job_id(7, 1), Outcome.OK)]


def test_a_plan_of_another_boot_is_refused_whole_and_told_to_nobody(bench):
    """Rule 11: its slots may be somebody else's by now."""
    bench.step(DaemonLost())
    bench.step(DaemonFound(boot=7))
    bench.begin(5)
    bench.plan(5, STORE, [4], job=make_job_id(6, 1))
    assert bench.running == bench.words == bench.dones == []
    assert bench.core.counters == {"plans_of_other_boots": 1}
    bench.pass_time(2 * SECOND)
    assert bench.words == [(5, LOAD, Outcome.NOT_PLANNED, ())]


def test_what_a_lost_daemon_planned_is_never_told_to_the_next(bench):
    """Also not what still copies: only its word goes to the rank."""
    bench.headers.hold([4], 1)
    bench.plan(1, LOAD, [4])
    bench.plan(2, STORE, [5])
    bench.begin(1, 2)
    bench.step(DaemonLost())
    assert not bench.core.at_rest()
    bench.step(DaemonFound(boot=7))
    bench.run_dry()
    assert bench.words == [(1, LOAD, Outcome.OK, ()), (2, STORE, Outcome.CANCELLED, ())]
    assert bench.dones == [] and bench.core.at_rest()
    assert bench.headers.log == ["open"]
