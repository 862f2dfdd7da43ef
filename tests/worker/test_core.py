"""What the worker's core promises, one sentence a test. Time is an argument; the device ends when told."""

import ast
import tracemalloc
from pathlib import Path

import pytest

from kvferry.gpu_worker import core as core_module
from kvferry.gpu_worker.api import Copied
from kvferry.gpu_worker.tickets import NEXT, RUNNING, Move, State, Transfer
from kvferry.proto.outcome import Kind, Outcome
from kvferry.proto.page import REVOKE_SLOTS
from tests.worker.fakes import BLOCK_BYTES, LOAD, STORE, Bench

SECOND = 1_000_000_000


@pytest.fixture
def bench() -> Bench:
    return Bench()


def planned(bench: Bench) -> None:
    bench.plan(1, LOAD, [4, 5])


def begun(bench: Bench) -> None:
    bench.begin(1)


def paired(bench: Bench) -> None:
    bench.plan(1, LOAD, [4, 5])
    bench.begin(1, mark=bench.engine.mark() + 1)


def ready(bench: Bench) -> None:
    """Behind two stores' worth of other loads, so that no room is left for it."""
    bench.headers.hold(range(10, 20), 1)
    bench.plan(101, LOAD, [10])
    bench.plan(102, LOAD, [11])
    bench.begin(101, 102)
    bench.plan(1, LOAD, [4, 5], planned_to=102)
    bench.begin(1)


def copying(bench: Bench) -> None:
    bench.plan(1, LOAD, [4, 5])
    bench.begin(1)


WAITING = [planned, begun, paired, ready]


# ---- plan and begin meet ---------------------------------------------------------------------------


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


# ---- bad plans -------------------------------------------------------------------------------------


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


# ---- revokes ---------------------------------------------------------------------------------------


def test_a_revoke_during_the_copy_spoils_the_store(bench):
    """Case 4: never the new owner's bytes under the old key; the slot stays torn."""
    bench.plan(1, STORE, [4])
    bench.begin(1)
    bench.engine.revoke([1])
    bench.run_dry()
    assert bench.words == [(1, STORE, Outcome.REVOKED, ())]
    assert bench.dones == [(101, Outcome.REVOKED)]
    assert bench.headers.log == ["open"]


def test_revokes_are_asked_for_after_the_last_byte(bench):
    """A look before the copy, or between its batches, would miss this one."""
    bench = Bench(batch_bytes=BLOCK_BYTES, batches_in_flight=1)
    bench.plan(1, STORE, [4, 5])
    bench.begin(1)
    bench.copied()
    bench.engine.revoke([1])
    bench.copied()
    assert bench.dones == [(101, Outcome.REVOKED)]


def test_the_end_of_a_copy_is_written_before_the_revokes_are_read(bench):
    """Else a rank that waits for the end, and then overwrites, might still be told OK wrongly."""
    order = []
    bench.page.copy_ended = lambda ticket: order.append("ended")
    revoked = bench.page.revoked
    bench.page.revoked = lambda tickets: order.append("asked") or revoked(tickets)
    bench.plan(1, STORE, [4])
    bench.begin(1)
    order.clear()
    bench.run_dry()
    assert order == ["ended", "asked"]


def test_a_store_revoked_before_its_turn_is_not_copied(bench):
    bench.plan(1, STORE, [4])
    bench.begin(1, mark=1)
    bench.engine.revoke([1])
    bench.engine.signal()
    bench.pass_time()
    assert bench.running == [] and bench.dones == [(101, Outcome.REVOKED)]


def test_more_revokes_than_the_ring_holds_spoil_every_unreported_store(bench):
    """Also those that are queued, and those whose begin is still on its way."""
    for ticket in range(1, 5):
        bench.plan(ticket, STORE, [ticket])
    bench.begin(1, 2, 3)
    bench.engine.revoke([4])  # begun by the rank; the worker has not read it yet
    bench.engine.revoke([10 * REVOKE_SLOTS] * (10 * REVOKE_SLOTS))
    bench.begin(4)
    bench.run_dry()
    assert sorted(bench.dones) == [(100 + ticket, Outcome.REVOKED) for ticket in range(1, 5)]
    assert bench.core.describe()["revoke_overruns"] == 1


def test_a_revoke_of_one_store_leaves_the_others(bench):
    bench.plan(1, STORE, [4])
    bench.plan(2, STORE, [5])
    bench.begin(1, 2)
    bench.engine.revoke([2])
    bench.run_dry()
    assert bench.dones == [(101, Outcome.OK), (102, Outcome.REVOKED)]


# ---- generations -----------------------------------------------------------------------------------


def test_a_store_opens_its_slots_before_the_first_byte_and_closes_them_after_the_last(bench):
    bench = Bench(batch_bytes=BLOCK_BYTES, batches_in_flight=1)
    bench.plan(1, STORE, [4, 5], [7, 8], generation=6)
    assert bench.headers.log == []
    bench.begin(1)
    assert bench.headers.log == ["open"]
    bench.copied()
    assert bench.headers.log == ["open"]
    bench.copied()
    assert bench.headers.log == ["open", "close"]
    assert bench.headers.gen_close[[7, 8]].tolist() == [6, 6]


def test_a_slot_torn_before_a_load_fails_that_block_alone(bench):
    """Case 5, case 26: the bad block is named, the others are loaded, the worker lives."""
    bench.headers.hold([1, 2, 3], 1)
    bench.headers.gen_close[2] = 0
    bench.plan(1, LOAD, [11, 12, 13], [1, 2, 3])
    bench.begin(1)
    assert bench.running[0].blocks.tolist() == [11, 13]
    bench.run_dry()
    assert bench.words == [(1, LOAD, Outcome.TORN, (12,))]
    assert bench.dones == [(101, Outcome.TORN)]


def test_a_slot_raised_during_a_load_fails_that_block(bench):
    """Case 7: a slot that is given away under a running load never ends OK."""
    bench.headers.hold([1, 2, 3], 1)
    bench.plan(1, LOAD, [11, 12, 13], [1, 2, 3])
    bench.begin(1)
    bench.headers.gen_open[3] = 2
    bench.run_dry()
    assert bench.words == [(1, LOAD, Outcome.TORN, (13,))]


def test_a_slot_that_was_torn_before_and_whole_after_stays_failed(bench):
    bench.headers.hold([1], 1)
    bench.plan(1, LOAD, [11, 12], [1, 2])
    bench.begin(1)
    bench.headers.hold([2], 1)
    bench.run_dry()
    assert bench.words == [(1, LOAD, Outcome.TORN, (12,))]


def test_a_load_of_torn_slots_alone_copies_nothing(bench):
    bench.plan(1, LOAD, [11, 12])
    bench.begin(1)
    assert bench.running == []
    assert bench.words == [(1, LOAD, Outcome.TORN, (11, 12))]


# ---- copies ----------------------------------------------------------------------------------------


def test_a_failed_copy_is_a_failed_job_with_its_blocks(bench):
    """Case 5: success is never the default."""
    bench.headers.hold([4, 5], 1)
    bench.plan(1, LOAD, [4, 5])
    bench.plan(2, STORE, [6])
    bench.begin(1, 2)
    bench.copied(ok=False)
    bench.copied(ok=False)
    assert bench.words == [(1, LOAD, Outcome.COPY_FAILED, (4, 5)), (2, STORE, Outcome.COPY_FAILED, ())]
    assert bench.headers.gen_close[6] == 0


def test_after_a_failed_batch_nothing_more_of_the_job_is_copied(bench):
    bench = Bench(batch_bytes=BLOCK_BYTES)
    bench.plan(1, STORE, range(8))
    bench.begin(1)
    bench.copied(ok=False)
    assert len(bench.running) == 1 and bench.dones == []
    bench.copied()
    assert bench.dones == [(101, Outcome.COPY_FAILED)]


def test_blocks_that_arrived_before_a_batch_failed_are_kept(bench):
    """Case 26: a failed load names the blocks that it lacks, and no others."""
    bench = Bench(batch_bytes=BLOCK_BYTES)
    bench.headers.hold(range(4), 1)
    bench.plan(1, LOAD, range(10, 14), range(4))
    bench.begin(1)
    bench.copied()
    bench.copied(ok=False)
    bench.copied()
    assert bench.running == []
    assert bench.words == [(1, LOAD, Outcome.COPY_FAILED, (11, 13))]


def test_a_block_that_arrived_from_a_slot_that_moved_is_lost_with_the_failed_ones(bench):
    bench = Bench(batch_bytes=BLOCK_BYTES)
    bench.headers.hold(range(3), 1)
    bench.plan(1, LOAD, range(10, 13), range(3))
    bench.begin(1)
    bench.copied()
    bench.headers.gen_open[0] = 2
    bench.copied(ok=False)
    bench.run_dry()
    assert bench.words == [(1, LOAD, Outcome.COPY_FAILED, (10, 11))]


def test_batches_and_their_number_are_bounded_per_direction(bench):
    bench = Bench(batch_bytes=4 * BLOCK_BYTES + 7)
    bench.headers.hold(range(100), 1)
    bench.plan(1, STORE, range(100))
    bench.plan(2, LOAD, range(100))
    bench.begin(1, 2)
    seen = {STORE: [], LOAD: []}
    while bench.running:
        for kind in Kind:
            batches = [batch for batch in bench.running if batch.kind is kind]
            assert len(batches) <= 2
            assert bench.core.describe()["bytes_in_flight"][kind.name.lower()] <= 8 * BLOCK_BYTES
        seen[bench.running[0].kind] += bench.running[0].blocks.tolist()
        assert len(bench.running[0].blocks) <= 4
        bench.copied()
    assert seen == {STORE: list(range(100)), LOAD: list(range(100))}
    assert set(bench.core.describe()["bytes_in_flight"].values()) == {0}


def test_a_block_larger_than_a_batch_goes_alone(bench):
    bench = Bench(batch_bytes=BLOCK_BYTES // 2)
    bench.plan(1, STORE, [4, 5])
    bench.begin(1)
    assert [batch.blocks.tolist() for batch in bench.running] == [[4], [5]]


def test_loads_overtake_stores(bench):
    """Case 119: a thousand stores wait, and the one load starts next."""
    tickets = range(1, 1001)
    for ticket in tickets:
        bench.plan(ticket, STORE, [ticket])
    bench.begin(*tickets)
    bench.headers.hold([5000], 1)
    bench.plan(2000, LOAD, [5000])
    bench.begin(2000)
    assert [batch.kind for batch in bench.running] == [STORE, STORE, LOAD]
    bench.run_dry()
    assert bench.words[2][0] == 2000
    assert len(bench.dones) == 1001 and bench.core.at_rest()


def test_transfers_that_become_ready_together_go_loads_first(bench):
    bench.headers.hold([2], 1)
    bench.plan(1, STORE, [1])
    bench.plan(2, LOAD, [2])
    bench.begin(1, 2)
    assert [batch.kind for batch in bench.running] == [LOAD, STORE]


def test_an_unknown_batch_is_counted_and_changes_nothing(bench):
    bench.step(Copied(99, True))
    assert bench.core.counters == {"unknown_copies": 1}


def test_waiting_and_copying_are_measured_apart(bench):
    bench.headers.hold([4], 1)
    bench.plan(1, LOAD, [4])
    bench.begin(1, mark=1)
    bench.now_ns += 3_000_000
    bench.engine.signal()
    bench.pass_time()
    bench.now_ns += 5_000_000
    bench.run_dry()
    assert bench.spans[1] == (3000, 5000)


def test_ten_thousand_queued_stores_take_some_tens_of_megabytes(bench):
    """What waits is names, never bytes of KV; how many may wait is the daemon's bound."""
    tracemalloc.start()
    for ticket in range(1, 10_001):
        bench.plan(ticket, STORE, range(32), generation=ticket)
    bench.begin(*range(1, 10_001))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 40 << 20
    assert len(bench.running) == 2 and bench.core.describe()["bytes_in_flight"]["store"] <= 64 << 20
    bench.cancel_jobs(*range(101, 10_101))
    bench.run_dry()
    assert bench.core.at_rest() and len(bench.dones) == 10_000


# ---- cancels ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [planned, paired, ready])
def test_a_cancel_by_the_daemon_ends_what_does_not_copy_at_once(bench, state):
    state(bench)
    bench.cancel_jobs(101)
    assert (101, Outcome.CANCELLED) in bench.dones
    words = [word for word in bench.words if word[0] == 1]
    assert words == ([] if state is planned else [(1, LOAD, Outcome.CANCELLED, (4, 5))])
    bench.run_dry()
    assert bench.core.at_rest()


@pytest.mark.parametrize("state", WAITING)
def test_a_cancel_by_the_rank_ends_what_does_not_copy_with_one_word(bench, state):
    state(bench)
    bench.cancel_tickets(1)
    bench.cancel_tickets(1)
    (word,) = [word for word in bench.words if word[0] == 1]
    assert word[:3] == (1, LOAD, Outcome.CANCELLED)
    assert ((101, Outcome.CANCELLED) in bench.dones) is (state is not begun)
    bench.run_dry()
    assert bench.core.at_rest()


@pytest.mark.parametrize("by_rank", [True, False])
def test_a_cancelled_copy_is_over_only_when_its_running_batches_are(by_rank):
    bench = Bench(batch_bytes=BLOCK_BYTES)
    bench.headers.hold(range(8), 1)
    bench.plan(1, LOAD, range(8))
    bench.begin(1)
    bench.cancel_tickets(1) if by_rank else bench.cancel_jobs(101)
    assert bench.words == bench.dones == [] and not bench.core.at_rest()
    bench.copied()
    assert bench.words == [] and len(bench.running) == 1
    bench.copied()
    assert bench.running == []
    assert bench.words == [(1, LOAD, Outcome.CANCELLED, tuple(range(8)))]
    assert bench.dones == [(101, Outcome.CANCELLED)]


def test_a_cancelled_store_leaves_its_slot_torn(bench):
    bench.plan(1, STORE, [4])
    bench.begin(1)
    bench.cancel_jobs(101)
    bench.run_dry()
    assert bench.headers.log == ["open"]


def test_a_cancel_of_an_unseen_ticket_refuses_its_later_plan(bench):
    bench.cancel_tickets(7)
    assert bench.words == [(7, LOAD, Outcome.CANCELLED, ())]
    bench.plan(7, STORE, [4])
    bench.plan(7, STORE, [4])
    bench.begin(7)
    assert bench.dones == [(107, Outcome.CANCELLED)]
    assert len(bench.words) == 1 and bench.running == []


def test_a_late_or_unknown_cancel_is_counted_and_changes_nothing(bench):
    bench.headers.hold([4, 5], 1)
    copying(bench)
    bench.run_dry()
    bench.cancel_jobs(101, 999)
    bench.cancel_tickets(1)
    assert len(bench.words) == len(bench.dones) == 1
    assert bench.core.counters["late_cancels"] == 3


# ---- the table -------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("move", Move)
def test_every_state_and_move_goes_as_the_table_says_or_changes_nothing(state, move):
    transfer = Transfer(1, state, 0)
    if (state, move) in NEXT:
        assert transfer.advance(move) is NEXT[state, move] is transfer.state
    else:
        with pytest.raises(KeyError):
            transfer.advance(move)
        assert transfer.state is state


def test_a_running_copy_never_ends_by_anything_but_its_last_batch():
    for (state, move), after in NEXT.items():
        if state in RUNNING and after is State.ENDED:
            assert move is Move.OVER


def test_every_state_can_reach_the_end():
    reached = {State.ENDED}
    for _ in State:
        reached |= {state for (state, _), after in NEXT.items() if after in reached}
    assert reached == set(State)


@pytest.mark.parametrize("name", ["core", "guards", "tickets", "queue", "reports", "plans", "layout"])
def test_the_rooms_that_decide_import_nothing_that_acts(name):
    path = Path(core_module.__file__).with_name(f"{name}.py")
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert not imported & {"zmq", "torch", "asyncio", "time", "logging", "socket", "os", "threading", "select"}
