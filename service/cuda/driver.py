"""The CUDA driver by what is done with it: every call checked. Loads nothing until `Driver.load` is called.

    driver = Driver.load()                         libcuda.so.1, or ConfigError(device.no_driver) with the fix
    device = driver.device(0)
    context = driver.retain_context(device)        the primary context: the one torch uses too
    driver.use(context)                            in each thread before its first call on memory

ctypes lets the interpreter go on during each call, so a thread that waits in `event_wait` holds up nobody.

Addresses, streams, events, contexts and allocation handles are plain ints; sizes are bytes. Methods raise
CudaError on any result but success, unless they say otherwise.
"""

import ctypes
import uuid
from pathlib import Path
from typing import Final, NamedTuple

from kvferry.cuda.library import LIBRARY, NOT_READY, STICKY, SUCCESS, CudaError, Library
from kvferry.cuda.structs import (
    ACCESS_READWRITE,
    ALLOCATION_TYPE_PINNED,
    CTX_SCHED_BLOCKING_SYNC,
    HANDLE_TYPE_POSIX_FD,
    HOSTREGISTER_DEVICEMAP,
    HOSTREGISTER_PORTABLE,
    IPC_LAZY_ENABLE_PEER_ACCESS,
    LOCATION_TYPE_DEVICE,
    STREAM_NON_BLOCKING,
    AccessOrder,
    DeviceAttribute,
    IpcMemHandle,
    MemAccessDesc,
    MemAllocationProp,
    MemcpyAttributes,
    MemLocation,
    PointerAttribute,
    Uuid,
)

__all__ = ["LIBRARY", "STICKY", "AddressRange", "CudaError", "Driver", "pid_namespace", "same_gpu"]

BATCH: Final = ("cuMemcpyBatchAsync", 12080)


class AddressRange(NamedTuple):
    """One allocation."""

    base: int
    nbytes: int


class Driver(Library):
    """The calls that kvferry makes, by what they do."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        self._batch = self.by_version(*BATCH)

    # ---- devices and contexts --------------------------------------------------------------------

    def version(self) -> int:
        """The CUDA version that the driver speaks: 12080 is 12.8."""
        return self._int("cuDriverGetVersion")

    def device_count(self) -> int:
        """GPUs that are visible to this process."""
        return self._int("cuDeviceGetCount")

    def device(self, ordinal: int) -> int:
        """The device of an ordinal, which means something in this process only."""
        return self._int("cuDeviceGet", ordinal)

    def device_name(self, device: int) -> str:
        """As nvidia-smi shows it."""
        text = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", text, len(text), device)
        return text.value.decode(errors="replace")

    def device_uuid(self, device: int) -> str:
        """`GPU-` and the UUID, as nvidia-smi shows it; of a MIG slice its own UUID, with the same prefix."""
        raw = Uuid()
        self.call("cuDeviceGetUuid_v2", ctypes.byref(raw), device)
        return f"GPU-{uuid.UUID(bytes=bytes(raw.bytes))}"

    def device_attribute(self, attribute: DeviceAttribute | int, device: int) -> int:
        """One number about a device."""
        return self._int("cuDeviceGetAttribute", int(attribute), device)

    def pci_bus_id(self, device: int) -> str:
        """`0000:3b:00.0`, in lower case as /sys has it."""
        text = ctypes.create_string_buffer(32)
        self.call("cuDeviceGetPCIBusId", text, len(text), device)
        return text.value.decode(errors="replace").lower()

    def retain_context(self, device: int, *, flags: int | None = CTX_SCHED_BLOCKING_SYNC) -> int:
        """The primary context, kept until `release_context`. Current in no thread yet.

        With `flags` waits of this context block instead of spinning; None leaves them as they are, which is
        right beside torch, whose context it may be already.
        """
        if flags is not None:
            self.call("cuDevicePrimaryCtxSetFlags_v2", device, flags)
        return self._pointer("cuDevicePrimaryCtxRetain", device)

    def release_context(self, device: int) -> None:
        """Give the primary context back."""
        self.call("cuDevicePrimaryCtxRelease_v2", device)

    def use(self, context: int) -> None:
        """Make a context current in this thread; 0: none."""
        self.call("cuCtxSetCurrent", context)

    def current_context(self) -> int:
        """The context that is current in this thread; 0 if none."""
        return self._pointer("cuCtxGetCurrent")

    def current_device(self) -> int:
        """The device of the current context."""
        return self._int("cuCtxGetDevice")

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the current context's device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    # ---- device memory ---------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        """Plain device memory, of the kind that `ipc_export` takes."""
        return self._u64("cuMemAlloc_v2", nbytes)

    def free(self, address: int) -> None:
        """Free what `allocate` gave."""
        self.call("cuMemFree_v2", address)

    def address_range(self, address: int) -> AddressRange:
        """The whole allocation that an address lies in."""
        base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
        self.call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(nbytes), address)
        return AddressRange(base.value, nbytes.value)

    def pointer_attribute(self, attribute: PointerAttribute | int, address: int) -> int:
        """One number about an address: of those in PointerAttribute, which are ints and bools of the driver."""
        # The driver writes 1, 4 or 8 bytes, by the attribute.
        value = ctypes.c_uint64()
        self.call("cuPointerGetAttribute", ctypes.byref(value), int(attribute), address)
        return value.value

    def ipc_export(self, address: int) -> bytes:
        """The 64 bytes that open this allocation in another process, whole, at its base."""
        handle = IpcMemHandle()
        self.call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle.reserved)

    def ipc_open(self, blob: bytes) -> int:
        """The base of an allocation of another process. Opened twice it is one mapping, counted by the driver."""
        handle = IpcMemHandle.from_buffer_copy(blob)
        return self._u64("cuIpcOpenMemHandle_v2", handle, IPC_LAZY_ENABLE_PEER_ACCESS)

    def ipc_close(self, base: int) -> None:
        """Undo one `ipc_open`."""
        self.call("cuIpcCloseMemHandle", base)

    def create(self, nbytes: int, device: int, *, exportable: bool = True) -> int:
        """An allocation handle of `nbytes`, a multiple of `granularity`; it has no address until it is mapped."""
        prop = _allocation(device, exportable)
        return self._u64("cuMemCreate", nbytes, ctypes.byref(prop), 0)

    def granularity(self, device: int, *, exportable: bool = True) -> int:
        """What sizes and addresses of mapped allocations are multiples of."""
        prop, found = _allocation(device, exportable), ctypes.c_size_t()
        self.call("cuMemGetAllocationGranularity", ctypes.byref(found), ctypes.byref(prop), 0)
        return found.value

    def retain_handle(self, address: int) -> int:
        """The allocation handle behind a mapped address; `release` it."""
        return self._u64("cuMemRetainAllocationHandle", address)

    def release(self, handle: int) -> None:
        """Let go of an allocation handle; mappings keep the memory."""
        self.call("cuMemRelease", handle)

    def export_fd(self, handle: int) -> int:
        """A descriptor of an allocation, the caller's to close."""
        fd = ctypes.c_int(-1)
        self.call("cuMemExportToShareableHandle", ctypes.byref(fd), handle, HANDLE_TYPE_POSIX_FD, 0)
        return fd.value

    def import_fd(self, fd: int) -> int:
        """The allocation handle of a descriptor, which stays the caller's."""
        return self._u64("cuMemImportFromShareableHandle", ctypes.c_void_p(fd), HANDLE_TYPE_POSIX_FD)

    def reserve(self, nbytes: int) -> int:
        """A range of addresses with nothing behind it."""
        return self._u64("cuMemAddressReserve", nbytes, 0, 0, 0)

    def unreserve(self, address: int, nbytes: int) -> None:
        """Give the range back."""
        self.call("cuMemAddressFree", address, nbytes)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Put an allocation behind a reserved range; nobody may touch it before `allow`."""
        self.call("cuMemMap", address, nbytes, 0, handle, 0)

    def unmap(self, address: int, nbytes: int) -> None:
        """Take it away."""
        self.call("cuMemUnmap", address, nbytes)

    def allow(self, address: int, nbytes: int, device: int) -> None:
        """Let a device read and write a mapped range."""
        access = MemAccessDesc(MemLocation(LOCATION_TYPE_DEVICE, device), ACCESS_READWRITE)
        self.call("cuMemSetAccess", address, nbytes, ctypes.byref(access), 1)

    # ---- host memory -----------------------------------------------------------------------------

    def host_register(self, address: int, nbytes: int) -> None:
        """Pin memory of this process and show it to all contexts; undone by `host_unregister` of the same address."""
        self.call("cuMemHostRegister_v2", address, nbytes, HOSTREGISTER_PORTABLE | HOSTREGISTER_DEVICEMAP)

    def host_unregister(self, address: int) -> None:
        """Undo `host_register`."""
        self.call("cuMemHostUnregister", address)

    def host_device_pointer(self, address: int) -> int:
        """Where the current context's device sees registered memory."""
        return self._u64("cuMemHostGetDevicePointer_v2", address, 0)

    def host_allocate(self, nbytes: int) -> int:
        """Pinned memory of the driver's own."""
        return self._pointer("cuMemHostAlloc", nbytes, HOSTREGISTER_PORTABLE | HOSTREGISTER_DEVICEMAP)

    def host_free(self, address: int) -> None:
        """Free what `host_allocate` gave."""
        self.call("cuMemFreeHost", address)

    # ---- streams and events ----------------------------------------------------------------------

    def stream_create(self) -> int:
        """A stream that never waits for the null stream."""
        return self._pointer("cuStreamCreate", STREAM_NON_BLOCKING)

    def stream_destroy(self, stream: int) -> None:
        """What is queued still runs."""
        self.call("cuStreamDestroy_v2", stream)

    def stream_synchronize(self, stream: int) -> None:
        """Wait until all that is queued is over."""
        self.call("cuStreamSynchronize", stream)

    def write_value(self, stream: int, address: int, value: int) -> None:
        """When the stream gets there, and all before it is visible: write 8 bytes at a device address."""
        self.call("cuStreamWriteValue64_v2", stream, address, value, 0)

    def event_create(self, flags: int) -> int:
        """An event; flags are EVENT_* of structs."""
        return self._pointer("cuEventCreate", flags)

    def event_destroy(self, event: int) -> None:
        """Nobody may wait for it any more."""
        self.call("cuEventDestroy_v2", event)

    def event_record(self, event: int, stream: int) -> None:
        """The event happens when the stream gets here."""
        self.call("cuEventRecord", event, stream)

    def event_happened(self, event: int) -> bool:
        """Whether it has. CudaError if what it stands for failed."""
        result = self.ask("cuEventQuery", event)
        if result not in (SUCCESS, NOT_READY):
            raise self.error("cuEventQuery", result)
        return result == SUCCESS

    def event_wait(self, event: int) -> int:
        """Block this thread until it has happened; the CUresult."""
        return self.ask("cuEventSynchronize", event)

    # ---- copies ----------------------------------------------------------------------------------

    @property
    def has_batch(self) -> bool:
        """Whether `copy_batch` is there (drivers of CUDA 12.8 and later)."""
        return self._batch is not None

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Queue one copy; direction and place are read from the addresses."""
        self.call("cuMemcpyAsync", dst, src, nbytes, stream)

    def copy_batch(
        self, dst: int, src: int, size: int, count: int, order: AccessOrder, flags: int, stream: int
    ) -> None:
        """Queue `count` copies that have no order among them; `stream` may not be the null stream.

        dst, src, size are the addresses of arrays of `count` u64, read during the call.
        """
        attributes = MemcpyAttributes(srcAccessOrder=order, flags=flags)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(count)
        result = self._batch(
            dst, src, size, count, ctypes.byref(attributes), ctypes.byref(first), 1, ctypes.byref(failed), stream
        )
        if result != SUCCESS:
            name, words = self.explain(result)
            where = f"copy {failed.value} of {count}" if failed.value < count else f"{count} copies"
            raise CudaError(BATCH[0], result, name, f"{words} ({where})")


def same_gpu(one: str, other: str) -> bool:
    """Whether two UUIDs name one GPU, whatever their prefix (`GPU-`, `MIG-`, none) and letters' case."""
    return _bare(one) == _bare(other)


def _bare(text: str) -> str:
    return text.lower().removeprefix("gpu-").removeprefix("mig-")


def _allocation(device: int, exportable: bool) -> MemAllocationProp:
    return MemAllocationProp(
        type=ALLOCATION_TYPE_PINNED,
        requestedHandleTypes=HANDLE_TYPE_POSIX_FD if exportable else 0,
        location=MemLocation(LOCATION_TYPE_DEVICE, device),
    )


def pid_namespace() -> int:
    """The inode of this process's pid namespace: equal pids mean one process only within one namespace."""
    return Path("/proc/self/ns/pid").stat().st_ino
