"""What the worker's core makes of a copy: revokes, generations, batches and their order. The device ends when told."""

import tracemalloc

from kvferry.gpu_worker.api import Copied
from kvferry.proto.outcome import Kind, Outcome
from kvferry.proto.page import REVOKE_SLOTS
from tests.worker.fakes import BLOCK_BYTES, LOAD, STORE, Bench

# ---- revokes -------------------------------------------------------------------------------------


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


# ---- generations ---------------------------------------------------------------------------------


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


# ---- copies --------------------------------------------------------------------------------------


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
