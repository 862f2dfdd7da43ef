"""The driver library: found, its table of calls checked against it, its results turned into errors.

Loads nothing at import: `Library.load` does, and says by ConfigError what is missing here. An error stays in the
call's own return code; unlike the runtime's it is never left pending for a later, innocent call.
`CudaError.is_sticky` tells the ones after which no call of this process will succeed.
"""

import ctypes
from typing import Any, Final, Self

from kvferry.cuda.table import BY_VERSION, TABLE
from kvferry.proto.errors import ConfigError, KvferryError

LIBRARY: Final = "libcuda.so.1"

SUCCESS: Final = 0
INVALID_VALUE: Final = 1
OUT_OF_MEMORY: Final = 2
NO_DEVICE: Final = 100
INVALID_CONTEXT: Final = 201
INVALID_HANDLE: Final = 400
NOT_READY: Final = 600
NOT_SUPPORTED: Final = 801
# cuda.h says of these that the process must end before CUDA can be used again; and of a driver that has shut
# down, a GPU that fell off the bus or has bad memory, and a failure nobody can name, it is as good as said.
STICKY: Final = frozenset({4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911, 999})


class CudaError(KvferryError):
    """A driver call failed. `call`, `result` (the CUresult) and `name` say which and how."""

    def __init__(self, call: str, result: int, name: str, words: str) -> None:
        self.call, self.result, self.name = call, result, name
        super().__init__("cuda.call", f"{call} failed: {name} ({result}): {words}")

    @property
    def is_sticky(self) -> bool:
        """Whether every later call of this process will fail too."""
        return self.result in STICKY


class Library:
    """One loaded driver. Thread-safe as far as CUDA is; it has no state of its own."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Find every entry point of the table and initialise. ConfigError if that cannot be had here."""
        self._calls: dict[str, Any] = {}
        for name, arguments in TABLE.items():
            try:
                call = getattr(library, name)
            except AttributeError:
                raise ConfigError(
                    "device.old_driver",
                    f"the CUDA driver has no {name}",
                    "kvferry needs a driver of CUDA 12.0 or later (525 and up)",
                ) from None
            call.argtypes, call.restype = arguments, ctypes.c_int
            self._calls[name] = call
        result = self.ask("cuInit", 0)
        if result != SUCCESS:
            name, words = self.explain(result)
            raise ConfigError(
                "device.no_gpu",
                f"the CUDA driver does not start: {name} ({result}): {words}",
                "check `nvidia-smi` here; in a container give it the GPU (--gpus, or NVIDIA_VISIBLE_DEVICES)",
            )

    @classmethod
    def load(cls, library: str = LIBRARY) -> Self:
        """The driver of this machine; ConfigError(device.no_driver) if it has none. `library` is for tests."""
        try:
            loaded = ctypes.CDLL(library)
        except OSError as error:
            raise ConfigError(
                "device.no_driver",
                f"there is no CUDA driver here: {error}",
                "install the NVIDIA driver, or give the container the GPU (--gpus); without one use --device cpu",
            ) from None
        return cls(loaded)

    # ---- calls -----------------------------------------------------------------------------------

    def ask(self, name: str, *arguments: Any) -> int:
        """Call an entry point of the table; its CUresult, whatever it is."""
        return int(self._calls[name](*arguments))

    def call(self, name: str, *arguments: Any) -> None:
        """Call an entry point of the table; CudaError unless it succeeds."""
        result = self._calls[name](*arguments)
        if result != SUCCESS:
            raise self.error(name, result)

    def error(self, name: str, result: int) -> CudaError:
        """The error that tells of a result."""
        return CudaError(name, result, *self.explain(result))

    def explain(self, result: int) -> tuple[str, str]:
        """(name, words) of a CUresult, as the driver has them."""
        found = []
        for call in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            self.ask(call, result, ctypes.byref(text))
            found.append((text.value or b"unknown to this driver").decode(errors="replace"))
        return found[0], found[1]

    def by_version(self, name: str, version: int) -> Any:
        """The entry point with the signature of one version; None if the driver is older than that."""
        found, status = ctypes.c_void_p(), ctypes.c_int()
        result = self.ask("cuGetProcAddress_v2", name.encode(), ctypes.byref(found), version, 0, ctypes.byref(status))
        if result != SUCCESS or not found.value:
            return None
        return ctypes.CFUNCTYPE(ctypes.c_int, *BY_VERSION[name, version])(found.value)

    # ---- results by type -------------------------------------------------------------------------

    def _int(self, name: str, *arguments: Any) -> int:
        found = ctypes.c_int()
        self.call(name, ctypes.byref(found), *arguments)
        return found.value

    def _u64(self, name: str, *arguments: Any) -> int:
        found = ctypes.c_uint64()
        self.call(name, ctypes.byref(found), *arguments)
        return found.value

    def _pointer(self, name: str, *arguments: Any) -> int:
        found = ctypes.c_void_p()
        self.call(name, ctypes.byref(found), *arguments)
        return found.value or 0
