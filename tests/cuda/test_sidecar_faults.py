"""What a fault of the driver costs whom, under a whole sidecar that serves.

For each fault: the outcome of the job, of its slots, of the engine and of the worker.
"""

import time

import pytest

from kvferry import Outcome
from tests.cuda.node import Node, at_rest, attached, said, worker_of
from tests.cuda.stubs import UUIDS
from tests.process.sidecar import alive, until
from tests.process.tiny_engine import keys_of

pytestmark = pytest.mark.process

SHORT = ("--job-deadline", "1s", "--load-deadline", "1s", "--kill-grace", "3s")


def test_a_refused_import_leaves_the_engine_without_a_cache_and_with_the_reason(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 98. Engine: runs, told once. Worker: refuses, exits 0. Later: the rank attaches by itself."""
    monkeypatch.setattr("kvferry.client.search.REFUSED_RETRY_S", 0.5)
    sidecar = node.up()
    node.steer("cuIpcOpenMemHandle_v2 fail 205")
    engine = node.engine(sidecar)
    until(lambda: any("handle.refused" in note for note in engine.notes), 10, f"the reason: {engine.notes}")
    assert not engine.client.attached
    assert any("CUDA_ERROR_MAP_FAILED" in note for note in engine.notes)
    engine.client.lookup("r", keys_of("a", 1))
    assert engine.client.hits("r").count == 0
    assert sidecar.status()["workers_died"] == 0
    node.steer()
    attached(engine)
    assert engine.store("one", keys_of("a", 2), [1, 2]) is Outcome.OK


def test_an_engine_on_another_gpu_is_refused_with_both_uuids(node: Node) -> None:
    """Case 98. A worker never follows: its pool is pinned and its context open where it was told."""
    node.steer("devices 2")
    sidecar = node.up("--devices", "1")
    engine = node.engine(sidecar)
    until(lambda: any("handle.other_gpu" in note for note in engine.notes), 10, f"the reason: {engine.notes}")
    (told,) = {note for note in engine.notes if "handle.other_gpu" in note}
    assert UUIDS[0] in told and UUIDS[1] in told and "--devices" in told


@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_batch_that_the_driver_refuses_fails_its_job_alone(node: Node, direction: str) -> None:
    """Job: COPY_FAILED. Slots: free (store) or as they were (load). Engine, worker: go on as if nothing had been."""
    sidecar = node.up()
    engine = attached(node.engine(sidecar))
    pid = worker_of(engine)
    keys = keys_of("a", 2)
    engine.fill([1, 2], seed=1)
    due = engine.bytes_of([1, 2])
    # The call works here, both ways: else its first refusal would mean that copies go one by one.
    assert engine.store("first", keys_of("f", 1), [3]) is Outcome.OK
    engine.client.finish("first")
    assert engine.hits("first again", keys_of("f", 1)) == 1
    assert engine.load("first again", keys_of("f", 1), [4])[0].ok
    engine.client.finish("first again")
    if direction == "store":
        node.steer("cuMemcpyBatchAsync fail 1 times 1")
        assert engine.store("one", keys, [1, 2]) is Outcome.COPY_FAILED
        engine.client.finish("one")
        status = at_rest(sidecar)
        assert status["slots"]["ready"] == 1 and status["slots"]["free"] == status["slots"]["total"] - 1
        assert engine.hits("two", keys) == 0
        assert engine.store("three", keys, [1, 2]) is Outcome.OK
        engine.client.finish("three")
    else:
        assert engine.store("one", keys, [1, 2]) is Outcome.OK
        engine.client.finish("one")
        node.steer("cuMemcpyBatchAsync fail 1 times 1")
        assert engine.hits("two", keys) == 2
        (end,) = engine.load("two", keys, [7, 8])
        assert not end.ok and sorted(end.failed_blocks) == [7, 8]
        engine.client.finish("two")
        at_rest(sidecar)
    assert engine.hits("last", keys) == 2
    (end,) = engine.load("last", keys, [11, 12])
    assert end.ok and engine.bytes_of([11, 12]) == due
    assert worker_of(engine) == pid and sidecar.status()["workers_died"] == 0


@pytest.mark.parametrize("how", ["on the GPU", "in a call"])
def test_a_sticky_error_ends_the_worker_and_its_death_is_the_answer(node: Node, how: str) -> None:
    """Load: FAILED with its blocks, after the reap. Slots: as they were. Engine: computes, attaches to the next."""
    sidecar = node.up()
    engine = attached(node.engine(sidecar))
    first = worker_of(engine)
    keys = keys_of("a", 2)
    engine.fill([1, 2], seed=1)
    due = engine.bytes_of([1, 2])
    assert engine.store("one", keys, [1, 2]) is Outcome.OK
    engine.client.finish("one")
    assert engine.hits("two", keys) == 2
    node.steer("copy fail 700" if how == "on the GPU" else "cuMemcpyBatchAsync fail 719")
    (end,) = engine.load("two", keys, [7, 8])
    assert not end.ok and sorted(end.failed_blocks) == [7, 8]
    assert not alive(first)
    node.steer()
    engine.client.finish("two")
    worker_of(engine, not_pid=first)
    said(sidecar, "exited with code 71")
    assert any("device.lost" in line and "attaches to the next" in line for line in sidecar.lines)
    assert at_rest(sidecar)["workers_died"] == 1
    assert engine.hits("three", keys) == 2
    (end,) = engine.load("three", keys, [11, 12])
    assert end.ok and engine.bytes_of([11, 12]) == due


def test_a_store_under_a_sticky_error_ends_with_its_worker_and_its_slots_are_free_after_the_reap(node: Node) -> None:
    """Store: WORKER_DIED, after the reap. Slots: what was stored before stays, the others are free. Engine: goes on."""
    sidecar = node.up()
    engine = attached(node.engine(sidecar))
    first = worker_of(engine)
    assert engine.store("works", keys_of("w", 1), [1]) is Outcome.OK
    node.steer("cuMemcpyBatchAsync fail 719")
    assert engine.store("one", keys_of("a", 2), [2, 3], timeout_s=15) is Outcome.WORKER_DIED
    assert not alive(first)
    node.steer()
    engine.client.finish("one")
    worker_of(engine, not_pid=first)
    slots = at_rest(sidecar)["slots"]
    assert slots["ready"] == 1 and slots["free"] == slots["total"] - 1
    assert engine.hits("two", keys_of("a", 2)) == 0
    assert engine.store("three", keys_of("a", 2), [2, 3]) is Outcome.OK


def test_a_gpu_lost_while_a_rank_is_let_in_costs_that_rank_a_moment(node: Node) -> None:
    """Worker: refuses, exits 71. Engine: told once, asks the next spare within seconds."""
    sidecar = node.up()
    node.steer("cuIpcOpenMemHandle_v2 fail 719")
    engine = node.engine(sidecar)
    until(lambda: any("device.lost" in note for note in engine.notes), 10, f"the reason: {engine.notes}")
    said(sidecar, "exited with code 71")
    node.steer()
    refused = time.monotonic()
    attached(engine)
    assert time.monotonic() - refused < 8
    assert engine.store("one", keys_of("a", 2), [1, 2]) is Outcome.OK


@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("where", ["copy", "cuMemcpyBatchAsync"])
def test_a_copy_that_hangs_is_given_up_and_its_worker_killed_and_replaced(
    node: Node, where: str, direction: str
) -> None:
    """Store: DEADLINE at once, its slots held until the worker is dead. Load: FAILED after the reap, with its blocks.

    `copy`: the GPU never ends it, the loop lives. `cuMemcpyBatchAsync`: the loop itself never comes back.
    """
    sidecar = node.up(*SHORT)
    engine = attached(node.engine(sidecar))
    first = worker_of(engine)
    keys = keys_of("a", 2)
    engine.fill([1, 2], seed=1)
    due = engine.bytes_of([1, 2])
    assert engine.store("one", keys, [1, 2]) is Outcome.OK
    engine.client.finish("one")
    node.steer(f"{where} hang")
    if direction == "store":
        assert engine.store("two", keys_of("b", 2), [3, 4], timeout_s=15) is Outcome.DEADLINE
        slots = sidecar.status()["slots"]
        assert alive(first) and slots["quarantined"] == 2, slots
    else:
        assert engine.hits("two", keys) == 2
        (end,) = engine.load("two", keys, [7, 8], timeout_s=15)
        assert not end.ok and sorted(end.failed_blocks) == [7, 8]
        assert not alive(first)
    until(lambda: not alive(first), 15, "the end of the worker that hangs")
    node.steer()
    engine.client.finish("two")
    worker_of(engine, not_pid=first)
    assert at_rest(sidecar)["slots"]["ready"] == 2
    said(sidecar, "killing rank 0 worker")
    assert engine.hits("three", keys) == 2
    (end,) = engine.load("three", keys, [11, 12])
    assert end.ok and engine.bytes_of([11, 12]) == due


def test_every_call_of_closing_may_hang_and_the_worker_is_gone_in_two_seconds(node: Node) -> None:
    """A hang in close: a worker closes nothing. It exits, and the kernel takes the mappings back."""
    closing = ("cuIpcCloseMemHandle", "cuMemUnmap", "cuMemAddressFree", "cuMemHostUnregister")
    closing += ("cuStreamDestroy_v2", "cuEventDestroy_v2", "cuDevicePrimaryCtxRelease_v2")
    node.steer(*(f"{name} hang" for name in closing))
    sidecar = node.up()
    engine = attached(node.engine(sidecar))
    first = worker_of(engine)
    assert engine.store("one", keys_of("a", 2), [1, 2]) is Outcome.OK
    engine.ranks[0].close()  # a polite end
    until(lambda: not alive(first), 2, "the end of the worker")
    assert not [line for line in node.calls_of(first) if any(name in line for name in closing)]
    killed = node.engine_process(sidecar, "two")
    killed.kill()
    until(lambda: not alive(killed.worker), 2, "the end of the worker")
    assert sidecar.status()["workers_died"] == 0


def test_a_worker_that_hangs_while_an_engine_dies_is_gone_all_the_same(node: Node) -> None:
    """It drains for a second and leaves with what hangs: code 70 says that its death ended the copy."""
    sidecar = node.up()
    engine = node.engine_process(sidecar, "one")
    engine.ask(fill=[1, 2], seed=1)
    node.steer("copy hang")
    engine.ask(begin=[1, 2], text="a")
    node.await_batch(engine.worker, 1)
    engine.kill()
    died = time.monotonic()
    until(lambda: not alive(engine.worker), 3, "the end of the worker")
    assert time.monotonic() - died < 2.5
    node.steer()
    said(sidecar, "exited with code 70")
    assert at_rest(sidecar)["slots"]["ready"] == 0


def test_a_slow_pin_holds_up_nobody_and_is_ended_by_a_stop(node: Node) -> None:
    """Case 92: the spare that replaces a taken one pins while engines serve."""
    sidecar = node.up()
    node.steer("cuMemHostRegister_v2 delay 1500")
    engine = attached(node.engine(sidecar))
    began = time.monotonic()
    assert engine.store("one", keys_of("a", 2), [1, 2]) is Outcome.OK
    assert time.monotonic() - began < 1.5
    engine.close()
