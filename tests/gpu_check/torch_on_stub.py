"""torch as the check's engine uses it, with the stub of the driver in place of CUDA: for the code, not for a GPU.

Tensors are CPU tensors over the stub's device memory, which lies in this process; each of their operations waits for
the stream first, so order is kept and nothing overlaps. Events are times. Installed by a `sitecustomize` that the
test puts before the children's path; whoever else imports torch gets it as it is.
"""

import contextlib
import ctypes
import struct
import time
import types
from collections.abc import Iterator
from typing import Any

import torch

from kvferry.cuda.driver import Driver
from kvferry.gpu_check.compute_driver import BOUNCE_BYTES

CYCLES_PER_MS = 1e6
WAITS = ("fill_", "copy_", "cpu")


class Gpu:
    """The stub, as torch would hold it."""

    def __init__(self) -> None:
        self.driver = Driver.load()
        self.device = self.driver.device(0)
        self.driver.use(self.driver.retain_context(self.device, flags=None))
        self.bounce = self.driver.host_allocate(BOUNCE_BYTES)
        self.scratch = self.driver.allocate(BOUNCE_BYTES)
        self.null = self.now = Stream(self)
        self.busy_until_ns = 0

    def at(self, address: int, nbytes: int) -> torch.Tensor:
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8).as_subclass(OnStub)

    def sleep(self, cycles: int) -> None:
        milliseconds = cycles / CYCLES_PER_MS
        until = time.monotonic() + milliseconds / 1e3
        self.busy_until_ns = int(until * 1e9)
        # A stream cannot be told to wait here; short spins are waited for, long ones are queued copies.
        if milliseconds > 100:
            for _ in range(2000):
                self.driver.copy(self.scratch, self.bounce, BOUNCE_BYTES, self.now.cuda_stream)
        else:
            time.sleep(milliseconds / 1e3)


class Stream:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.cuda_stream = gpu.driver.stream_create()

    def synchronize(self) -> None:
        self._gpu.driver.stream_synchronize(self.cuda_stream)


class OnStub(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in WAITS:
            gpu().now.synchronize()
        return super().__torch_function__(func, types, args, kwargs or {})


class Event:
    def __init__(self, enable_timing: bool = False, interprocess: bool = False, due_ns: int = 0) -> None:
        self._at_ns = due_ns

    def record(self) -> None:
        self._at_ns = max(time.monotonic_ns(), gpu().busy_until_ns)

    def elapsed_time(self, other: "Event") -> float:
        return max((other._at_ns - self._at_ns) / 1e6, 1e-6)

    def query(self) -> bool:
        return time.monotonic_ns() >= self._at_ns

    def ipc_handle(self) -> bytes:
        return struct.pack("<Q56x", self._at_ns)

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: bytes) -> "Event":
        assert len(handle) == 64
        return cls(due_ns=struct.unpack("<Q56x", handle)[0])


_gpus: list[Gpu] = []


def gpu() -> Gpu:
    """Opened when it is first used, as torch opens CUDA."""
    if not _gpus:
        _gpus.append(Gpu())
    return _gpus[0]


def install() -> None:
    """Put the stub under torch.cuda and under the few functions that make tensors."""
    cuda, zeros, randn, arange, as_tensor = torch.cuda, torch.zeros, torch.randn, torch.arange, torch.as_tensor

    def is_on_gpu(device: Any) -> bool:
        return device is not None and torch.device(device).type == "cuda"

    def made(size: int, *, device: Any = None, dtype: Any = None) -> torch.Tensor:
        if not is_on_gpu(device):
            return zeros(size, dtype=dtype)
        return gpu().at(gpu().driver.allocate(max(size, 1)), size).fill_(0)

    def shown(data: Any, device: Any = None) -> torch.Tensor:
        if not hasattr(data, "__cuda_array_interface__"):
            return as_tensor(data)
        told = data.__cuda_array_interface__
        assert told["version"] == 3 and told["typestr"] == "|u1"
        return gpu().at(told["data"][0], told["shape"][0])

    @contextlib.contextmanager
    def stream(one: Stream) -> Iterator[None]:
        before, gpu().now = gpu().now, one
        yield
        gpu().now = before

    torch.zeros, torch.as_tensor = made, shown
    torch.randn = lambda *sizes, device=None, dtype=None: randn(*sizes, dtype=dtype)
    torch.arange = lambda end, device=None: arange(end)
    torch.version.cuda = "stub"
    cuda.is_available = lambda: True
    cuda.device_count = lambda: gpu().driver.device_count()
    cuda.get_device_properties = lambda n: types.SimpleNamespace(uuid=gpu().driver.device_uuid(n)[4:])
    cuda.set_device = lambda n: None
    cuda.Stream = lambda device: Stream(gpu())
    cuda.Event, cuda.stream = Event, stream
    cuda.set_stream = lambda one: setattr(gpu(), "now", one)
    cuda.current_stream = lambda: gpu().now
    cuda.default_stream = lambda device: gpu().null
    cuda.empty_cache = lambda: None
    cuda.synchronize = lambda: gpu().now.synchronize()
    cuda._sleep = lambda cycles: gpu().sleep(cycles)
