"""An engine on a GPU that is a stub of the driver: memory, a stream of work, tensors without torch."""

import ctypes
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvferry.client.memory import KVMemory
from kvferry.cuda.driver import Driver


class GpuTensor:
    """A tensor as far as an exporter looks at it. Strides in elements."""

    def __init__(
        self, address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int = 1, dtype: str = "uint8"
    ) -> None:
        self.address, self.shape, self.strides, self.itemsize, self.dtype = address, shape, strides, itemsize, dtype

    def data_ptr(self) -> int:
        return self.address

    def stride(self) -> Sequence[int]:
        return self.strides

    def element_size(self) -> int:
        return self.itemsize


class FakeEngine:
    """The engine's side of a GPU; everything it took is given back by `close`."""

    def __init__(self, library: str, device: int = 0) -> None:
        self.driver = Driver.load(library)
        self.device = self.driver.device(device)
        self.driver.use(self.driver.retain_context(self.device, flags=None))
        self.streams = [self.driver.stream_create(), self.driver.stream_create()]
        self.now = 0  # which stream is the current one
        self._plain: list[int] = []
        self._mapped: list[tuple[int, int]] = []
        self._scratch = 0
        self.memories: list[KVMemory] = []

    def stream(self) -> int:
        """The stream that it launches on."""
        return self.streams[self.now]

    def allocate(self, nbytes: int) -> int:
        """As cudaMalloc does."""
        self._plain.append(self.driver.allocate(nbytes))
        return self._plain[-1]

    def map(self, nbytes: int, *, exportable: bool = True) -> int:
        """As cumem does; not exportable: as sleep mode or expandable segments may."""
        grain = self.driver.granularity(self.device)
        nbytes = -(-nbytes // grain) * grain
        start = self.driver.reserve(nbytes)
        handle = self.driver.create(nbytes, self.device, exportable=exportable)
        self.driver.map(start, nbytes, handle)
        self.driver.allow(start, nbytes, self.device)
        self.driver.release(handle)
        self._mapped.append((start, nbytes))
        return start

    def bytes_at(self, address: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """GPU memory as the GPU sees it: the stub's lies in this process."""
        return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=np.uint8)

    def launch(self) -> None:
        """Work on the current stream: a copy of 8 bytes, which the stub can be told to make slow."""
        if not self._scratch:
            self._scratch, self._pinned = self.allocate(8), self.driver.host_allocate(8)
        self.driver.copy(self._scratch, self._pinned, 8, self.stream())

    def finish(self) -> None:
        """Wait until all work is done."""
        for stream in self.streams:
            self.driver.stream_synchronize(stream)

    def keep(self, memory: KVMemory) -> KVMemory:
        """Close its descriptors in the end."""
        self.memories.append(memory)
        return memory

    def close(self) -> None:
        for memory in self.memories:
            for fd in memory.fds:
                os.close(fd)
        for stream in self.streams:
            self.driver.stream_destroy(stream)
        if self._scratch:
            self.driver.host_free(self._pinned)
        for address in self._plain:
            self.driver.free(address)
        for start, nbytes in self._mapped:
            self.driver.unmap(start, nbytes)
            self.driver.unreserve(start, nbytes)
        self.driver.use(0)
        self.driver.release_context(self.device)
