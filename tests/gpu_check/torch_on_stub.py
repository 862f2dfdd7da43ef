"""torch as the check's engine uses it, with the stub of the driver in place of CUDA: for the code, not for a GPU.

Tensors are CPU tensors over the stub's device memory, which lies in this process; each of their operations waits for
the stream first, so order is kept and nothing overlaps. Events are times. A graph is the list of what was asked for
while it was captured; calls that CUDA refuses then are refused. Installed by a `sitecustomize` that the
test puts before the children's path; whoever else imports torch gets it as it is.
"""

import contextlib
import ctypes
import struct
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kvferry.client.cuda_marks import CudaMarks
from kvferry.cuda.driver import Driver
from kvferry.cuda.structs import EVENT_DISABLE_TIMING
from kvferry.gpu_check.compute_driver import BOUNCE_BYTES

CYCLES_PER_MS = 1e6
KERNELS = ("fill_", "copy_", "add_", "bitwise_not")
WAITS = (*KERNELS, "cpu")
NOT_IN_A_CAPTURE = ("stream_synchronize", "event_happened", "host_register", "host_unregister", "allocate", "free")


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
        self.captured: list[Callable[[], Any]] | None = None

    def at(self, address: int, nbytes: int) -> torch.Tensor:
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8).as_subclass(OnStub)

    def sleep(self, cycles: int) -> None:
        if self.captured is not None:
            self.captured.append(lambda: self.sleep(cycles))
            return
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
        name, captured = getattr(func, "__name__", ""), gpu().captured
        if captured is not None and name in KERNELS:
            captured.append(lambda: func(*args, **(kwargs or {})))
            return args[0]
        if name in WAITS:
            gpu().now.synchronize()
        return super().__torch_function__(func, types, args, kwargs or {})


class Graph:
    def __init__(self) -> None:
        self.captured: list[Callable[[], Any]] = []

    def replay(self) -> None:
        for deed in self.captured:
            deed()


@contextlib.contextmanager
def capturing(graph: Graph, stream: Stream) -> Iterator[None]:
    """torch.cuda.graph: nothing runs in here."""
    assert stream is not gpu().null, "the null stream cannot be captured"
    stream.synchronize()
    gpu().captured = graph.captured
    try:
        yield
    finally:
        gpu().captured = None


def _heed_captures() -> None:
    """Calls of the driver go into the graph, or break the capture, as with CUDA."""

    def refused(call: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*args: Any, **kwargs: Any) -> Any:
            if _gpus and gpu().captured is not None:
                raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
            return call(*args, **kwargs)

        return asked

    for name in NOT_IN_A_CAPTURE:
        setattr(Driver, name, refused(getattr(Driver, name)))
    write = Driver.write_value

    def write_value(self: Driver, stream: int, address: int, value: int) -> None:
        if gpu().captured is None:
            write(self, stream, address, value)
        else:
            gpu().captured.append(lambda: write(self, stream, address, value))

    Driver.write_value = write_value  # type: ignore[method-assign]


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
    cuda.CUDAGraph, cuda.graph = Graph, capturing
    _heed_captures()
    cuda.set_stream = lambda one: setattr(gpu(), "now", one)
    cuda.current_stream = lambda: gpu().now
    cuda.default_stream = lambda device: gpu().null
    cuda.empty_cache = lambda: None
    cuda.synchronize = lambda: gpu().now.synchronize()
    cuda._sleep = lambda cycles: gpu().sleep(cycles)


# ---- bugs to plant ---------------------------------------------------------------------------------


def set_marks_in_captures() -> None:
    """As if an engine's hook were called while it captures."""
    _in_captures(lambda marks: marks.signal())


def look_at_events_in_captures() -> None:
    """As if the rank client had a thread that asks for events whenever it likes."""
    _in_captures(lambda marks: marks._driver.event_happened(marks._driver.event_create(EVENT_DISABLE_TIMING)))


def _in_captures(deed: Callable[[CudaMarks], Any]) -> None:
    made: list[CudaMarks] = []
    init, sleep = CudaMarks.__init__, Gpu.sleep

    def noted(self: CudaMarks, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made.append(self)

    def asked(self: Gpu, cycles: int) -> None:
        if self.captured is not None:
            deed(made[-1])
        sleep(self, cycles)

    CudaMarks.__init__, Gpu.sleep = noted, asked  # type: ignore[method-assign]
