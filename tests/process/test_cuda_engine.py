"""An engine on a GPU and a whole sidecar on the same one, GPU and driver being a stub: what is stored comes back.

The engine is this process; the workers find the stub as `libcuda.so.1`, as they would find the driver. No GPU is
needed, and nothing is said here about one.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvferry import KVMemory, Outcome
from kvferry.client.cuda_memory import export_cuda
from kvferry.proto.tether import MarkMode
from tests.client.fake_gpu import FakeEngine, GpuTensor
from tests.cuda.stubs import Stub, environment, violations
from tests.process.sidecar import Sidecar, until
from tests.process.tiny_engine import TinyEngine, keys_of

pytestmark = pytest.mark.process

LEAD = 3 << 20  # bytes of other tensors before the KV cache in its allocation


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Stub]:
    made = Stub(tmp_path / "engine")
    yield made
    made.finish()


@pytest.fixture
def gpu(stub: Stub) -> Iterator[FakeEngine]:
    made = FakeEngine(stub.path)
    yield made
    made.close()


@pytest.fixture
def sidecar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sidecar]:
    journal = tmp_path / "worker"
    for name, value in environment(journal).items():
        monkeypatch.setenv(name, value)
    with Sidecar("--device", "cuda", tp_size=1, host_memory="4MiB") as made:
        yield made
    assert violations(journal) == []


class GpuEngine(TinyEngine):
    """A tiny engine whose KV cache lies in the stub's GPU memory."""

    def __init__(self, sidecar: Sidecar, gpu: FakeEngine, kind: str, marks: MarkMode | None, **options: Any) -> None:
        self.gpu, self.kind, self.marks = gpu, kind, marks
        super().__init__(sidecar, ranks=1, **options)

    def memory(self, blocks: int, block_bytes: int) -> tuple[npt.NDArray[np.uint8], KVMemory]:
        nbytes = LEAD + blocks * block_bytes
        base = self.gpu.allocate(nbytes) if self.kind == "cuda_ipc" else self.gpu.map(nbytes)
        tensor = GpuTensor(base + LEAD, (blocks, block_bytes), (block_bytes, 1))
        shown = export_cuda(
            {"layer": tensor},
            block_tokens=16,
            driver=self.gpu.driver,
            current_stream=self.gpu.stream,
            marks=self.marks,
        )
        return self.gpu.bytes_at(base + LEAD, blocks * block_bytes).reshape(blocks, block_bytes), self.gpu.keep(shown)


@pytest.mark.parametrize("marks", ["word", "host"])
@pytest.mark.parametrize("kind", ["cuda_ipc", "cuda_vmm_fd"])
def test_what_is_stored_from_a_gpu_comes_back_to_it(
    sidecar: Sidecar, gpu: FakeEngine, kind: str, marks: MarkMode
) -> None:
    """Case 98: both ways, over each kind of handle and each order of marks."""
    with GpuEngine(sidecar, gpu, kind, None if marks == "word" else marks) as engine:
        assert engine.client.wait_attached(10), engine.notes
        assert engine.ranks[0].describe()["mark_mode"] == marks
        assert [worker["marks"] for worker in sidecar.status()["workers"] if worker["state"] == "taken"] == [marks]
        keys = keys_of("a", 4)
        engine.fill([1, 2, 3, 4], seed=1)
        due = engine.bytes_of([1, 2, 3, 4])
        assert engine.store("one", keys, [1, 2, 3, 4]) is Outcome.OK
        engine.client.finish("one")
        engine.fill([1, 2, 3, 4], seed=2)
        before = engine.bytes_of([5, 6, 7, 8])
        assert engine.hits("two", keys) == 4
        (end,) = engine.load("two", keys, [20, 9, 30, 1])
        assert end.ok
        assert engine.bytes_of([20, 9, 30, 1]) == due
        assert engine.bytes_of([5, 6, 7, 8]) == before


@pytest.mark.parametrize("marks", ["word", "host"])
def test_a_store_reads_what_the_gpu_wrote_before_the_mark_and_not_what_lay_there_when_it_was_asked_for(
    sidecar: Sidecar, gpu: FakeEngine, stub: Stub, marks: MarkMode
) -> None:
    """Case 1: the mark fires after the last write to the block."""
    with GpuEngine(sidecar, gpu, "cuda_ipc", None if marks == "word" else marks) as engine:
        assert engine.client.wait_attached(10), engine.notes
        keys = keys_of("a", 1)
        engine.fill([7], seed=1)
        stub.control("copy hang")
        gpu.launch()  # the forward that writes block 7, still running
        ticket = engine.client.store("one", keys, [7])
        engine.step()
        for _ in range(20):  # a worker that did not wait would have read by now
            engine.ranks[0].poll()
            time.sleep(0.005)
        assert engine.client.poll() == []
        engine.fill([7], seed=2)
        due = engine.bytes_of([7])
        stub.control("")
        ended: list[Any] = []

        def is_over() -> bool:
            engine.ranks[0].poll()
            ended.extend(engine.client.poll())
            return bool(ended)

        until(is_over, 10, "the store ends")
        assert (ended[0].ticket, ended[0].outcome) == (ticket, Outcome.OK)
        engine.client.finish("one")
        assert engine.hits("two", keys) == 1
        (end,) = engine.load("two", keys, [9])
        assert end.ok and engine.bytes_of([9]) == due


@pytest.mark.parametrize("marks", ["word", "host"])
def test_a_load_writes_when_the_gpu_is_through_with_its_blocks_and_not_before(
    sidecar: Sidecar, gpu: FakeEngine, stub: Stub, marks: MarkMode
) -> None:
    """Case 3: clearing of fresh blocks that is still queued must not wipe what was loaded."""
    with GpuEngine(sidecar, gpu, "cuda_ipc", None if marks == "word" else marks) as engine:
        assert engine.client.wait_attached(10), engine.notes
        keys = keys_of("a", 2)
        engine.fill([1, 2], seed=1)
        due = engine.bytes_of([1, 2])
        assert engine.store("one", keys, [1, 2]) is Outcome.OK
        engine.client.finish("one")
        assert engine.hits("two", keys) == 2
        stub.control("copy hang")
        gpu.launch()  # what clears blocks 8 and 9, still running
        ticket = engine.client.load("two", keys, [8, 9])
        engine.step()
        for _ in range(20):  # a worker that did not wait would have written by now
            assert not engine.ranks[0].poll().loads
            time.sleep(0.005)
        assert not engine.arrays[0][8:10].any()
        engine.arrays[0][8:10] = 0
        stub.control("")
        ends: list[Any] = []
        until(lambda: ends.extend(engine.ranks[0].poll().loads) or ends, 10, "the load ends")
        assert ends[0].ok and ends[0].ticket == ticket and engine.bytes_of([8, 9]) == due


def test_a_new_worker_serves_the_same_memory_after_the_old_one_died(sidecar: Sidecar, gpu: FakeEngine) -> None:
    with GpuEngine(sidecar, gpu, "cuda_ipc", None) as engine:
        assert engine.client.wait_attached(10), engine.notes
        keys = keys_of("a", 2)
        engine.fill([1, 2], seed=1)
        due = engine.bytes_of([1, 2])
        assert engine.store("one", keys, [1, 2]) is Outcome.OK
        engine.client.finish("one")
        first = engine.ranks[0].worker_pid
        os.kill(first, signal.SIGKILL)
        until(lambda: engine.ranks[0].worker_pid not in (0, first) and engine.client.attached, 30, "a new worker")
        assert engine.hits("two", keys) == 2
        (end,) = engine.load("two", keys, [11, 12])
        assert end.ok and engine.bytes_of([11, 12]) == due
