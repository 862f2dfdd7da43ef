"""What process E computes with: memory that it lends, and one stream of work on it. See `open_compute`.

    cpu      memfds; the stream is a thread                     compute_cpu.py
    torch    torch's allocator, its current stream, its kernels  compute_torch.py
    driver   the driver alone: copies are its only work          compute_driver.py, without torch

`fill`, `spin`, `hold` and `release` are queued on the stream and run in order; `put`, `get` and `finish` wait for
all of it. Addresses are plain ints, sizes bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from kvferry.client.memory import KVMemory
from kvferry.proto.errors import ConfigError

MemoryKind = Literal["plain", "vmm", "closed"]  # closed: of a kind that no other process can be shown
KINDS: Final = ("cpu", "torch", "driver")


@dataclass(frozen=True, slots=True)
class Tensor:
    """One view as an exporter looks at it. Strides in bytes, which are its elements."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str = "uint8"

    def data_ptr(self) -> int:
        """Of its first byte."""
        return self.address

    def stride(self) -> Sequence[int]:
        """One a dimension."""
        return self.strides

    def element_size(self) -> int:
        """Bytes."""
        return 1


class Compute(Protocol):
    """One engine's device."""

    kind: str
    can_hold: bool  # a stream can be held until told, not only for a time

    def about(self) -> dict[str, Any]:
        """What it is: plain JSON values."""

    def allocate(self, nbytes: int, kind: MemoryKind) -> int:
        """Memory until `free`; its address."""

    def free(self) -> None:
        """All that was allocated."""

    def export(self, views: Mapping[str, Tensor], marks: Literal["word", "host"] | None) -> KVMemory:
        """The memory behind these views, with block dimension first, as a rank client lends it. ConfigError."""

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        """Queue: all of these bytes are `byte`."""

    def spin(self, milliseconds: float) -> None:
        """Queue: the stream is busy for this long."""

    def hold(self) -> None:
        """Queue: the stream stands still until `release`."""

    def release(self) -> None:
        """Let a held stream go on."""

    def finish(self) -> None:
        """Wait for all that is queued."""

    def put(self, address: int, data: bytes) -> None:
        """Write, behind all that is queued, and wait."""

    def get(self, address: int, nbytes: int) -> bytes:
        """Read, behind all that is queued."""

    def close(self) -> None:
        """Free all."""


def open_compute(kind: str, gpu: str) -> Compute:
    """The device of that kind, on that GPU (UUID or number). ConfigError if it cannot be had here."""
    if kind == "cpu":
        from kvferry.gpu_check.compute_cpu import CpuCompute

        return CpuCompute()
    if kind == "driver":
        from kvferry.gpu_check.compute_driver import DriverCompute

        return DriverCompute(gpu)
    if kind == "torch":
        from kvferry.gpu_check.compute_torch import TorchCompute

        return TorchCompute(gpu)
    raise ConfigError("check.engine", f"there is no engine {kind!r}", f"choose one of: {', '.join(KINDS)}")
