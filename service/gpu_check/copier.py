"""Process C: the worker's device and planner alone, told what to copy. Told by `talk.serve`.

    open ─▶ device      lend ─▶ the engine's memory, mapped      pool ─▶ a pool file, registered
    copy ─▶ planned and run to the end; the slots' headers are nobody's business here
    reference ─▶ the same bytes by torch (numpy on CPU), without device and planner

What it is for: paths that a running worker has only one of (batch or loop), layouts that a worker of this
version refuses (two groups), and measurements (`copier_speed.py`, `copier_pool.py`).
"""

import argparse
import ctypes
import os
import select
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from kvferry.gpu_check.talk import serve
from kvferry.gpu_check.views import Bytes
from kvferry.gpu_worker.devices.base import CopyPlan, Device, Mapping
from kvferry.gpu_worker.layout import Planner
from kvferry.gpu_worker.pool import Pool
from kvferry.proto.errors import LostError
from kvferry.proto.layout import Group, Handle, Region
from kvferry.proto.limits import PAGE_BYTES
from kvferry.proto.outcome import Kind

COPY_S: Final = 20.0  # a few hundred MiB; past this the device hangs


class Copier:
    """One device on the bench."""

    def __init__(self) -> None:
        self.device: Device
        self.driver: Any = None  # of CUDA
        self.mapping: Mapping
        self.pool: Pool
        self._token = 0
        self._torch: Any = None
        self._event: Any = None

    # ---- what it works with ----------------------------------------------------------------------

    def open(
        self, device: str, gpu: str, copies: Literal["auto", "batch", "loop"] = "auto", copy_flags: int = 0
    ) -> dict[str, Any]:
        """Open the device."""
        if device == "cpu":
            from kvferry.gpu_worker.devices.cpu import CpuDevice

            self.device = CpuDevice()
        else:
            from kvferry.cuda.driver import Driver
            from kvferry.gpu_worker.devices.cuda import CudaDevice

            self.driver = Driver.load()
            self.device = CudaDevice(gpu, copies=copies, copy_flags=copy_flags)
        return self.device.describe()

    def describe(self) -> dict[str, Any]:
        """What the device says of itself: also whether it still copies by batch."""
        return self.device.describe()

    def lend(self, handle: dict[str, Any], pid: int, fds: Sequence[int]) -> None:
        """Map memory that process `pid` lends."""
        fd = os.open(f"/proc/{pid}/fd/{fds[0]}", os.O_RDWR) if fds else None
        try:
            self.mapping = self.device.attach(Handle(**handle), fd)
        finally:
            if fd is not None:
                os.close(fd)

    def use_pool(self, path: str) -> float:
        """Map and register a pool file; the seconds that the registration took."""
        self.pool = Pool(Path(path))
        began = time.monotonic()
        self.device.register_host(self.pool.base, self.pool.nbytes)
        return time.monotonic() - began

    # ---- copies ----------------------------------------------------------------------------------

    def copy(
        self, kind: int, regions: Sequence[Sequence[int]], slot_bytes: int, blocks: Sequence[int], slots: Sequence[int]
    ) -> int:
        """Copy block i to or from slot i, and wait; the number of descriptors."""
        plans = self.plans(Kind(kind), regions, slot_bytes, blocks, slots)
        self.run({Kind(kind): plans})
        return sum(len(plan.size) for plan in plans)

    def plans(
        self,
        kind: Kind,
        regions: Sequence[Sequence[int]],
        slot_bytes: int,
        blocks: Sequence[int],
        slots: Sequence[int],
    ) -> list[CopyPlan]:
        """As the worker plans them."""
        group = Group(regions=tuple(region_of(region) for region in regions), block_tokens=16)
        num_slots = self.pool.num_slots(slot_bytes)
        planner = Planner(group, [self.mapping.base], self.pool.slots_base, slot_bytes, num_slots)
        return planner.plan(np.array(blocks, dtype=np.uint32), np.array(slots, dtype=np.uint32), kind)

    def run(self, plans: dict[Kind, list[CopyPlan]]) -> float:
        """Give the device all of them as it has room, both directions at once; seconds spent inside `submit`."""
        waiting = {kind: list(reversed(some)) for kind, some in plans.items()}
        left = sum(map(len, plans.values()))
        spent = 0.0
        until = time.monotonic() + COPY_S
        while left:
            for kind, some in waiting.items():
                while some and self.device.room(kind):
                    self._token += 1
                    began = time.perf_counter()
                    self.device.submit(kind, some.pop(), self._token)
                    spent += time.perf_counter() - began
            if not select.select([self.device.fileno()], [], [], max(until - time.monotonic(), 0))[0]:
                raise LostError("check.copy", f"{left} plans have not ended within {COPY_S:g} s")
            for done in self.device.completions():
                if not done.ok:
                    raise LostError("check.copy", f"a copy failed: {done.error}")
                left -= 1
        return spent

    def reference(self, regions: Sequence[Sequence[int]], blocks: Sequence[int]) -> list[bytes]:
        """The payloads of these blocks by another way than the device's."""
        read = self._reader()
        return [
            b"".join(
                read(region.offset + block * region.stride, region.run) for region in (region_of(r) for r in regions)
            )
            for block in blocks
        ]

    def _reader(self) -> Callable[[int, int], bytes]:
        if self.driver is None:
            return lambda offset, nbytes: ctypes.string_at(self.mapping.base + offset, nbytes)
        try:
            import torch
        except ImportError:
            return lambda offset, nbytes: self.device.read(self.mapping, offset, nbytes)
        from kvferry.gpu_check.compute_torch import tensor_at

        if not torch.cuda.is_available():
            return lambda offset, nbytes: self.device.read(self.mapping, offset, nbytes)
        if self._torch is None:
            device = torch.device("cuda", self.driver.current_device())
            self._torch = tensor_at(torch, self.mapping.base, self.mapping.nbytes, device)
        whole = self._torch
        return lambda offset, nbytes: bytes(whole[offset : offset + nbytes].cpu().numpy().tobytes())

    def ways(self) -> str:
        """Which way `reference` goes."""
        self._reader()
        return "torch" if self._torch is not None else "numpy" if self.driver is None else "driver, one by one"

    def memory_free(self) -> int:
        """Bytes of the GPU that nobody has; 0 on CPU."""
        return int(self.driver.memory_info()[0]) if self.driver is not None else 0

    # ---- interprocess events, which kvferry does not use: torch has the calls -----------------------

    def warm_torch(self) -> None:
        """Import torch and let it find the context, so that what is timed later is not that."""
        import torch

        torch.zeros(1, device=torch.device("cuda", self.driver.current_device()))
        torch.cuda.synchronize()

    def open_event(self, handle: bytes) -> float:
        """Open another process's event; the microseconds that took."""
        import torch

        began = time.perf_counter()
        self._event = torch.cuda.Event.from_ipc_handle(torch.device("cuda", self.driver.current_device()), handle)
        return (time.perf_counter() - began) * 1e6

    def ask_event(self, seconds: float) -> dict[str, Any]:
        """Ask the opened event until it has happened, at most so long."""
        began = time.monotonic()
        asked = 1
        while not (happened := bool(self._event.query())) and time.monotonic() - began < seconds:
            asked += 1
        ended_ns = time.monotonic_ns()
        return {
            "happened": happened,
            "ended_ns": ended_ns,
            "query_us": round((ended_ns / 1e9 - began) / asked * 1e6, 2),
        }


def region_of(fields: Sequence[int]) -> Region:
    """A region from its numbers: offset, stride, run, blocks."""
    offset, stride, run, blocks = fields
    return Region(handle=0, offset=offset, stride=stride, run=run, blocks=blocks)


def payload_of(slots: Bytes, slot_bytes: int, slot: int, payload: int) -> Bytes:
    """A slot's payload within the bytes of a pool file."""
    start = PAGE_BYTES + slot * slot_bytes + PAGE_BYTES
    return slots[start : start + payload]


def main() -> None:
    """Do what is asked."""
    from kvferry.gpu_check import copier_pool, copier_speed, items_look

    parser = argparse.ArgumentParser(prog="python -m kvferry.gpu_check.copier", description=__doc__)
    parser.add_argument("--line-fd", required=True, type=int)
    options = parser.parse_args()
    copier = Copier()
    own = ("open", "describe", "lend", "use_pool", "copy", "reference", "ways", "memory_free")
    events = ("warm_torch", "open_event", "ask_event")
    deeds: dict[str, Callable[..., Any]] = {name: getattr(copier, name) for name in (*own, *events)}
    deeds["look"] = items_look.ask_driver
    for module in (copier_speed, copier_pool):
        deeds |= module.deeds_of(copier)
    serve("kvferry-check-c", options.line_fd, deeds)
    os._exit(0)


if __name__ == "__main__":
    main()
