"""How the worker's core pairs plans and begins, and which plans it refuses. Time is an argument."""

import pytest

from kvferry.proto.outcome import Outcome
from tests.worker.fakes import LOAD, SECOND, STORE

# ---- plan and begin meet -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [STORE, LOAD])
@pytest.mark.parametrize("plan_first", [True, False])
def test_plan_and_begin_pair_in_either_order(bench, kind, plan_first):
    bench.headers.hold([4, 5], 1)
    if plan_first:
        bench.plan(1, kind, [4, 5])
        assert bench.running == []
        bench.begin(1)
    else:
        bench.begin(1)
        assert bench.running == []
        bench.plan(1, kind, [4, 5])
    (batch,) = bench.running
    assert (batch.kind, batch.blocks.tolist(), batch.slots.tolist()) == (kind, [4, 5], [4, 5])
    bench.run_dry()
    assert bench.words == [(1, kind, Outcome.OK, ())]
    assert bench.dones == [(101, Outcome.OK)]
    assert bench.core.at_rest()


@pytest.mark.parametrize("kind", [STORE, LOAD])
def test_nothing_is_submitted_before_its_mark(bench, kind):
    """Case 1, case 3: bytes move only after the engine's own word about those blocks."""
    bench.headers.hold([4], 1)
    bench.plan(1, kind, [4])
    bench.begin(1, mark=2)
    bench.engine.signal()
    bench.pass_time(1_000_000)
    assert bench.running == [] and bench.headers.log == []
    bench.engine.signal()
    bench.pass_time(250_000)
    assert len(bench.running) == 1


def test_marks_are_looked_at_every_quarter_millisecond_while_one_is_awaited_and_never_otherwise(bench):
    assert bench.core.next_due_ns(bench.now_ns) is None
    bench.plan(1, LOAD, [4])
    bench.begin(1, mark=1)
    assert bench.core.next_due_ns(bench.now_ns) == bench.now_ns + 250_000
    bench.engine.signal()
    bench.pass_time()
    bench.run_dry()
    assert bench.core.next_due_ns(bench.now_ns) is None


def test_a_begin_that_was_decided_and_has_no_plan_ends_at_once(bench):
    """Rule 6: a refused ticket needs no bound; the rank knows its blocks, so none are named."""
    bench.planned_to(5)
    bench.begin(3)
    assert bench.words == [(3, LOAD, Outcome.NOT_PLANNED, ())]
    assert bench.dones == []
    assert bench.core.at_rest()


def test_a_begin_ends_when_a_later_decision_passes_it_by(bench):
    bench.begin(3)
    assert bench.words == []
    bench.plan(4, LOAD, [9])
    assert bench.words == [(3, LOAD, Outcome.NOT_PLANNED, ())]


def test_a_begin_whose_plan_never_comes_ends_by_its_bound_and_refuses_the_late_plan(bench):
    bench.begin(3)
    due = bench.core.next_due_ns(bench.now_ns)
    assert due == bench.now_ns + 2 * SECOND
    bench.pass_time(2 * SECOND)
    assert bench.words == [(3, LOAD, Outcome.NOT_PLANNED, ())]
    bench.plan(3, LOAD, [9])
    assert bench.dones == [(103, Outcome.CANCELLED)]
    assert bench.running == [] and len(bench.words) == 1


def test_a_plan_that_nobody_begins_ends_by_its_bound_and_a_late_begin_still_gets_its_word(bench):
    bench.plan(3, STORE, [9])
    bench.pass_time(10 * SECOND)
    assert bench.dones == [(103, Outcome.NOT_BEGUN)] and bench.words == []
    bench.begin(3)
    assert bench.words == [(3, STORE, Outcome.NOT_BEGUN, ())]
    assert bench.headers.log == [] and len(bench.dones) == 1


def test_a_mark_that_never_comes_ends_both_sides(bench):
    bench.plan(3, LOAD, [9])
    bench.begin(3, mark=1)
    bench.pass_time(10 * SECOND)
    assert bench.words == [(3, LOAD, Outcome.NOT_BEGUN, (9,))]
    assert bench.dones == [(103, Outcome.NOT_BEGUN)]
    bench.engine.signal()
    bench.pass_time(SECOND)
    assert bench.running == [] and bench.core.at_rest()


def test_a_repeated_plan_and_a_repeated_begin_change_nothing(bench):
    """I5: while waiting, while copying, and after the end."""
    bench.headers.hold([4], 1)
    for _ in range(2):
        bench.plan(1, LOAD, [4])
    for _ in range(2):
        bench.begin(1)
    bench.plan(1, LOAD, [4])
    bench.run_dry()
    bench.plan(1, LOAD, [4])
    bench.begin(1)
    assert bench.words == [(1, LOAD, Outcome.OK, ())]
    assert bench.dones == [(101, Outcome.OK)]
    assert bench.core.counters["repeated_plans"] == 3
    assert bench.core.counters["repeated_begins"] == 2


def test_many_jobs_that_end_in_one_wake_up_are_told_in_one_message(bench):
    bench.begin(1, 2, 3)
    (action,) = bench.planned_to(3)
    assert action.message.failed_blocks == b""
    assert [word[0] for word in bench.words] == [1, 2, 3]


# ---- bad plans -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blocks", "slots", "group", "kind"),
    [
        ([10_000], [1], 0, STORE),
        ([1], [10_000], 0, LOAD),
        ([1], [1], 1, STORE),
        ([1, 1], [1, 2], 0, LOAD),
        ([1, 2], [1, 1], 0, STORE),
    ],
)
def test_a_bad_plan_touches_nothing_and_is_told_on_both_sides(bench, blocks, slots, group, kind):
    bench.begin(1)
    bench.plan(1, kind, blocks, slots, group=group)
    assert bench.running == [] and bench.headers.log == []
    assert [word[:3] for word in bench.words] == [(1, kind, Outcome.BAD_PLAN)]
    assert bench.dones == [(101, Outcome.BAD_PLAN)]
    bench.plan(2, STORE, [1])
    bench.begin(2)
    assert len(bench.running) == 1


def test_one_block_may_be_stored_to_two_slots_and_one_slot_loaded_into_two_blocks(bench):
    bench.plan(1, STORE, [4, 4], [1, 2])
    bench.begin(1)
    bench.run_dry()
    bench.plan(2, LOAD, [7, 8], [1, 1])
    bench.begin(2)
    bench.run_dry()
    assert [outcome for _, outcome in bench.dones] == [Outcome.OK, Outcome.OK]


def test_a_job_without_blocks_ends_well(bench):
    """Case 18: empty lists are data."""
    bench.plan(1, STORE, [])
    bench.plan(2, LOAD, [])
    bench.begin(1, 2)
    assert bench.dones == [(102, Outcome.OK), (101, Outcome.OK)]
