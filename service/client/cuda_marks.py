"""Marks of an engine that computes on a GPU. Imported only with such memory; `kvferry.cuda` does the calls.

    launched kernels ... │ signal: cuStreamWriteValue64(engine's stream, mark word, n) │ ... later kernels
                                              │ when the stream gets there, and all before it is visible
                                              ▼
    shared page, pinned once at start: mark = n ──▶ the worker's CPU reads it; no GPU waits for anything

Which of the two modes it is, is found out at start and stays: the device must say that it can write words of 64
bits, the page must be registered with the driver, and a real write must show up within a bound. Else an event
is recorded behind what was launched, and the begin is sent by the first call that finds it happened: `begin_*`,
`poll` and `wait` of the rank client look, so it goes out one or two steps later, and none of them waits for it.

The word has one writer, the home stream: two streams that wrote it could pass each other, and the later number
would let the earlier one's copies begin too soon. A mark asked for on another stream is therefore held back
until its event has happened, whatever the mode; when all of the home stream's marks are through, the other
stream becomes the home.

Nothing here is called while a CUDA graph is captured: engines capture with their connector switched off.
"""

import contextlib
import ctypes
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from kvferry.client.marks import Mark
from kvferry.cuda.driver import CudaError, Driver
from kvferry.cuda.structs import EVENT_DISABLE_TIMING, DeviceAttribute
from kvferry.proto import limits
from kvferry.proto.page import MARK, PageWriter
from kvferry.proto.tether import MarkMode

Stream = Callable[[], int]  # the stream that the engine launches on now

# A write shows up in microseconds on an idle stream; an engine at its start may still be loading behind it.
PROBE_S: Final = 2.0
PROBE_LOOK_S: Final = 0.0005

# Pages that a device may still write to: they stay mapped and registered until the process ends.
_left_behind: list["CudaMarks"] = []


def torch_stream() -> int:
    """torch's current stream."""
    import torch

    return int(torch.cuda.current_stream().cuda_stream)


class CudaMarks:
    """See the module's text. One thread's, but for the place where it is made."""

    def __init__(
        self,
        driver: Driver,
        device: int,
        context: int,
        page: PageWriter,
        memory: mmap.mmap,
        *,
        current_stream: Stream = torch_stream,
        wanted: MarkMode | None = None,
        probe_s: float = PROBE_S,
    ) -> None:
        """`wanted` "host" skips the probe. The thread's context is `context`, or becomes it."""
        self._driver, self._context, self._thread = driver, context, 0
        self._page, self._memory = page, memory
        self._current_stream = current_stream
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._is_registered = self._is_closed = False
        self._word = 0  # where the device sees the mark
        self._number = page.mark()  # the highest that was given to a mark of the word
        self._queued = self._number  # the highest that the driver took: until it shows up, the page is in use
        self._home = 0
        self._free: list[int] = []
        self._waiting: deque[tuple[int, int]] = deque()  # hold, event; both rise
        self._held = self._passed = 0
        self._enter()
        self.why = self._why_not_word(device, wanted, probe_s)
        self.mode: MarkMode = "host" if self.why else "word"
        self.why = self.why or "a write of the device's stream was seen"

    def signal(self) -> Mark:
        """A mark on the engine's stream of the moment. CudaError if the driver refuses."""
        self._enter()
        stream = self._current_stream()
        if self.mode == "word":
            if stream != self._home and self._page.mark() == self._queued:
                self._home = stream
            if stream == self._home:
                return Mark(self._write(stream))
        event = self._free.pop() if self._free else self._driver.event_create(EVENT_DISABLE_TIMING)
        try:
            self._driver.event_record(event, stream)
        except CudaError:
            self._free.append(event)
            raise
        self._held += 1
        self._waiting.append((self._held, event))
        return Mark(0, self._held)

    def passed(self) -> int:
        """The highest hold whose event, and every one before it, has happened. CudaError if the device failed."""
        if self._waiting:
            self._enter()
        while self._waiting and self._driver.event_happened(self._waiting[0][1]):
            self._passed, event = self._waiting.popleft()
            self._free.append(event)
        return self._passed

    def close(self) -> None:
        """Give back what the device is through with; the rest ends with the process."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(CudaError):  # a driver that is shutting down has forgotten all of it
            self.passed()
            self._enter()
            while self._free:
                self._driver.event_destroy(self._free.pop())
            if self._is_registered and self._page.mark() == self._queued:
                self._driver.host_unregister(self._address)
                self._is_registered = False
        if self._is_registered or self._waiting:
            _left_behind.append(self)

    def _enter(self) -> None:
        """Calls on memory and streams need the context in the calling thread; torch has it in its own only."""
        if self._thread != (here := threading.get_ident()):
            if self._driver.current_context() != self._context:
                self._driver.use(self._context)
            self._thread = here

    def _write(self, stream: int) -> int:
        """Queue the next number; it. One that the driver refused is given to no other mark."""
        self._number += 1
        self._driver.write_value(stream, self._word, self._number)
        self._queued = self._number
        return self._number

    def _why_not_word(self, device: int, wanted: MarkMode | None, probe_s: float) -> str:
        """Register the page and see a write of the engine's stream arrive; what is against it, "" if nothing."""
        if wanted == "host":
            return "asked for"
        try:
            if not self._driver.device_attribute(DeviceAttribute.CAN_USE_64_BIT_STREAM_MEM_OPS, device):
                return "this device's streams cannot write 64-bit words"
            self._driver.host_register(self._address, limits.PAGE_BYTES)
            self._is_registered = True
            self._word = self._driver.host_device_pointer(self._address) + MARK * 8
            self._home = self._current_stream()
            self._write(self._home)
        except CudaError as error:
            return str(error)
        until = time.monotonic() + probe_s
        while self._page.mark() != self._queued:
            if time.monotonic() > until:
                return f"a write of the device's stream was not seen within {probe_s:g} s"
            time.sleep(PROBE_LOOK_S)
        return ""
