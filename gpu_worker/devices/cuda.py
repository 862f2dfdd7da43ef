"""The device of a CUDA engine: its KV cache is another process's GPU memory, and the GPU's copy engines copy.

    open     driver ─▶ GPU by UUID ─▶ primary context ─▶ a lane per direction      before any engine is there
    pin      the pool, in chunks                              cuda_pins.py
    attach   the engine's memory, by handle                   cuda_memory.py
    submit   plan ─▶ checked, cut at chunks ─▶ lane ─▶ GPU    ranges.py, cuda_copies.py
    end      event ─▶ waiter ─▶ Done + eventfd ─▶ loop

Runs no kernel (a second process's kernels take turns with the engine's; copies do not), gives the GPU nothing to
wait for, and has no callback on a driver's thread. Loads the driver when it is opened, not when it is
imported; knows no torch.

After a sticky error (see `kvferry.cuda.library.STICKY`) no call of this process works any more: whatever is asked
then raises DeviceLost, the worker exits, and its death says what no call can say any more, that its copies are over.
"""

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Literal

from kvferry.cuda.driver import LIBRARY, CudaError, Driver
from kvferry.cuda.structs import EVENT_DISABLE_TIMING
from kvferry.gpu_worker.devices.base import (
    MAX_IN_FLIGHT,
    Caps,
    CopyPlan,
    DeviceLost,
    Done,
    HandleError,
    HostRegion,
    Mapping,
    WouldBlock,
    check_limits,
    idle,
)
from kvferry.gpu_worker.devices.cuda_copies import Batch, Lane, lost
from kvferry.gpu_worker.devices.cuda_gpu import check_usable, find
from kvferry.gpu_worker.devices.cuda_memory import KINDS, Imports
from kvferry.gpu_worker.devices.cuda_pins import CHUNK_BYTES, Pins
from kvferry.gpu_worker.devices.ranges import Ranges
from kvferry.proto.errors import ConfigError
from kvferry.proto.layout import Handle
from kvferry.proto.limits import PAGE_BYTES
from kvferry.proto.outcome import Kind

log = logging.getLogger("kvferry.worker")

SCRATCH_BYTES: Final = 16 * PAGE_BYTES  # of the driver's own memory that `read` goes through
READ_S: Final = 2.0  # a few bytes take microseconds; past this the GPU hangs
READ_POLL_S: Final = 0.0002


class CudaDevice:
    """Copies between an engine's GPU memory and the pinned pool.

    `gpu` is a UUID or a number among the visible ones. Unless it `must_pin`, host memory that the driver refuses to pin
    is copied to and from all the same. ConfigError if the driver, the GPU or its context cannot
    be had. `library`, `copies` and `chunk_bytes` are for tests and measurements.
    """

    def __init__(
        self,
        gpu: str = "0",
        *,
        library: str = LIBRARY,
        copies: Literal["auto", "batch", "loop"] = "auto",
        copy_flags: int = 0,
        chunk_bytes: int = CHUNK_BYTES,
        must_pin: bool = True,
    ) -> None:
        driver = self._driver = Driver.load(library)
        self._gpu = find(driver, gpu)
        check_usable(self._gpu)
        use_batch = copies == "batch" or (copies == "auto" and driver.has_batch)
        self._lock = threading.Lock()
        self._num_running = dict.fromkeys(Kind, 0)
        self._done: list[Done] = []
        self._lost: DeviceLost | None = None
        self._idle = threading.Event()
        self._idle.set()
        self._is_closed = False
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lanes: dict[Kind, Lane] = {}
        try:
            context = driver.retain_context(self._gpu.device)
            driver.use(context)
            for kind in Kind:
                self._lanes[kind] = Lane(driver, context, kind, self._ended, use_batch=use_batch, copy_flags=copy_flags)
            self._read_event = driver.event_create(EVENT_DISABLE_TIMING)
            self._scratch = driver.host_allocate(SCRATCH_BYTES)
            self._scratch_address = driver.host_device_pointer(self._scratch)
        except CudaError as error:
            for lane in self._lanes.values():
                lane.stop()
            os.close(self._eventfd)
            raise ConfigError(
                "device.open",
                f"no context on GPU {self._gpu.uuid} ({self._gpu.name}): {error.text}",
                "a worker needs about half a GiB of GPU memory: start kvferry before the engine, or give the engine a"
                " smaller share (--gpu-memory-utilization)",
            ) from None
        self._imports = Imports(driver, self._gpu.device, self._gpu.uuid)
        self._pins = Pins(driver, self._gpu.same_address, chunk_bytes, must_pin)
        self._engine_ranges = self._pool_ranges = Ranges()

    @property
    def caps(self) -> Caps:
        gpu = self._gpu
        kinds = KINDS if gpu.takes_fds else KINDS[:1]
        return Caps("cuda", gpu.name, kinds, gpu.mark_mode, gpu.uuid, gpu.numa_node)

    def describe(self) -> dict[str, Any]:
        gpu, lanes, version = self._gpu, self._lanes.values(), self._driver.version()
        return {
            "kind": "cuda",
            "name": gpu.name,
            "uuid": gpu.uuid,
            "numa_node": gpu.numa_node,
            "driver": f"CUDA {version // 1000}.{version % 1000 // 10}",
            "copies": "batch" if all(lane.use_batch for lane in lanes) else "loop",
            "pinned_bytes": self._pins.nbytes,
            "pinned_chunks": self._pins.num_chunks,
            "pin_s": round(self._pins.seconds, 3),
            "pin_refused": self._pins.refusal,
        }

    # ---- memory --------------------------------------------------------------------------------

    def attach(self, handle: Handle, fd: int | None) -> Mapping:
        self._check_alive()
        mapping = self._imports.attach(handle, fd)
        self._engine_ranges = Ranges(self._imports.stretches())
        return mapping

    def detach(self, mapping: Mapping) -> None:
        self._imports.detach(mapping)
        self._engine_ranges = Ranges(self._imports.stretches())

    def read(self, mapping: Mapping, offset: int, nbytes: int) -> bytes:
        self._check_alive()
        found = bytearray()
        try:
            while len(found) < nbytes:
                found += self._read(mapping.base + offset + len(found), min(SCRATCH_BYTES, nbytes - len(found)))
        except CudaError as error:
            if error.is_sticky:
                raise self._lose(lost(error)) from None
            raise HandleError("handle.refused", f"the mapped memory cannot be read: {error.text}") from None
        return bytes(found)

    def _read(self, address: int, nbytes: int) -> bytes:
        stream = self._lanes[Kind.STORE].stream
        self._driver.copy(self._scratch_address, address, nbytes, stream)
        self._driver.event_record(self._read_event, stream)
        deadline = time.monotonic() + READ_S
        while not self._driver.event_happened(self._read_event):
            if time.monotonic() >= deadline:
                hangs = f"a copy of {nbytes} bytes has not ended within {READ_S:g} s"
                raise self._lose(DeviceLost("device.lost", hangs))
            time.sleep(READ_POLL_S)
        return ctypes.string_at(self._scratch, nbytes)

    def register_host(self, base: int, nbytes: int, between: Callable[[], None] = idle) -> HostRegion:
        region = self._pins.pin(base, nbytes, between)
        self._pool_ranges = Ranges(self._pins.stretches())
        return region

    def unregister_host(self, region: HostRegion) -> None:
        self._pins.unpin(region)
        self._pool_ranges = Ranges(self._pins.stretches())

    # ---- plans ---------------------------------------------------------------------------------

    def room(self, kind: Kind) -> int:
        return MAX_IN_FLIGHT - self._num_running[kind]

    def submit(self, kind: Kind, plan: CopyPlan, token: int) -> None:
        self._check_alive()
        if not self.room(kind):
            raise WouldBlock("device.room", f"{MAX_IN_FLIGHT} plans of this direction are in flight")
        check_limits(plan)
        is_store = kind is Kind.STORE
        engine, pool = (plan.src, plan.dst) if is_store else (plan.dst, plan.src)
        self._engine_ranges.check(engine, plan.size, "the engine's memory that was attached")
        pool, engine, size = self._pool_ranges.cut(pool, engine, plan.size, "the registered memory of the pool")
        dst, src = (pool, engine) if is_store else (engine, pool)
        batch = Batch(token, plan.nbytes, dst, src, size, time.monotonic_ns())
        with self._lock:
            self._num_running[kind] += 1
            self._idle.clear()
        try:
            self._lanes[kind].submit(batch)
        except DeviceLost as error:
            self._lose(error)
            raise

    def completions(self) -> list[Done]:
        with self._lock:
            done, self._done = self._done, []
            if self._lost is not None and not done:
                raise self._lost
            if done and self._lost is None:
                os.eventfd_read(self._eventfd)
        return done

    def fileno(self) -> int:
        return self._eventfd

    def drain(self, timeout_s: float) -> bool:
        return self._idle.wait(timeout_s) and self._lost is None

    def close(self) -> None:
        """As the protocol says; whatever the driver refuses now ends with this process."""
        if self._is_closed:
            return
        self._is_closed = True
        if not all(lane.stop() for lane in self._lanes.values()):
            log.warning("a copy hangs: memory, streams and the descriptor are left to the end of this process")
            return
        os.close(self._eventfd)
        if self._lost is not None:
            return
        try:
            for lane in self._lanes.values():
                lane.close()
            self._imports.close()
            self._pins.close()
            self._driver.host_free(self._scratch)
            self._driver.event_destroy(self._read_event)
            self._driver.use(0)
            self._driver.release_context(self._gpu.device)
        except CudaError as error:
            log.warning("left to the end of this process: %s", error.text)

    # ---- the end of a batch, on a waiter's thread ------------------------------------------------

    def _ended(self, lane: Lane, batch: Batch, error: CudaError | None) -> None:
        if error is not None:
            self._lose(lost(error))
            return
        done = Done(
            batch.token, not batch.error, batch.error, batch.nbytes, batch.submitted_ns, time.monotonic_ns()
        )  # fmt: skip
        with self._lock:
            self._done.append(done)
            self._num_running[lane.kind] -= 1
            if not any(self._num_running.values()):
                self._idle.set()
            # Within the lock, so that the descriptor is readable exactly while there is something to take.
            os.eventfd_write(self._eventfd, 1)

    def _lose(self, error: DeviceLost) -> DeviceLost:
        """From now on this is the answer to everything."""
        with self._lock:
            self._lost = self._lost or error
            self._idle.set()  # who drains need not wait for what nobody will ever know
            os.eventfd_write(self._eventfd, 1)
            return self._lost

    def _check_alive(self) -> None:
        if self._lost is not None:
            raise self._lost
