"""Labs: one per kind of device. A device is trusted because it passes the same suite as every other."""

import contextlib
import mmap
import os
import select
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvferry.gpu_worker.devices.base import CopyPlan, Device, Done
from kvferry.gpu_worker.devices.cpu import CpuDevice, Knobs
from kvferry.gpu_worker.devices.cuda import CudaDevice
from kvferry.proto.layout import Handle
from kvferry.proto.outcome import Kind
from tests.cuda.exporter import Exporter
from tests.cuda.stubs import Stub, build

PATIENCE_S = 10.0


class EngineMemory:
    """Memory as an engine exports it, and the engine's own view of it."""

    def __init__(self, handle: Handle, fd: int | None, view: np.ndarray, object_bytes: int) -> None:
        self.handle, self.fd, self.view = handle, fd, view
        self.object_bytes = object_bytes  # of the whole object that the handle names a part of

    def part(self, offset: int, nbytes: int) -> Handle:
        """A handle of other bytes of the same object; they need not be there."""
        return self.handle.model_copy(update={"base_offset": self.handle.base_offset + offset, "nbytes": nbytes})


class Lab:
    """What all labs have. `device` is on the bench; the rest uses its protocol alone."""

    device: Device

    def __init__(self) -> None:
        self._cleanup = contextlib.ExitStack()
        self._kept: list[np.ndarray] = []  # mapped until all copies have drained

    def engine(self, nbytes: int, base_offset: int = 0, fill: int | None = None) -> EngineMemory:
        """Memory of an engine, of random bytes or of one."""
        made = self._export(nbytes, base_offset)
        made.view[:] = np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8) if fill is None else fill
        return made

    def _export(self, nbytes: int, base_offset: int) -> EngineMemory:
        raise NotImplementedError

    def stall(self) -> None:
        """From now on nothing is copied ..."""
        raise NotImplementedError

    def go(self) -> None:
        """... until now."""
        raise NotImplementedError

    def host(self, nbytes: int) -> np.ndarray:
        """Registered host memory, all zeros."""
        array = np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)
        self.device.register_host(address(array), nbytes)
        self._kept.append(array)
        return array

    def completions(self, count: int) -> list[Done]:
        """Wait until so many plans have ended."""
        done: list[Done] = []
        while len(done) < count:
            assert select.select([self.device.fileno()], [], [], PATIENCE_S)[0], f"{len(done)} of {count} ended"
            done += self.device.completions()
        return done

    def run(self, kind: Kind, plans: list[CopyPlan]) -> None:
        """Submit plans as room allows and wait for all; each must end well."""
        left, ended = list(enumerate(plans)), 0
        while ended < len(plans):
            while left and self.device.room(kind):
                token, plan = left.pop(0)
                self.device.submit(kind, plan, token)
            done = self.completions(1)
            assert all(d.ok for d in done), done
            ended += len(done)

    def close(self) -> None:
        self.go()
        assert self.device.drain(PATIENCE_S)
        self._cleanup.close()


class CpuLab(Lab):
    """The CPU device, engines in memfds."""

    def __init__(self) -> None:
        super().__init__()
        self.knobs = Knobs()
        self.device = CpuDevice(self.knobs)
        self._cleanup.callback(self.device.close)

    def _export(self, nbytes: int, base_offset: int) -> EngineMemory:
        fd = os.memfd_create("engine")
        self._cleanup.callback(os.close, fd)
        whole = base_offset + nbytes
        os.posix_fallocate(fd, 0, whole)
        view = np.frombuffer(mmap.mmap(fd, whole), dtype=np.uint8)[base_offset:]
        return EngineMemory(Handle(kind="shm_fd", nbytes=nbytes, base_offset=base_offset), fd, view, whole)

    def stall(self) -> None:
        self.knobs.going.clear()

    def go(self) -> None:
        self.knobs.going.set()


class CudaLab(Lab):
    """The CUDA device on the stub driver; engines in the memory of another process."""

    def __init__(self, stub: Stub, exporter: Exporter, kind: str = "cuda_ipc", *how: str) -> None:
        super().__init__()
        self.stub, self.exporter, self.kind, self.how = stub, exporter, kind, how
        stub.control(*how)
        self.device = CudaDevice(library=stub.path, chunk_bytes=1 << 20)
        self._cleanup.callback(self.device.close)

    def _export(self, nbytes: int, base_offset: int) -> EngineMemory:
        made = self.exporter.export(self.kind, nbytes, base_offset)
        if made.fd >= 0:
            self._cleanup.callback(os.close, made.fd)
        return EngineMemory(made.handle, None if made.fd < 0 else made.fd, made.view, made.size)

    def stall(self) -> None:
        self.stub.control(*self.how, "copy hang")

    def go(self) -> None:
        self.stub.control(*self.how)

    def close(self) -> None:
        super().close()
        self.stub.finish()


# Each a kind of memory, or a driver or GPU that answers otherwise. With a GPU, `kvferry gpu-check` asks the same.
CUDA_LABS = {
    "cuda": ("cuda_ipc",),
    "cuda-vmm": ("cuda_vmm_fd",),
    "cuda-before-12.8": ("cuda_ipc", "driver 12040"),  # no batch call: copies one by one
    "cuda-other-addresses": ("cuda_ipc", "attr 91 0"),  # the GPU has addresses of its own for the pool
}


@pytest.fixture(scope="session")
def exporter() -> Iterator[Exporter]:
    """An engine's process on the stub driver."""
    made = Exporter(str(build() / "libcuda.so.1"))
    yield made
    made.close()


@pytest.fixture(params=["cpu", *CUDA_LABS])
def lab(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lab]:
    if request.param == "cpu":
        made: Lab = CpuLab()
    else:
        build()  # or skip, before anything is started
        stub, engines = Stub(tmp_path / "calls"), request.getfixturevalue("exporter")
        made = CudaLab(stub, engines, *CUDA_LABS[request.param])
    yield made
    made.close()


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def plan_of(src, dst, size) -> CopyPlan:
    return CopyPlan(*(np.atleast_1d(np.asarray(column, dtype=np.uint64)) for column in (src, dst, size)))
