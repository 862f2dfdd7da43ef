"""The driver's entry points that kvferry calls, each by the name of one fixed version of its signature.

`cuda.h` renames plain names to newer versions as it pleases (`cuMemcpyBatchAsync` has nine arguments in 12.8 and
eight in 13.0 under the same name). Here each name is the one that the library exports for exactly this
signature, and the one that is only to be had by version is asked for by version.

What is not here is never called, and some things are left out on purpose: no wait of a stream on anything (a
queued wait on a dead engine's event can neither end nor be taken back), no host function or stream
callback (Python on a driver's thread deadlocks the interpreter's lock against the driver's).
"""

import ctypes
from typing import Any, Final

from kvferry.cuda.structs import IpcMemHandle, MemAccessDesc, MemAllocationProp, MemcpyAttributes, Uuid

_P = ctypes.POINTER
_int, _uint = ctypes.c_int, ctypes.c_uint
_u64 = ctypes.c_uint64  # CUdeviceptr, CUmemGenericAllocationHandle, cuuint64_t, unsigned long long
_size = ctypes.c_size_t
_any = ctypes.c_void_p  # CUcontext, CUstream, CUevent, and plain addresses

# name -> argument types; each returns a CUresult.
TABLE: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (_uint,),
    "cuDriverGetVersion": (_P(_int),),
    "cuGetProcAddress_v2": (ctypes.c_char_p, _P(_any), _int, _u64, _P(_int)),
    "cuGetErrorName": (_int, _P(ctypes.c_char_p)),
    "cuGetErrorString": (_int, _P(ctypes.c_char_p)),
    # devices and contexts
    "cuDeviceGetCount": (_P(_int),),
    "cuDeviceGet": (_P(_int), _int),
    "cuDeviceGetName": (ctypes.c_char_p, _int, _int),
    "cuDeviceGetUuid_v2": (_P(Uuid), _int),
    "cuDeviceGetAttribute": (_P(_int), _int, _int),
    "cuDeviceGetPCIBusId": (ctypes.c_char_p, _int, _int),
    "cuDevicePrimaryCtxSetFlags_v2": (_int, _uint),
    "cuDevicePrimaryCtxRetain": (_P(_any), _int),
    "cuDevicePrimaryCtxRelease_v2": (_int,),
    "cuCtxSetCurrent": (_any,),
    "cuCtxGetCurrent": (_P(_any),),
    "cuCtxGetDevice": (_P(_int),),
    "cuMemGetInfo_v2": (_P(_size), _P(_size)),
    # device memory: whose, where, exported, imported
    "cuMemAlloc_v2": (_P(_u64), _size),
    "cuMemFree_v2": (_u64,),
    "cuMemGetAddressRange_v2": (_P(_u64), _P(_size), _u64),
    "cuPointerGetAttribute": (_any, _int, _u64),
    "cuIpcGetMemHandle": (_P(IpcMemHandle), _u64),
    "cuIpcOpenMemHandle_v2": (_P(_u64), IpcMemHandle, _uint),
    "cuIpcCloseMemHandle": (_u64,),
    "cuMemCreate": (_P(_u64), _size, _P(MemAllocationProp), _u64),
    "cuMemRelease": (_u64,),
    "cuMemRetainAllocationHandle": (_P(_u64), _any),
    "cuMemExportToShareableHandle": (_any, _u64, _int, _u64),
    "cuMemImportFromShareableHandle": (_P(_u64), _any, _int),
    "cuMemGetAllocationGranularity": (_P(_size), _P(MemAllocationProp), _int),
    "cuMemAddressReserve": (_P(_u64), _size, _size, _u64, _u64),
    "cuMemAddressFree": (_u64, _size),
    "cuMemMap": (_u64, _size, _size, _u64, _u64),
    "cuMemUnmap": (_u64, _size),
    "cuMemSetAccess": (_u64, _size, _P(MemAccessDesc), _size),
    # host memory
    "cuMemHostAlloc": (_P(_any), _size, _uint),
    "cuMemFreeHost": (_any,),
    "cuMemHostRegister_v2": (_any, _size, _uint),
    "cuMemHostUnregister": (_any,),
    "cuMemHostGetDevicePointer_v2": (_P(_u64), _any, _uint),
    # streams, events, copies
    "cuStreamCreate": (_P(_any), _uint),
    "cuStreamDestroy_v2": (_any,),
    "cuStreamQuery": (_any,),
    "cuStreamSynchronize": (_any,),
    "cuStreamWriteValue64_v2": (_any, _u64, _u64, _uint),
    "cuEventCreate": (_P(_any), _uint),
    "cuEventDestroy_v2": (_any,),
    "cuEventRecord": (_any, _any),
    "cuEventQuery": (_any,),
    "cuEventSynchronize": (_any,),
    "cuMemcpyAsync": (_u64, _u64, _size, _any),
}

# Asked of cuGetProcAddress_v2: (name, version of the interface) -> argument types. A driver older than the
# version has none, and callers do without.
BY_VERSION: Final[dict[tuple[str, int], tuple[Any, ...]]] = {
    # destinations, sources, sizes, count, attributes, first copy of each attribute, their count, failed one, stream
    ("cuMemcpyBatchAsync", 12080): (_any, _any, _any, _size, _P(MemcpyAttributes), _P(_size), _size, _P(_size), _any),
}
