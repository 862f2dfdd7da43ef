"""An engine's GPU memory in this process: opened from its handles, checked against the allocation behind them.

    cuda_ipc      64 bytes ─▶ the whole allocation at its base      one opening per 64 bytes, counted
    cuda_vmm_fd   descriptor ─▶ import ─▶ addresses ─▶ map ─▶ allow     undone in reverse if a step fails

    checked first   the GPU by its UUID, never by its number (each container numbers anew)
                    the pid: the driver takes a handle of an equal pid for its own and fails confusingly
    checked then    [base_offset, + nbytes) lies within the real allocation

Each refusal is a HandleError whose fix names the setting that causes it. Closing is for an orderly end only:
after an engine's death this process exits, and the kernel lets go of everything at once.
"""

import logging
import os
from dataclasses import dataclass
from typing import Final

from kvferry.cuda.driver import CudaError, Driver, pid_namespace, same_gpu
from kvferry.cuda.library import INVALID_CONTEXT, INVALID_HANDLE, INVALID_VALUE
from kvferry.gpu_worker.devices.base import DeviceError, DeviceLost, HandleError, Mapping
from kvferry.gpu_worker.devices.ranges import Stretch, joined
from kvferry.proto.layout import Handle

log = logging.getLogger("kvferry.worker")

BLOB_BYTES: Final = 64
KINDS: Final = ("cuda_ipc", "cuda_vmm_fd")


@dataclass(slots=True)
class _Opened:
    """One allocation of the engine that is mapped here."""

    base: int
    nbytes: int
    blob: bytes = b""  # of cuda_ipc; "": addresses of our own with an allocation behind them
    users: int = 0


class Imports:
    """The engine's allocations, and the handles that lie in them."""

    def __init__(self, driver: Driver, device: int, uuid: str) -> None:
        self._driver = driver
        self._device = device
        self._uuid = uuid
        self._by_blob: dict[bytes, _Opened] = {}
        self._mappings: list[tuple[Mapping, _Opened]] = []

    def attach(self, handle: Handle, fd: int | None) -> Mapping:
        """Map a handle's bytes; `fd` stays the caller's. HandleError | DeviceLost, and nothing of it stays."""
        self._check_origin(handle)
        try:
            opened = self._open_ipc(handle) if handle.kind == "cuda_ipc" else self._open_fd(handle, fd)
        except CudaError as error:
            raise _refusal(error, handle) from None
        opened.users += 1
        mapping = Mapping(opened.base + handle.base_offset, handle.nbytes)
        self._mappings.append((mapping, opened))
        return mapping

    def detach(self, mapping: Mapping) -> None:
        """Forget one mapping; its allocation is closed with the last one in it. Idempotent."""
        entry = next((entry for entry in self._mappings if entry[0] == mapping), None)
        if entry is None:
            return
        self._mappings.remove(entry)
        opened = entry[1]
        opened.users -= 1
        if not opened.users:
            self._close(opened)

    def close(self) -> None:
        """Detach all, the last first."""
        for mapping, _ in list(reversed(self._mappings)):
            self.detach(mapping)

    def stretches(self) -> list[Stretch]:
        """Where copies may go: what was shown, and no other byte of the allocations."""
        shown: dict[int, list[Stretch]] = {}
        for mapping, opened in self._mappings:
            shown.setdefault(id(opened), []).append(Stretch(mapping.base, mapping.nbytes))
        return [stretch for stretches in shown.values() for stretch in joined(stretches)]

    # ---- before the driver is asked ----------------------------------------------------------------

    def _check_origin(self, handle: Handle) -> None:
        if handle.kind not in KINDS:
            raise HandleError(
                "handle.kind",
                f"the engine's memory is of kind {handle.kind!r}; a worker with --device cuda maps"
                f" {' and '.join(KINDS)}",
                "start kvferry with the device that the engine uses",
            )
        if not same_gpu(handle.device, self._uuid):
            raise HandleError(
                "handle.other_gpu",
                f"the engine's memory is on {handle.device or 'a GPU that it does not name'}; this worker has opened"
                f" {self._uuid}",
                "name the GPU of each rank, in the order of the ranks: kvferry up --devices UUID,UUID,...",
            )
        if handle.kind == "cuda_ipc" and handle.pid == os.getpid():
            where = "another" if handle.pid_ns != pid_namespace() else "this worker's own"
            raise HandleError(
                "handle.same_pid",
                f"the engine's process has pid {handle.pid} in {where} pid namespace, and this worker has the same"
                f" number: the driver would take the memory for the worker's own",
                "let both containers share one pid namespace (docker: --pid=container:NAME; compose: pid:;"
                " Kubernetes: shareProcessNamespace)",
            )

    # ---- cuda_ipc ----------------------------------------------------------------------------------

    def _open_ipc(self, handle: Handle) -> _Opened:
        if len(handle.blob) != BLOB_BYTES:
            raise HandleError(
                "handle.stale", f"a handle of kind 'cuda_ipc' has {len(handle.blob)} bytes, not {BLOB_BYTES}"
            )
        opened = self._by_blob.get(handle.blob)
        if opened is None:
            base = self._driver.ipc_open(handle.blob)
            opened = _Opened(base, self._size_of(base), handle.blob)
        end = handle.base_offset + handle.nbytes
        if opened.nbytes and end > opened.nbytes:
            if not opened.users:
                self._close(opened)
            raise HandleError(
                "handle.stale", f"the handle ends at byte {end}, its allocation at byte {opened.nbytes}",
                "export the memory again",
            )  # fmt: skip
        self._by_blob[handle.blob] = opened
        return opened

    def _size_of(self, base: int) -> int:
        """Bytes of an allocation that was opened here; 0 if this driver does not say it of foreign ones."""
        try:
            found = self._driver.address_range(base)
        except CudaError as error:
            if error.is_sticky:
                raise
            log.warning("the size of the engine's allocation is not known here, its own word is taken: %s", error.text)
            return 0
        return found.base + found.nbytes - base

    # ---- cuda_vmm_fd -------------------------------------------------------------------------------

    def _open_fd(self, handle: Handle, fd: int | None) -> _Opened:
        if fd is None:
            raise HandleError("handle.stale", "a handle of kind 'cuda_vmm_fd' came without its descriptor")
        driver = self._driver
        grain = driver.granularity(self._device)
        nbytes = -(-(handle.base_offset + handle.nbytes) // grain) * grain
        allocation = driver.import_fd(fd)
        try:
            address = driver.reserve(nbytes)
            try:
                driver.map(address, nbytes, allocation)
                try:
                    driver.allow(address, nbytes, self._device)
                except CudaError:
                    driver.unmap(address, nbytes)
                    raise
            except CudaError:
                driver.unreserve(address, nbytes)
                raise
        finally:
            driver.release(allocation)  # the mapping keeps the memory
        return _Opened(address, nbytes)

    def _close(self, opened: _Opened) -> None:
        try:
            if opened.blob:
                self._by_blob.pop(opened.blob, None)
                self._driver.ipc_close(opened.base)
            else:
                self._driver.unmap(opened.base, opened.nbytes)
                self._driver.unreserve(opened.base, opened.nbytes)
        except CudaError as error:
            log.warning("%d bytes of the engine's memory stay mapped until this process ends: %s", opened.nbytes, error)


def _refusal(error: CudaError, handle: Handle) -> DeviceError:
    """What a driver's no means for the rank that showed the memory."""
    if error.is_sticky:
        return DeviceLost("device.lost", f"while the engine's memory was mapped: {error.text}")
    if error.result == INVALID_CONTEXT and handle.kind == "cuda_ipc":
        return HandleError(
            "handle.refused",
            f"the driver does not open the memory of process {handle.pid}: {error.text}",
            "let both containers share one pid namespace (docker: --pid=container:NAME; compose: pid:;"
            " Kubernetes: shareProcessNamespace)",
        )
    if error.result in (INVALID_VALUE, INVALID_HANDLE):
        return HandleError(
            "handle.stale",
            f"the memory of process {handle.pid} cannot be opened: {error.text}",
            "nothing if that engine has just ended; else its memory is smaller than it says, or was freed",
        )
    return HandleError(
        "handle.refused",
        f"the driver does not map memory of kind {handle.kind!r} here: {error.text}",
        "give both containers the same GPU as a whole device (--gpus or NVIDIA_VISIBLE_DEVICES; claims of"
        " single devices through DRA or CDI, MIG and gVisor are known to refuse this)",
    )
