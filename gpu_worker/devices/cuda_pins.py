"""Host memory shown to the GPU: pinned in chunks, whole or not at all, undone in reverse.

    pin(pool)    chunk 0 ✓  chunk 1 ✓  chunk 2 ✗        one call of at most 1 GiB each
                 chunk 1 ↩  chunk 0 ↩  CapacityError     rolled back: nothing stays pinned
    only wanted  chunk 0 ·  chunk 1 ·  chunk 2 ·         used as it is, and cut in the same places

In chunks because one call holds locks of the driver that every GPU process of the machine waits for (a call of
700 GB held them for twelve minutes), and because drivers refuse calls of 512 GiB. Of one size and not of whole
slots: a spare has pinned the pool before an engine fixes the slots; `ranges.py` cuts copies where chunks meet.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvferry.cuda.driver import CudaError, Driver
from kvferry.gpu_worker.devices.base import CapacityError, DeviceLost, HostRegion, idle
from kvferry.gpu_worker.devices.ranges import Stretch

log = logging.getLogger("kvferry.worker")

CHUNK_BYTES: Final = 1 << 30
SLOW_S: Final = 2.0  # a longer pin tells how far it is, as often


@dataclass(slots=True)
class Pins:
    """What this process has registered."""

    driver: Driver
    same_address: bool  # the GPU takes our addresses of it; else it has others
    chunk_bytes: int = CHUNK_BYTES
    is_required: bool = True  # else memory that the driver refuses to pin is used as it is
    refusal: str = ""  # of memory that is used all the same
    seconds: float = 0.0  # spent in the driver's calls, of all that is pinned now or was
    _chunks: dict[HostRegion, list[Stretch]] = field(default_factory=dict)

    def pin(self, base: int, nbytes: int, between: Callable[[], None] = idle) -> HostRegion:
        """Register [base, + nbytes), with a call of `between` after each chunk. CapacityError; DeviceLost.

        After any error, one of `between` too, nothing of it is registered.
        """
        region = HostRegion(base, nbytes)
        if region not in self._chunks:
            try:
                self._chunks[region] = self._pin(base, nbytes, between)
            except CapacityError as error:
                if self.is_required:
                    raise
                # The driver copies through memory of its own then, in the call: right, slower, and the caller waits.
                self.refusal = error.text
                self._chunks[region] = []
                log.warning("the pool is used unpinned, copies are slower: %s", error)
        return region

    def _pin(self, base: int, nbytes: int, between: Callable[[], None]) -> list[Stretch]:
        chunks: list[Stretch] = []
        began = said = time.monotonic()
        wanted = self._cut(base, nbytes)
        for number, (start, size, _) in enumerate(wanted):
            try:
                self.driver.host_register(start, size)
                chunks.append(Stretch(start, size))
                if not self.same_address:
                    chunks[-1] = Stretch(start, size, self.driver.host_device_pointer(start) - start)
            except CudaError as error:
                self._release(chunks)
                raise _refused(error, nbytes, number, len(wanted), size) from None
            if time.monotonic() - said >= SLOW_S:
                said = time.monotonic()
                log.info("pinning the pool: %d of %d chunks in %.1f s", number + 1, len(wanted), said - began)
            try:
                between()
            except BaseException:
                self._release(chunks)
                raise
        self.seconds += time.monotonic() - began
        return chunks

    def unpin(self, region: HostRegion) -> None:
        """Undo `pin`; idempotent."""
        self._release(self._chunks.pop(region, []))

    def close(self) -> None:
        """Undo all, the last first."""
        for region in reversed(list(self._chunks)):
            self.unpin(region)

    @property
    def nbytes(self) -> int:
        """Pinned now."""
        return sum(chunk.nbytes for chunks in self._chunks.values() for chunk in chunks)

    @property
    def num_chunks(self) -> int:
        """Registrations now."""
        return sum(map(len, self._chunks.values()))

    def stretches(self) -> list[Stretch]:
        """The chunks: a copy may not leave its own.

        Nor where nothing is pinned: a chunk that could not be rolled back still is, and the driver refuses a copy
        over its edge.
        """
        return [
            chunk
            for region, chunks in self._chunks.items()
            for chunk in chunks or self._cut(region.base, region.nbytes)
        ]

    def _cut(self, base: int, nbytes: int) -> list[Stretch]:
        step = self.chunk_bytes
        return [Stretch(base + at, min(step, nbytes - at)) for at in range(0, nbytes, step)]

    def _release(self, chunks: list[Stretch]) -> None:
        for chunk in reversed(chunks):
            try:
                self.driver.host_unregister(chunk.start)
            except CudaError as error:
                # The rest is still worth undoing; the process's end undoes this one.
                log.warning("%d bytes stay pinned until this process ends: %s", chunk.nbytes, error)


def _refused(error: CudaError, nbytes: int, number: int, count: int, size: int) -> CapacityError | DeviceLost:
    if error.is_sticky:
        return DeviceLost("device.lost", f"while the pool was pinned: {error.text}")
    return CapacityError(
        "device.pin",
        f"the driver does not pin the pool of {nbytes} bytes: chunk {number + 1} of {count} ({size} bytes) was"
        f" refused, those before it are released: {error.text}",
        "less --host-memory, or more memory that may be locked: the container's memory limit, `ulimit -l`; where"
        " pinning is forbidden, --pin wanted serves without it, slower",
    )
