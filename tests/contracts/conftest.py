"""Labs: one per kind of device. A device is trusted because it passes the same suite as every other."""

import contextlib
import mmap
import os
import select
from collections.abc import Iterator

import numpy as np
import pytest

from kvferry.gpu_worker.devices.base import CopyPlan, Device, Done
from kvferry.gpu_worker.devices.cpu import CpuDevice, Knobs
from kvferry.proto.layout import Handle
from kvferry.proto.outcome import Kind

PATIENCE_S = 10.0


class EngineMemory:
    """Memory as an engine exports it, and the engine's own view of it."""

    def __init__(self, handle: Handle, fd: int, view: np.ndarray) -> None:
        self.handle, self.fd, self.view = handle, fd, view


class CpuLab:
    """The CPU device, engines in memfds."""

    can_stall = True

    def __init__(self) -> None:
        self.knobs = Knobs()
        self.device: Device = CpuDevice(self.knobs)
        self._cleanup = contextlib.ExitStack()
        self._kept: list[np.ndarray] = []  # mapped until all copies have drained
        self._cleanup.callback(self.device.close)

    def engine(self, nbytes: int, base_offset: int = 0, fill: int | None = None) -> EngineMemory:
        fd = os.memfd_create("engine")
        self._cleanup.callback(os.close, fd)
        os.posix_fallocate(fd, 0, base_offset + nbytes)
        view = np.frombuffer(mmap.mmap(fd, base_offset + nbytes), dtype=np.uint8)[base_offset:]
        view[:] = np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8) if fill is None else fill
        return EngineMemory(Handle(kind="shm_fd", nbytes=nbytes, base_offset=base_offset), fd, view)

    def host(self, nbytes: int) -> np.ndarray:
        """Registered host memory, all zeros."""
        array = np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)
        self.device.register_host(address(array), nbytes)
        self._kept.append(array)
        return array

    def stall(self) -> None:
        """From now on nothing is copied ..."""
        self.knobs.going.clear()

    def go(self) -> None:
        """... until now."""
        self.knobs.going.set()

    # What follows uses the protocol alone.

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


LABS = {"cpu": CpuLab}  # a CUDA lab joins here, where there is a GPU


@pytest.fixture(params=sorted(LABS))
def lab(request) -> Iterator[CpuLab]:
    made = LABS[request.param]()
    yield made
    made.close()


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def plan_of(src, dst, size) -> CopyPlan:
    return CopyPlan(*(np.atleast_1d(np.asarray(column, dtype=np.uint64)) for column in (src, dst, size)))
