"""An engine on a GPU through the driver alone: its memory, its stream, and copies as the only work it knows.

For images without torch, and for tests on a stub of the driver. What it cannot do is run kernels: a busy
stream is one with many copies from host memory, which on a GPU share the copy engine with a worker's loads.
`DriverMemory` is also what the torch engine uses for memory of other kinds than torch's own.
"""

import ctypes
import time
from collections.abc import Mapping
from typing import Any, Final, Literal

from kvferry.client.cuda_memory import export_cuda
from kvferry.client.memory import KVMemory
from kvferry.cuda.driver import Driver
from kvferry.gpu_check.compute import MemoryKind, Tensor
from kvferry.gpu_worker.devices.cuda_gpu import find
from kvferry.proto.errors import ConfigError

BOUNCE_BYTES: Final = 1 << 20
CALIBRATE_COPIES: Final = 64


class DriverMemory:
    """Device memory of each kind."""

    def __init__(self, driver: Driver, device: int) -> None:
        self._driver, self._device = driver, device
        self._plain: list[int] = []
        self._mapped: list[tuple[int, int]] = []

    def allocate(self, nbytes: int, kind: MemoryKind) -> int:
        """Plain: as cudaMalloc. vmm: as vLLM's cumem, with a descriptor; closed: the same without one."""
        if kind == "plain":
            self._plain.append(self._driver.allocate(nbytes))
            return self._plain[-1]
        driver, exportable = self._driver, kind == "vmm"
        grain = driver.granularity(self._device, exportable=exportable)
        nbytes = -(-nbytes // grain) * grain
        address = driver.reserve(nbytes)
        handle = driver.create(nbytes, self._device, exportable=exportable)
        driver.map(address, nbytes, handle)
        driver.allow(address, nbytes, self._device)
        driver.release(handle)
        self._mapped.append((address, nbytes))
        return address

    def free(self) -> None:
        """All of it."""
        while self._plain:
            self._driver.free(self._plain.pop())
        while self._mapped:
            address, nbytes = self._mapped.pop()
            self._driver.unmap(address, nbytes)
            self._driver.unreserve(address, nbytes)


class DriverCompute:
    """See the module's text."""

    kind = "driver"
    can_hold = False

    def __init__(self, gpu: str) -> None:
        driver = self._driver = Driver.load()
        self._gpu = find(driver, gpu)
        driver.use(driver.retain_context(self._gpu.device))
        self._memory = DriverMemory(driver, self._gpu.device)
        self._stream = driver.stream_create()
        self._bounce = driver.host_allocate(BOUNCE_BYTES)
        self._of_one_byte: dict[int, int] = {}  # byte -> pinned memory full of it
        self._busy = driver.allocate(BOUNCE_BYTES)
        began = time.monotonic()
        self._work(CALIBRATE_COPIES)
        self.finish()
        self._copies_per_ms = CALIBRATE_COPIES / max((time.monotonic() - began) * 1e3, 1e-3)

    def about(self) -> dict[str, Any]:
        return {"engine": "driver", "name": self._gpu.name, "uuid": self._gpu.uuid}

    def allocate(self, nbytes: int, kind: MemoryKind) -> int:
        return self._memory.allocate(nbytes, kind)

    def free(self) -> None:
        self._memory.free()

    def export(self, views: Mapping[str, Tensor], marks: Literal["word", "host"] | None) -> KVMemory:
        return export_cuda(
            views, block_tokens=16, driver=self._driver, current_stream=lambda: self._stream, marks=marks
        )

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        if byte not in self._of_one_byte:
            self._of_one_byte[byte] = self._driver.host_allocate(BOUNCE_BYTES)
            ctypes.memset(self._of_one_byte[byte], byte, BOUNCE_BYTES)
        for at in range(0, nbytes, BOUNCE_BYTES):
            self._driver.copy(address + at, self._of_one_byte[byte], min(BOUNCE_BYTES, nbytes - at), self._stream)

    def spin(self, milliseconds: float) -> None:
        self._work(max(int(milliseconds * self._copies_per_ms), 1))

    def hold(self) -> None:
        raise ConfigError("check.stream", "a GPU's stream cannot be held until told")

    def release(self) -> None:
        """Nothing is ever held."""

    def finish(self) -> None:
        self._driver.stream_synchronize(self._stream)

    def put(self, address: int, data: bytes) -> None:
        self.finish()
        for at in range(0, len(data), BOUNCE_BYTES):
            part = data[at : at + BOUNCE_BYTES]
            ctypes.memmove(self._bounce, part, len(part))
            self._driver.copy(address + at, self._bounce, len(part), self._stream)
            self.finish()

    def get(self, address: int, nbytes: int) -> bytes:
        found = bytearray()
        while len(found) < nbytes:
            size = min(BOUNCE_BYTES, nbytes - len(found))
            self._driver.copy(self._bounce, address + len(found), size, self._stream)
            self.finish()
            found += ctypes.string_at(self._bounce, size)
        return bytes(found)

    def close(self) -> None:
        self.finish()
        self.free()

    def _work(self, num_copies: int) -> None:
        for _ in range(num_copies):
            self._driver.copy(self._busy, self._bounce, BOUNCE_BYTES, self._stream)
