"""The device of a CPU engine: its KV cache is shared memory, and two threads of this process copy.

    submit ─▶ chunks ─▶ [loads ]─┐   two threads, each takes the most urgent chunk,
                        [stores]─┴─▶ copies with the interpreter's lock released ─▶ Done + eventfd

Chunks of about 1 MiB, loads first: a load that comes while stores run waits for one chunk, 0.1 ms. A plan
of no more than that is copied by the caller, if nothing goes before it: handing it to a thread and back costs
two turns of the scheduler, which on a busy machine take longer than the copy.
A plan is done when all its chunks are and all plans of its direction before it are.

Never touches memory that it was not shown: each descriptor is looked up among the attached mappings and
registered regions, and refused as PlanError otherwise.
"""

import bisect
import ctypes
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvferry.gpu_worker.api import ORDER
from kvferry.gpu_worker.devices.base import (
    MAX_IN_FLIGHT,
    Caps,
    CopyPlan,
    Done,
    HandleError,
    HostRegion,
    Mapping,
    PlanError,
    WouldBlock,
    check_limits,
    idle,
)
from kvferry.gpu_worker.devices.pieces import Piece, chunks_of, pieces_of
from kvferry.gpu_worker.memory import prefault
from kvferry.proto.layout import Handle
from kvferry.proto.outcome import Kind

NUM_THREADS: Final = 2


@dataclass(slots=True)
class Knobs:
    """For tests: a slow, a stuck or a failing device."""

    bytes_per_s: float = 0  # 0: as fast as it goes
    fail_after: int = -1  # plans that succeed before all others fail; -1: none fails
    going: threading.Event = field(default_factory=threading.Event)  # clear it to stall every copy

    def __post_init__(self) -> None:
        self.going.set()

    @property
    def is_off(self) -> bool:
        """Whether copies run as fast as they go."""
        return self.going.is_set() and not self.bytes_per_s


@dataclass(slots=True, eq=False)
class _Batch:
    token: int
    kind: Kind
    plan: CopyPlan  # kept alive until done
    submitted_ns: int
    num_left: int  # chunks
    error: str = ""
    done_ns: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Buffer:
    """A stretch of this process's memory and the array that views it."""

    base: int
    nbytes: int
    array: npt.NDArray[np.uint8]
    owner: Any  # what keeps it mapped


class CpuDevice:
    """Copies between shared memory and the pool on the host's own cores."""

    def __init__(self, knobs: Knobs | None = None, num_threads: int = NUM_THREADS) -> None:
        self.knobs = knobs or Knobs()
        self._buffers: list[_Buffer] = []  # by base; replaced as a whole, never changed: threads read it
        self._queues: dict[Kind, deque[tuple[_Batch, list[Piece]]]] = {kind: deque() for kind in Kind}
        self._wake: SimpleQueue[bool] = SimpleQueue()  # True: there is work; False ends a thread
        self._lock = threading.Lock()
        self._running: dict[Kind, deque[_Batch]] = {kind: deque() for kind in Kind}
        self._done: list[Done] = []
        self._idle = threading.Event()
        self._idle.set()
        self._num_submitted = 0
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closed = False
        self._threads = [threading.Thread(target=self._work, name=f"copy-{i}", daemon=True) for i in range(num_threads)]
        for thread in self._threads:
            thread.start()

    @property
    def caps(self) -> Caps:
        return Caps(kind="cpu", name="host memory", handle_kinds=("shm_fd",))

    def describe(self) -> dict[str, Any]:
        return {"kind": "cpu"}

    # ---- memory --------------------------------------------------------------------------------

    def attach(self, handle: Handle, fd: int | None) -> Mapping:
        if handle.kind != "shm_fd":
            raise HandleError(
                "handle.kind",
                f"the engine's memory is of kind {handle.kind!r}; a worker with --device cpu maps 'shm_fd' only",
                "start kvferry with the device that the engine uses",
            )
        if fd is None:
            raise HandleError("handle.stale", "a handle of kind 'shm_fd' came without its descriptor")
        end = handle.base_offset + handle.nbytes
        try:
            info = os.fstat(fd)
            if info.st_size < end:
                raise HandleError(
                    "handle.stale",
                    f"the handle ends at byte {end}, its file at byte {info.st_size}",
                    "export the memory again",
                )
            mapped = mmap.mmap(fd, end, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            raise HandleError("handle.stale", f"the engine's memory cannot be mapped: {error.strerror}") from None
        except ValueError as error:
            raise HandleError("handle.stale", f"the engine's memory cannot be mapped: {error}") from None
        array = np.frombuffer(mapped, dtype=np.uint8)
        if info.st_blocks * 512 >= end:
            # All of it exists already: fill this process's page tables now and not during the first copies.
            prefault(_address(array), end, array)
        buffer = self._add_buffer(array[handle.base_offset :], mapped)
        return Mapping(buffer.base, handle.nbytes)

    def detach(self, mapping: Mapping) -> None:
        # Unmapped when the last view of it is gone.
        self._buffers = [buffer for buffer in self._buffers if buffer.base != mapping.base]

    def read(self, mapping: Mapping, offset: int, nbytes: int) -> bytes:
        return ctypes.string_at(mapping.base + offset, nbytes)

    def register_host(self, base: int, nbytes: int, between: Callable[[], None] = idle) -> HostRegion:
        memory = (ctypes.c_uint8 * nbytes).from_address(base)
        self._add_buffer(np.frombuffer(memoryview(memory), dtype=np.uint8), memory)
        return HostRegion(base, nbytes)

    def unregister_host(self, region: HostRegion) -> None:
        self._buffers = [buffer for buffer in self._buffers if buffer.base != region.base]

    def _add_buffer(self, array: npt.NDArray[np.uint8], owner: Any) -> _Buffer:
        buffer = _Buffer(_address(array), len(array), array, owner)
        self._buffers = sorted([*self._buffers, buffer], key=lambda b: b.base)
        return buffer

    # ---- plans ---------------------------------------------------------------------------------

    def room(self, kind: Kind) -> int:
        return MAX_IN_FLIGHT - len(self._running[kind])

    def submit(self, kind: Kind, plan: CopyPlan, token: int) -> None:
        if not self.room(kind):
            raise WouldBlock("device.room", f"{MAX_IN_FLIGHT} plans of this direction are in flight")
        self._check(plan)
        chunks = chunks_of(pieces_of(plan))
        self._num_submitted += 1
        fails = 0 <= self.knobs.fail_after < self._num_submitted
        error = f"plan {self._num_submitted} fails by request" if fails else ""
        batch = _Batch(token, kind, plan, time.monotonic_ns(), len(chunks), error)
        with self._lock:
            may_copy_here = not (self._running[Kind.LOAD] or self._running[kind]) and self.knobs.is_off
            self._running[kind].append(batch)
            self._idle.clear()
        if may_copy_here and len(chunks) == 1:
            self._run_chunk(batch, chunks[0])
            return
        self._queues[kind].extend((batch, chunk) for chunk in chunks)
        # Each woken thread takes chunks until none is left. One wake a chunk would hand the interpreter's
        # lock back and forth for each of them: 1 ms for 32 chunks.
        for _ in range(min(len(chunks), len(self._threads))):
            self._wake.put(True)

    def completions(self) -> list[Done]:
        with self._lock:
            if self._done:
                os.eventfd_read(self._eventfd)
            done, self._done = self._done, []
        return done

    def fileno(self) -> int:
        return self._eventfd

    def drain(self, timeout_s: float) -> bool:
        return self._idle.wait(timeout_s)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self.knobs.going.set()
        self.knobs.bytes_per_s = 0
        for _ in self._threads:
            self._wake.put(False)
        for thread in self._threads:
            thread.join(timeout=1)
        os.close(self._eventfd)

    def _check(self, plan: CopyPlan) -> None:
        check_limits(plan)
        bases = np.array([buffer.base for buffer in self._buffers], dtype=np.uint64)
        ends = np.array([buffer.base + buffer.nbytes for buffer in self._buffers], dtype=np.uint64)
        for addresses in (plan.src, plan.dst):
            at = np.searchsorted(bases, addresses, side="right").astype(np.int64) - 1
            if (at < 0).any() or (addresses + plan.size > ends[at]).any():
                raise PlanError("plan.address", "a descriptor lies outside the attached and registered memory")

    # ---- the copy threads ----------------------------------------------------------------------

    def _work(self) -> None:
        while self._wake.get():
            while (item := self._next_chunk()) is not None:
                self._run_chunk(*item)

    def _run_chunk(self, batch: _Batch, chunk: list[Piece]) -> None:
        if not batch.error:
            try:
                self._copy(chunk)
            except Exception as error:  # a failed copy is a result; a dead thread would be silence
                batch.error = f"{type(error).__name__}: {error}"
        self._finish_chunk(batch)

    def _next_chunk(self) -> tuple[_Batch, list[Piece]] | None:
        for kind in ORDER:
            try:
                return self._queues[kind].popleft()
            except IndexError:
                continue
        return None

    def _copy(self, chunk: list[Piece]) -> None:
        self.knobs.going.wait()
        for piece in chunk:
            src = self._rows(piece.src, piece.rows, piece.run, piece.src_stride)
            dst = self._rows(piece.dst, piece.rows, piece.run, piece.dst_stride)
            if src is not None and dst is not None:
                np.copyto(dst, src)
                continue
            for row in range(piece.rows):
                ctypes.memmove(piece.dst + row * piece.dst_stride, piece.src + row * piece.src_stride, piece.run)
        if self.knobs.bytes_per_s:
            time.sleep(sum(piece.rows * piece.run for piece in chunk) / self.knobs.bytes_per_s)

    def _rows(self, address: int, rows: int, run: int, stride: int) -> npt.NDArray[np.uint8] | None:
        """A view of the rows; None for a single one, which memmove does best, or if they span two mappings."""
        if rows == 1:
            return None
        buffers = self._buffers
        buffer = buffers[bisect.bisect_right(buffers, address, key=lambda b: b.base) - 1]
        offset = address - buffer.base
        if offset + (rows - 1) * stride + run > buffer.nbytes:
            return None
        return np.ndarray((rows, run), np.uint8, buffer.array, offset, (stride, 1))

    def _finish_chunk(self, batch: _Batch) -> None:
        with self._lock:
            batch.num_left -= 1
            if batch.num_left:
                return
            batch.done_ns = time.monotonic_ns()
            running = self._running[batch.kind]
            if running[0].num_left:
                return  # ends with the one before it
            while running and not running[0].num_left:
                self._done.append(_done(running.popleft()))
            if not any(self._running.values()):
                self._idle.set()
            # Within the lock, so that the descriptor is readable exactly while there is something to take.
            os.eventfd_write(self._eventfd, 1)


def _done(batch: _Batch) -> Done:
    return Done(batch.token, not batch.error, batch.error, batch.plan.nbytes, batch.submitted_ns, batch.done_ns)


def _address(array: npt.NDArray[np.uint8]) -> int:
    return int(array.__array_interface__["data"][0])
