"""An engine on CPU that behaves like one on a GPU: its work runs on a thread of its own, in order, some time later.

Marks are written by that thread, as a GPU's stream writes them: what is begun with a mark and what is begun without
one differ here just as they do there.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from kvferry.client.marks import Mark
from kvferry.client.memory import KVMemory, View, from_views, shared_array
from kvferry.gpu_check.compute import MemoryKind, Tensor
from kvferry.proto.errors import ConfigError, LostError
from kvferry.proto.layout import Handle
from kvferry.proto.page import PageWriter
from kvferry.proto.tether import MarkMode

FINISH_S: Final = 60.0


class CpuCompute:
    """See the module's text."""

    kind = "cpu"
    can_hold = True

    def __init__(self) -> None:
        self._memory: dict[int, tuple[npt.NDArray[np.uint8], int]] = {}
        self._queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._going = threading.Event()
        self._going.set()
        threading.Thread(target=self._work, name="stream", daemon=True).start()

    def about(self) -> dict[str, Any]:
        return {"engine": "cpu", "name": "host memory"}

    def allocate(self, nbytes: int, kind: MemoryKind) -> int:
        if kind != "plain":
            raise ConfigError("check.memory", f"there is no memory of kind {kind!r} on CPU")
        array, fd = shared_array((nbytes,), np.uint8)
        address = int(array.__array_interface__["data"][0])
        self._memory[address] = (array, fd)
        return address

    def free(self) -> None:
        for _, fd in self._memory.values():
            os.close(fd)
        self._memory.clear()

    def export(self, views: Mapping[str, Tensor], marks: Literal["word", "host"] | None) -> KVMemory:
        first = next(iter(views.values())).address
        base, (array, fd) = next((b, m) for b, m in self._memory.items() if b <= first < b + len(m[0]))
        # Like an allocation on a GPU, of which a handle shows a part.
        handle = Handle(kind="shm_fd", nbytes=base + len(array) - first, base_offset=first - base)
        return from_views(
            [View(0, view.address - first, view.shape, view.strides, 1) for view in views.values()],
            [handle],
            [os.dup(fd)],
            block_tokens=16,
            marking=lambda page, _: StreamMarks(page, self._queue.put),
            keep=(array,),
        )

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        self._queue.put(lambda: _memset(address, byte, nbytes))

    def spin(self, milliseconds: float) -> None:
        self._queue.put(lambda: time.sleep(milliseconds / 1e3))

    def hold(self) -> None:
        self._going.clear()
        self._queue.put(self._wait)

    def release(self) -> None:
        self._going.set()

    def finish(self) -> None:
        done = threading.Event()
        self._queue.put(done.set)
        if not done.wait(FINISH_S):
            raise LostError("check.stream", f"the engine's stream has not ended within {FINISH_S:g} s")

    def put(self, address: int, data: bytes) -> None:
        self.finish()
        ctypes.memmove(address, data, len(data))

    def get(self, address: int, nbytes: int) -> bytes:
        self.finish()
        return ctypes.string_at(address, nbytes)

    def close(self) -> None:
        self.release()
        self.free()

    def _wait(self) -> None:
        self._going.wait()

    def _work(self) -> None:
        while True:
            self._queue.get()()


def _memset(address: int, byte: int, nbytes: int) -> None:
    ctypes.memset(address, byte, nbytes)


class StreamMarks:
    """Marks that a thread writes when it gets there."""

    mode: MarkMode = "word"
    why = "the stream is a thread"

    def __init__(self, page: PageWriter, queue: Callable[[Callable[[], None]], None]) -> None:
        self._page, self._queue = page, queue
        self._number = page.mark()

    def signal(self) -> Mark:
        """A mark behind all that is queued."""
        self._number += 1
        self._queue(self._write)
        return Mark(self._number)

    def _write(self) -> None:
        self._page.signal()

    def passed(self) -> int:
        """Nothing is ever held back."""
        return 0

    def close(self) -> None:
        """Nothing to give back."""
