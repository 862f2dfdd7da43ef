"""One direction of copies: a stream, its events, and the thread that waits for them.

    submit ─▶ cuMemcpyBatchAsync ─▶ cuEventRecord ─▶ queue ─▶ waiter: cuEventSynchronize ─▶ ended(batch, error)
    (loop)    or cuMemcpyAsync n times                        (sleeps in the driver, the interpreter's lock free)

The end of a batch is its event and nothing else. A call that fails may have queued a part of its batch: the
batch is failed, and still only over when its event is. If an event cannot be recorded or waited for, nobody
knows what the GPU still does, and the device is lost: this process's death is the proof then.

The stream never waits for anything but its own copies, and is never the null stream, which waits for every other.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final

from kvferry.cuda.driver import CudaError, Driver
from kvferry.cuda.library import NOT_SUPPORTED, SUCCESS
from kvferry.cuda.structs import EVENT_BLOCKING_SYNC, EVENT_DISABLE_TIMING, AccessOrder
from kvferry.gpu_worker.api import U64
from kvferry.gpu_worker.devices.base import MAX_DESCRIPTORS, MAX_IN_FLIGHT, DeviceLost
from kvferry.proto.outcome import Kind

log = logging.getLogger("kvferry.worker")

# A store reads what the engine's stream wrote; its mark was seen before, so both orders would do. A load reads
# host memory that nobody writes: the driver may read it as early as it likes.
ORDERS: Final = {Kind.STORE: AccessOrder.STREAM, Kind.LOAD: AccessOrder.ANY}
JOIN_S: Final = 1.0


@dataclass(slots=True, eq=False)
class Batch:
    """One submitted plan, from its call to its event."""

    token: int
    nbytes: int
    dst: U64  # these three are kept alive until its end
    src: U64
    size: U64
    submitted_ns: int
    error: str = ""
    event: int = 0


class Lane:
    """Copies of one direction, in the order of their submission. `ended` is called by the waiter's thread."""

    def __init__(
        self,
        driver: Driver,
        context: int,
        kind: Kind,
        ended: Callable[["Lane", Batch, CudaError | None], None],
        *,
        use_batch: bool,
        copy_flags: int = 0,
    ) -> None:
        self.kind = kind
        self.use_batch = use_batch
        self._batch_worked = False  # at least once here
        self._driver = driver
        self._context = context
        self._ended = ended
        self._copy_flags = copy_flags
        self.stream = driver.stream_create()
        self._all_events = [
            driver.event_create(EVENT_BLOCKING_SYNC | EVENT_DISABLE_TIMING) for _ in range(MAX_IN_FLIGHT)
        ]
        self._events = deque(self._all_events)
        self._queue: SimpleQueue[Batch | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._wait, name=f"wait-{kind.name.lower()}", daemon=True)
        self._thread.start()

    def submit(self, batch: Batch) -> None:
        """Start a batch; the caller has made sure that there is room. DeviceLost."""
        try:
            for start in range(0, len(batch.size), MAX_DESCRIPTORS):
                self._start(batch, slice(start, start + MAX_DESCRIPTORS))
        except CudaError as error:
            if error.is_sticky:
                raise lost(error) from None
            batch.error = error.text
        batch.event = self._events.popleft()
        try:
            self._driver.event_record(batch.event, self.stream)
        except CudaError as error:
            raise lost(error) from None
        self._queue.put(batch)

    def stop(self) -> bool:
        """End the waiter; False if it still waits for a copy. No call of the driver."""
        self._queue.put(None)
        self._thread.join(JOIN_S)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Give stream and events back; the waiter has ended."""
        for event in self._all_events:
            self._driver.event_destroy(event)
        self._driver.stream_destroy(self.stream)

    def _start(self, batch: Batch, part: slice) -> None:
        dst, src, size = batch.dst[part], batch.src[part], batch.size[part]
        refusal: CudaError | None = None
        if self.use_batch:
            refusal = self._start_batch(dst, src, size)
            if refusal is None:
                return
        for to, start, nbytes in zip(dst.tolist(), src.tolist(), size.tolist(), strict=True):
            self._driver.copy(to, start, nbytes, self.stream)
        if refusal is not None:
            log.warning("%s copies are queued one by one from here on: %s", self.kind.name, refusal.text)
            self.use_batch = False

    def _start_batch(self, dst: U64, src: U64, size: U64) -> CudaError | None:
        """One call for all; None, or why it will not do here, which is found out by its first use."""
        try:
            self._driver.copy_batch(
                _address(dst), _address(src), _address(size), len(size),
                ORDERS[self.kind], self._copy_flags, self.stream,
            )  # fmt: skip
        except CudaError as error:
            # A driver may have the call and not take this GPU's memory, or that of another process, in it. What
            # was queued before it said so is copied twice: the same bytes to the same place.
            if error.is_sticky or (self._batch_worked and error.result != NOT_SUPPORTED):
                raise
            return error
        self._batch_worked = True
        return None

    def _wait(self) -> None:
        """The waiter's thread."""
        error: CudaError | None = None
        try:
            self._driver.use(self._context)
        except CudaError as refused:
            error = refused
        while (batch := self._queue.get()) is not None:
            if error is None:
                result = self._driver.event_wait(batch.event)
                error = None if result == SUCCESS else self._driver.error("cuEventSynchronize", result)
            if error is None:
                self._events.append(batch.event)
            self._ended(self, batch, error)


def lost(error: CudaError) -> DeviceLost:
    """What a call that cannot be survived means."""
    return DeviceLost("device.lost", f"the GPU context of this worker is of no use any more: {error.text}")


def _address(column: U64) -> int:
    return int(column.ctypes.data)
