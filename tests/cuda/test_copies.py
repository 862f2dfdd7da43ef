"""What the CUDA device does beyond the contract: its calls, and what becomes of a copy when one of them fails."""

import mmap
import re
import select
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.gpu_worker.devices.base import (
    MAX_DESCRIPTORS,
    CapacityError,
    CopyPlan,
    DeviceLost,
    Done,
    HandleError,
    Mapping,
)
from kvferry.gpu_worker.devices.cuda import CudaDevice
from kvferry.gpu_worker.layout import Planner
from kvferry.proto.errors import ConfigError
from kvferry.proto.layout import Group, Region
from kvferry.proto.limits import PAGE_BYTES
from kvferry.proto.outcome import Kind
from tests.cuda.exporter import Exporter
from tests.cuda.stubs import UUIDS, Stub

STORE, LOAD = Kind.STORE, Kind.LOAD
PATIENCE_S = 10.0
BLOCKS, RUN = 8, 20_000
NBYTES = 2 * BLOCKS * RUN


class Bench:
    """A device with an engine's memory attached and a pool registered."""

    def __init__(self, stub: Stub, exporter: Exporter, **options: Any) -> None:
        self.stub = stub
        self.device = CudaDevice(library=stub.path, **options)
        self.engine = exporter.export("cuda_ipc", NBYTES, 3 << 20)
        self.engine.view[:] = np.random.default_rng(3).integers(0, 256, NBYTES, dtype=np.uint8)
        self.mapping: Mapping = self.device.attach(self.engine.handle, None)
        regions = [Region(handle=0, offset=r * BLOCKS * RUN, stride=RUN, run=RUN, blocks=BLOCKS) for r in range(2)]
        self.group = Group(regions=tuple(regions), block_tokens=16)
        self.pool = np.frombuffer(mmap.mmap(-1, PAGE_BYTES + BLOCKS * self.group.slot_bytes), dtype=np.uint8)
        self.device.register_host(self.pool.ctypes.data, len(self.pool))
        self.planner = Planner(
            self.group, [self.mapping.base], self.pool.ctypes.data + PAGE_BYTES, self.group.slot_bytes, BLOCKS
        )

    def plan(self, kind: Kind, *blocks: int) -> CopyPlan:
        """One plan: block b to or from slot b."""
        column = np.array(blocks, dtype=np.uint32)
        (made,) = self.planner.plan(column, column, kind)
        return made

    def wait(self, count: int = 1) -> list[Done]:
        done: list[Done] = []
        while len(done) < count:
            assert select.select([self.device.fileno()], [], [], PATIENCE_S)[0]
            done += self.device.completions()
        return done

    def mark(self) -> Callable[[], list[str]]:
        """The calls from here on."""
        start = len(self.stub.calls())
        return lambda: self.stub.calls()[start:]


@pytest.fixture
def make(stub: Stub, exporter: Exporter) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def one(**options: Any) -> Bench:
        made.append(Bench(stub, exporter, **options))
        return made[-1]

    yield one
    stub.control()
    for bench in made:
        bench.device.close()


@pytest.fixture
def bench(make: Callable[..., Bench]) -> Bench:
    return make()


# ---- the calls of one store and one load -----------------------------------------------------------


def test_the_driver_calls_of_one_store_and_one_load_are_those_of_the_transcript(
    stub: Stub, exporter: Exporter, tmp_path: Path
) -> None:
    """tests/cuda/calls.txt, line by line: the loop's calls, then those of the waiters' threads."""
    bench = Bench(stub, exporter)
    bench.device.submit(STORE, bench.plan(STORE, 0, 2), 1)
    (stored,) = bench.wait()
    bench.engine.view[:] = 0
    bench.device.submit(LOAD, bench.plan(LOAD, 0, 2), 2)
    (loaded,) = bench.wait()
    assert stored.ok and loaded.ok and bench.engine.view[2 * RUN : 3 * RUN].any()
    bench.device.close()
    wanted = [
        line for line in (Path(__file__).parent / "calls.txt").read_text().splitlines() if line[:1] not in ("#", "")
    ]
    # Numbers of objects go on from test to test; here they count from 1, in the order of their making.
    assert renumbered(stub.calls()) == renumbered(wanted)


def renumbered(lines: list[str]) -> list[str]:
    """The loop's calls in order, then the waiters', with objects numbered as they appear."""
    seen: dict[str, dict[str, int]] = {}

    def number(match: "re.Match[str]") -> str:
        kind = seen.setdefault(match[1], {})
        return f"{match[1]}{kind.setdefault(match[2], len(kind) + 1)}"

    told = [re.sub(r"\b(gpu|pin|stream|event)(\d+)\b", number, line) for line in lines]
    return [line for who in ("main", "thread") for line in told if line.startswith(who)]


def test_stores_are_read_in_stream_order_and_loads_as_early_as_the_driver_likes(make: Callable[..., Bench]) -> None:
    bench = make(copy_flags=1)
    calls = bench.mark()
    bench.device.submit(STORE, bench.plan(STORE, 1), 1)
    bench.device.submit(LOAD, bench.plan(LOAD, 2), 2)
    bench.wait(2)
    store, load = [line for line in calls() if "cuMemcpyBatchAsync" in line]
    assert "count 2 order 1 flags 1" in store and "count 2 order 3 flags 1" in load
    assert store.split()[2] != load.split()[2]  # a stream each


@pytest.mark.parametrize(
    "options, control",
    [
        ({"copies": "loop"}, ()),
        ({}, ("driver 12040",)),
        ({}, ("cuMemcpyBatchAsync fail 801",)),
        ({}, ("cuMemcpyBatchAsync fail 1",)),
    ],
)
def test_without_the_batch_call_copies_are_queued_one_by_one(
    stub: Stub, make: Callable[..., Bench], options: dict[str, Any], control: tuple[str, ...]
) -> None:
    """An older driver, one that has the call and does not take this memory in it, or somebody who measures."""
    stub.control(*control)
    bench = make(**options)
    calls = bench.mark()
    for token in range(2):
        bench.device.submit(STORE, bench.plan(STORE, 1), token)
        assert bench.wait()[0].ok
    assert sum("cuMemcpyAsync" in line for line in calls()) == 4
    assert sum("cuMemcpyBatchAsync" in line for line in calls()) == ("BatchAsync" in "".join(control))
    assert bench.device.describe()["copies"] == "loop"
    assert np.array_equal(bench.pool[2 * PAGE_BYTES + bench.group.slot_bytes :][:RUN], bench.engine.view[RUN : 2 * RUN])


def test_unpinned_memory_is_stored_to_and_loaded_from_where_pinning_is_only_wanted(
    stub: Stub, make: Callable[..., Bench]
) -> None:
    """Case 93: slower, and the same bytes."""
    stub.control("pageable 1", "cuMemHostRegister_v2 fail 2")
    bench = make(must_pin=False)
    told = bench.device.describe()
    assert told["pinned_bytes"] == 0 and "CUDA_ERROR_OUT_OF_MEMORY" in told["pin_refused"]
    due = bench.engine.view.copy()
    for kind in (STORE, LOAD):
        bench.device.submit(kind, bench.plan(kind, *range(BLOCKS)), 1)
        assert bench.wait()[0].ok
        bench.engine.view[:] = 0 if kind is STORE else bench.engine.view
    assert np.array_equal(bench.engine.view, due)


@pytest.mark.parametrize("stuck", range(3))
def test_a_chunk_that_stays_pinned_where_the_others_are_not_is_an_edge_that_no_copy_spans(
    stub: Stub, make: Callable[..., Bench], stuck: int
) -> None:
    """The driver refuses a chunk, and does not take back one of those before it: copies are right all the same."""
    control = ("pageable 1", "cuMemHostRegister_v2 fail 2 after 3", f"cuMemHostUnregister fail 1 after {stuck} times 1")
    stub.control(*control)
    bench = make(must_pin=False, chunk_bytes=12 * PAGE_BYTES)
    assert stub.leaks().count("pin") == 2, "the driver's own memory for reads, and the chunk that stayed"
    due = bench.engine.view.copy()
    for kind in (STORE, LOAD):
        bench.device.submit(kind, bench.plan(kind, *range(BLOCKS)), 1)
        assert bench.wait()[0].ok
        bench.engine.view[:] = 0 if kind is STORE else bench.engine.view
    assert np.array_equal(bench.engine.view, due)
    bench.device.close()
    stub.control()
    stub.end_process()


def test_more_pieces_than_one_call_takes_go_in_two_and_end_as_one(make: Callable[..., Bench]) -> None:
    """4096 descriptors that a chunk's end cuts are 4097."""
    bench = make(chunk_bytes=3 * PAGE_BYTES)
    steps = np.arange(MAX_DESCRIPTORS, dtype=np.uint64) * np.uint64(7)
    start = bench.pool.ctypes.data + PAGE_BYTES
    plan = CopyPlan(steps + np.uint64(bench.mapping.base), steps + np.uint64(start), np.full(len(steps), 7, np.uint64))
    calls = bench.mark()
    bench.device.submit(STORE, plan, 5)
    assert [d.token for d in bench.wait()] == [5]
    counts = [int(line.split("count ")[1].split()[0]) for line in calls() if "cuMemcpyBatchAsync" in line]
    assert counts[0] == MAX_DESCRIPTORS and sum(counts) > MAX_DESCRIPTORS and len(counts) == 2
    assert np.array_equal(bench.pool[PAGE_BYTES:][: 7 * len(steps)], bench.engine.view[: 7 * len(steps)])


# ---- calls that fail -------------------------------------------------------------------------------


def test_a_batch_that_the_driver_refuses_is_failed_and_the_next_one_is_copied(stub: Stub, bench: Bench) -> None:
    """Job: COPY_FAILED, with its blocks. Slots: free again. Engine and worker go on."""
    bench.device.submit(STORE, bench.plan(STORE, 0), 0)  # the call works here
    bench.wait()
    stub.control("cuMemcpyBatchAsync fail 1 times 1")
    bench.device.submit(STORE, bench.plan(STORE, 1), 1)
    bench.device.submit(STORE, bench.plan(STORE, 2), 2)
    first, second = bench.wait(2)
    assert (first.token, first.ok, second.token, second.ok) == (1, False, 2, True)
    assert "cuMemcpyBatchAsync failed: CUDA_ERROR_INVALID_VALUE (1)" in first.error
    assert not bench.pool[PAGE_BYTES + bench.group.slot_bytes :][: bench.group.slot_bytes].any()


def test_a_batch_that_fails_half_queued_is_over_only_when_what_was_queued_is(
    stub: Stub, make: Callable[..., Bench]
) -> None:
    """A failed call proves nothing about the copies before it: they still write."""
    bench = make(copies="loop")
    stub.control("copy hang", "cuMemcpyAsync fail 1 after 1")
    bench.device.submit(STORE, bench.plan(STORE, 1), 1)
    assert not bench.device.drain(0.05) and bench.device.completions() == []
    stub.control()
    (done,) = bench.wait()
    assert not done.ok and bench.device.drain(PATIENCE_S)
    assert bench.pool[2 * PAGE_BYTES + bench.group.slot_bytes :][:RUN].any()  # the half that was copied


@pytest.mark.parametrize("call", ["cuMemcpyBatchAsync", "cuEventRecord"])
@pytest.mark.parametrize("result", [700, 719, 999, 4])
def test_a_sticky_error_of_a_call_loses_the_device(stub: Stub, bench: Bench, call: str, result: int) -> None:
    stub.control(f"{call} fail {result} times 1")
    with pytest.raises(DeviceLost) as caught:
        bench.device.submit(STORE, bench.plan(STORE, 1), 1)
    assert caught.value.code == "device.lost" and f"({result})" in caught.value.text
    assert_lost(bench)
    stub.end_process()


def test_an_event_that_cannot_be_recorded_loses_the_device_whatever_the_error(stub: Stub, bench: Bench) -> None:
    """Nobody would know when the copies before it are over."""
    stub.control("cuEventRecord fail 1 times 1")
    with pytest.raises(DeviceLost):
        bench.device.submit(STORE, bench.plan(STORE, 1), 1)
    assert_lost(bench)
    stub.end_process()


@pytest.mark.parametrize("control", ["copy fail 700 times 1", "cuEventSynchronize fail 1"])
def test_a_copy_that_fails_on_the_gpu_loses_the_device_and_is_no_end_of_the_copy(
    stub: Stub, bench: Bench, control: str
) -> None:
    """Its blocks are told by nobody: the worker's death is the proof that nothing writes there any more."""
    stub.control("copy hang", "cuEventSynchronize hang")
    bench.device.submit(LOAD, bench.plan(LOAD, 1), 1)
    stub.control(control)
    assert select.select([bench.device.fileno()], [], [], PATIENCE_S)[0]
    assert_lost(bench)
    stub.end_process()


def assert_lost(bench: Bench) -> None:
    """Whatever is asked of it then, it says so, and wakes the loop to hear it."""
    device = bench.device
    assert select.select([device.fileno()], [], [], 0)[0]
    asks: list[Callable[[], object]] = [
        device.completions,
        device.completions,
        lambda: device.submit(STORE, bench.plan(STORE, 2), 2),
        lambda: device.attach(bench.engine.handle, None),
        lambda: device.read(bench.mapping, 0, 8),
    ]
    for ask in asks:
        with pytest.raises(DeviceLost):
            ask()
    assert not device.drain(0)
    device.close()  # touches nothing of the driver's: that is left to the process's end


def test_a_waiter_that_hangs_leaves_the_loop_free_and_a_close_gives_up_on_it(stub: Stub, bench: Bench) -> None:
    """A hang in a copy: nothing ends, nobody is told, and the daemon's deadline decides."""
    stub.control("cuEventSynchronize hang")
    bench.device.submit(STORE, bench.plan(STORE, 1), 1)
    assert not bench.device.drain(0.05)
    assert bench.device.completions() == [] and bench.device.room(STORE) == 1
    bench.device.submit(STORE, bench.plan(STORE, 2), 2)
    assert bench.device.room(STORE) == 0 and bench.device.room(LOAD) == 2
    stub.control()
    assert [d.token for d in bench.wait(2)] == [1, 2]


def test_a_close_does_not_wait_for_a_copy_that_hangs(stub: Stub, exporter: Exporter) -> None:
    bench = Bench(stub, exporter)
    stub.control("copy hang")
    bench.device.submit(STORE, bench.plan(STORE, 1), 1)
    calls = bench.mark()
    closer = threading.Thread(target=bench.device.close)
    closer.start()
    closer.join(PATIENCE_S)
    assert not closer.is_alive()
    assert not [line for line in calls() if "Destroy" in line or "Close" in line or "Unregister" in line]
    stub.control()
    stub.end_process()


# ---- any call fails ----------------------------------------------------------------------------------

SCENARIO = sorted(
    {
        line.split()[1]
        for line in (Path(__file__).parent / "calls.txt").read_text().splitlines()
        if line[:1] in ("m", "t")
    }
    - {"cuInit"}  # test_driver.py
    | {"cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetUuid_v2", "cuDeviceGetName", "cuDeviceGetAttribute"}
    | {"cuMemcpyAsync", "cuEventQuery"}
)


@pytest.mark.parametrize("result", [2, 801, 719])
@pytest.mark.parametrize("call", SCENARIO)
def test_any_call_may_fail_at_any_time_and_the_answer_is_one_of_the_protocols(
    stub: Stub, exporter: Exporter, call: str, result: int
) -> None:
    """Out of memory, not supported, or for good: never a raw error of the driver, never a wait without end.

    A copy that was said to be well is; one of a failed batch is said so; a lost device says so.
    """
    for after in range(4):
        stub.control(f"{call} fail {result} after {after} times 1")
        device = None
        try:
            bench = Bench(stub, exporter)
            device = bench.device
            assert device.read(bench.mapping, 0, 64) == bench.engine.view[:64].tobytes()
            due, ends = bench.engine.view[:RUN].copy(), []
            for token, kind in enumerate((STORE, LOAD)):
                device.submit(kind, bench.plan(kind, 0), token)
                ends += bench.wait()
                bench.engine.view[:] = 0 if kind is STORE else bench.engine.view
            assert np.array_equal(bench.engine.view[:RUN], due) == all(done.ok for done in ends)
        except (ConfigError, HandleError, CapacityError, DeviceLost) as error:
            assert call in error.text or isinstance(error, ConfigError)
        if device is not None:
            device.close()
        stub.end_process()


# ---- opening and reading ---------------------------------------------------------------------------


def test_a_gpu_is_opened_by_uuid_or_number_and_an_unknown_one_is_refused_with_those_that_are(stub: Stub) -> None:
    """Case 98: other visible devices."""
    stub.control("devices 2")
    for name, uuid in (("1", UUIDS[1]), (UUIDS[0], UUIDS[0]), (UUIDS[1].removeprefix("GPU-").upper(), UUIDS[1])):
        device = CudaDevice(name, library=stub.path)
        assert device.caps.uuid == uuid
        device.close()
    for name in ("2", UUIDS[3], "GPU-nonsense"):
        with pytest.raises(ConfigError) as caught:
            CudaDevice(name, library=stub.path)
        assert caught.value.code == "device.not_visible"
        assert UUIDS[0] in caught.value.text and UUIDS[1] in caught.value.text


@pytest.mark.parametrize("mode, word", [(3, "exclusive process"), (2, "prohibited")])
def test_a_gpu_that_lets_one_process_in_is_refused_by_name(stub: Stub, mode: int, word: str) -> None:
    stub.control(f"attr 20 {mode}")
    with pytest.raises(ConfigError) as caught:
        CudaDevice(library=stub.path)
    assert caught.value.code == "device.exclusive" and word in caught.value.text
    assert "nvidia-smi -c DEFAULT" in caught.value.fix


def test_no_memory_for_a_context_says_that_the_engine_may_have_taken_it(stub: Stub) -> None:
    stub.control("cuDevicePrimaryCtxRetain fail 2")
    with pytest.raises(ConfigError) as caught:
        CudaDevice(library=stub.path)
    assert caught.value.code == "device.open" and "before the engine" in caught.value.fix


@pytest.mark.parametrize(
    "control, kinds, mode",
    [("attr 103 0", ("cuda_ipc",), "word"), ("attr 122 0", ("cuda_ipc", "cuda_vmm_fd"), "host")],
)
def test_what_a_gpu_cannot_do_is_told_at_its_opening(
    stub: Stub, control: str, kinds: tuple[str, ...], mode: str
) -> None:
    stub.control(control)
    device = CudaDevice(library=stub.path)
    assert device.caps.handle_kinds == kinds and device.caps.mark_mode == mode
    device.close()


@pytest.mark.parametrize("control", ["cuDeviceGetAttribute fail 1 times 1", "attr 134 -1"])
def test_where_the_driver_knows_no_numa_node_the_bus_is_asked(
    stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, control: str
) -> None:
    """Case 97. Neither knowing it is no hindrance."""
    monkeypatch.setattr("kvferry.gpu_worker.devices.cuda_gpu.PCI_DEVICES", tmp_path)
    place = tmp_path / "0000:3b:00.0"  # in lower case, as /sys has it; the driver says 3B
    for content, node in (("1\n", 1), ("-1\n", -1), ("", -1)):
        place.mkdir(exist_ok=True)
        (place / "numa_node").write_text(content)
        stub.control(control)
        device = CudaDevice(library=stub.path)
        assert device.caps.numa_node == node
        device.close()


def test_a_read_that_fails_is_a_refusal_and_one_that_hangs_is_the_end(
    stub: Stub, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Probes are read while a rank waits to be admitted."""
    stub.control("cuMemcpyAsync fail 1 times 1")
    with pytest.raises(HandleError) as refused:
        bench.device.read(bench.mapping, 0, 64)
    assert refused.value.code == "handle.refused"
    monkeypatch.setattr("kvferry.gpu_worker.devices.cuda.READ_S", 0.05)
    stub.control("copy hang")
    with pytest.raises(DeviceLost, match="has not ended"):
        bench.device.read(bench.mapping, 0, 64)
    assert_lost(bench)
    stub.end_process()


def test_a_read_longer_than_its_scratch_memory_is_whole(bench: Bench) -> None:
    assert bench.device.read(bench.mapping, 1, NBYTES - 1) == bench.engine.view[1:].tobytes()
