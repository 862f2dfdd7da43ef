"""Numbers and structures of `cuda.h` (12.8 and later), no more than are used. Pure; sizes are checked by a test.

A structure that drifts by a byte is read by the driver as other settings, in silence: `tests/cuda` compares sizes
and offsets with a C compiler's view, and with NVIDIA's own header where one is installed.
"""

import ctypes
from enum import IntEnum
from typing import Final


class DeviceAttribute(IntEnum):
    """CU_DEVICE_ATTRIBUTE_*."""

    COMPUTE_MODE = 20
    ASYNC_ENGINE_COUNT = 40
    CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM = 91
    HOST_REGISTER_SUPPORTED = 99
    VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102
    HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103
    CAN_USE_64_BIT_STREAM_MEM_OPS = 122
    IPC_EVENT_SUPPORTED = 125
    HOST_NUMA_ID = 134


class PointerAttribute(IntEnum):
    """CU_POINTER_ATTRIBUTE_*."""

    MEMORY_TYPE = 2
    DEVICE_ORDINAL = 9
    IS_LEGACY_CUDA_IPC_CAPABLE = 10
    ALLOWED_HANDLE_TYPES = 14


HANDLE_TYPE_POSIX_FD: Final = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR; a bit of ALLOWED_HANDLE_TYPES
ALLOCATION_TYPE_PINNED: Final = 1
LOCATION_TYPE_DEVICE: Final = 1
ACCESS_READWRITE: Final = 3
IPC_LAZY_ENABLE_PEER_ACCESS: Final = 1

HOSTREGISTER_PORTABLE: Final = 1
HOSTREGISTER_DEVICEMAP: Final = 2
CTX_SCHED_BLOCKING_SYNC: Final = 4
STREAM_NON_BLOCKING: Final = 1
EVENT_BLOCKING_SYNC: Final = 1
EVENT_DISABLE_TIMING: Final = 2
COMPUTE_MODES: Final = {0: "default", 2: "prohibited", 3: "exclusive process"}


class AccessOrder(IntEnum):
    """When a copy may read its source."""

    STREAM = 1  # after what the stream did before: stores
    ANY = 3  # at any time from the call on: loads, whose source nobody writes


COPY_PREFER_OVERLAP: Final = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE


class Uuid(ctypes.Structure):
    """CUuuid."""

    _fields_ = [("bytes", ctypes.c_uint8 * 16)]


class IpcMemHandle(ctypes.Structure):
    """CUipcMemHandle: 64 bytes, passed to the driver by value."""

    _fields_ = [("reserved", ctypes.c_uint8 * 64)]


class MemLocation(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class AllocFlags(ctypes.Structure):
    """The unnamed tail of CUmemAllocationProp."""

    _fields_ = [
        ("compressionType", ctypes.c_uint8),
        ("gpuDirectRDMACapable", ctypes.c_uint8),
        ("usage", ctypes.c_uint16),
        ("reserved", ctypes.c_uint8 * 4),
    ]


class MemAllocationProp(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("requestedHandleTypes", ctypes.c_int),
        ("location", MemLocation),
        ("win32HandleMetaData", ctypes.c_void_p),
        ("allocFlags", AllocFlags),
    ]


class MemAccessDesc(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", MemLocation), ("flags", ctypes.c_int)]


class MemcpyAttributes(ctypes.Structure):
    """CUmemcpyAttributes: 24 bytes. One of it serves a whole batch."""

    _fields_ = [
        ("srcAccessOrder", ctypes.c_int),
        ("srcLocHint", MemLocation),
        ("dstLocHint", MemLocation),
        ("flags", ctypes.c_uint),
    ]


# The structures by the name that cuda.h has for them.
STRUCTURES: Final[dict[str, type[ctypes.Structure]]] = {
    "CUuuid": Uuid,
    "CUipcMemHandle": IpcMemHandle,
    "CUmemLocation": MemLocation,
    "CUmemAllocationProp": MemAllocationProp,
    "CUmemAccessDesc": MemAccessDesc,
    "CUmemcpyAttributes": MemcpyAttributes,
}
