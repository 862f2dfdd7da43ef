"""An engine on a GPU as inference servers are one: torch's memory, torch's current stream, torch's kernels.

The only module of kvferry's checks that imports torch, with `reference.py`. Its stream is not the null stream,
as in servers that capture graphs; `matmul` is the load that copies must not slow down.
"""

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from kvferry.client.cuda_memory import export_cuda
from kvferry.client.memory import KVMemory
from kvferry.cuda.driver import CudaError, Driver, same_gpu
from kvferry.gpu_check.compute import MemoryKind, Tensor
from kvferry.gpu_check.compute_driver import DriverMemory
from kvferry.gpu_worker.devices.cuda_gpu import find
from kvferry.proto.errors import ConfigError
from kvferry.proto.limits import PAGE_BYTES

CALIBRATE_CYCLES: Final = 20_000_000
NO_TORCH_FIX: Final = (
    "install a torch for CUDA beside kvferry (pip install 'kvferry[worker]'; docker: the image of target `worker`"
    " has it), or play the engine without torch: --engine driver"
)


class TorchCompute:
    """See the module's text."""

    kind = "torch"
    can_hold = False

    def __init__(self, gpu: str) -> None:
        torch = self._torch = _torch()
        self._driver = Driver.load()
        self._gpu = find(self._driver, gpu)
        uuids = [str(torch.cuda.get_device_properties(n).uuid) for n in range(torch.cuda.device_count())]
        ordinal = next((n for n, uuid in enumerate(uuids) if same_gpu(uuid, self._gpu.uuid)), None)
        if ordinal is None:
            raise ConfigError("check.torch", f"torch sees the GPUs {uuids}, not {self._gpu.uuid}", NO_TORCH_FIX)
        torch.cuda.set_device(ordinal)
        self._device = torch.device("cuda", ordinal)
        torch.zeros(1, device=self._device)  # the context
        torch.cuda.set_stream(torch.cuda.Stream(self._device))
        self._memory = DriverMemory(self._driver, self._gpu.device)
        self._tensors: dict[int, Any] = {}
        self._graph: Any = None
        self._number: Any = None  # of the graph's last replay, on the GPU
        self._cycles_per_ms = self._calibrate()

    def about(self) -> dict[str, Any]:
        torch = self._torch
        return {
            "engine": "torch",
            "name": self._gpu.name,
            "uuid": self._gpu.uuid,
            "torch": torch.__version__,
            "torch_cuda": torch.version.cuda,
        }

    def allocate(self, nbytes: int, kind: MemoryKind) -> int:
        if kind != "plain":
            return self._memory.allocate(nbytes, kind)
        tensor = self._torch.zeros(nbytes, dtype=self._torch.uint8, device=self._device)
        self.finish()
        self._tensors[int(tensor.data_ptr())] = tensor
        return int(tensor.data_ptr())

    def free(self) -> None:
        self.finish()
        self._graph = self._number = None
        self._tensors.clear()
        self._torch.cuda.empty_cache()
        self._memory.free()

    def export(self, views: Mapping[str, Tensor], marks: Literal["word", "host"] | None) -> KVMemory:
        # Real tensors where they are torch's, as a server registers them.
        real = {name: self._real(view) for name, view in views.items()}
        return export_cuda(real, block_tokens=16, driver=self._driver, marks=marks)

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        self._at(address, nbytes).fill_(byte)

    def spin(self, milliseconds: float) -> None:
        self._torch.cuda._sleep(int(milliseconds * self._cycles_per_ms))

    def hold(self) -> None:
        raise ConfigError("check.stream", "a GPU's stream cannot be held until told")

    def release(self) -> None:
        """Nothing is ever held."""

    def finish(self) -> None:
        self._torch.cuda.current_stream().synchronize()

    def put(self, address: int, data: bytes) -> None:
        host = self._torch.frombuffer(bytearray(data), dtype=self._torch.uint8)
        self._at(address, len(data)).copy_(host)
        self.finish()

    def get(self, address: int, nbytes: int) -> bytes:
        return bytes(self._at(address, nbytes).cpu().numpy().tobytes())

    def close(self) -> None:
        self.free()

    # ---- for single items ------------------------------------------------------------------------

    def on_null_stream(self, deed: Any) -> Any:
        """Do something with the null stream as the current one, as servers without streams of their own have it."""
        with self._torch.cuda.stream(self._torch.cuda.default_stream(self._device)):
            return deed()

    def kernel_works(self) -> bool:
        """Whether a kernel runs and its answer is right: no error of an earlier call is left pending."""
        torch = self._torch
        return int(torch.arange(1000, device=self._device).sum().item()) == 499_500

    def refused_call(self) -> str:
        """Ask the driver for something that it must refuse: memory that is not there cannot be pinned."""
        try:
            self._driver.host_register(PAGE_BYTES, PAGE_BYTES)
        except CudaError as error:
            return error.text
        return "a registration of nothing, which was taken"

    def matmul(self, seconds: float, side: int) -> list[float]:
        """Milliseconds of each matrix product within this time, by the GPU's own clock."""
        torch = self._torch
        a = torch.randn(side, side, device=self._device, dtype=torch.bfloat16)
        out = torch.empty_like(a)
        for _ in range(3):
            torch.mm(a, a, out=out)
        self.finish()
        times: list[float] = []
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(9)]
            marks[0].record()
            for mark in marks[1:]:
                torch.mm(a, a, out=out)
                mark.record()
            self.finish()
            times += [first.elapsed_time(second) for first, second in itertools.pairwise(marks)]
        return times

    def capture(
        self, written: Sequence[int], read: Sequence[int], derived: Sequence[int], nbytes: int, spin_ms: float
    ) -> None:
        """Capture a graph as servers do: it is busy for a time, then writes at `written` the number of the replay,
        and at `derived` the complement of what it reads at `read`; `nbytes` at each of these addresses."""
        torch = self._torch
        number = torch.zeros(1, dtype=torch.uint8, device=self._device)

        def kernels() -> None:
            self.spin(spin_ms)
            number.add_(1)
            for at in written:
                self._at(at, nbytes).copy_(number.expand(nbytes))
            for source, target in zip(read, derived, strict=True):
                torch.bitwise_not(self._at(source, nbytes), out=self._at(target, nbytes))

        kernels()  # once outside: what a kernel's first launch loads cannot be loaded in a capture
        number.fill_(0)
        self._graph, self._number = torch.cuda.CUDAGraph(), number
        with torch.cuda.graph(self._graph, stream=torch.cuda.current_stream()):
            kernels()

    def replay(self) -> None:
        """Queue: the captured graph once more."""
        self._graph.replay()

    def interprocess_event(self) -> tuple[Any, bytes, float]:
        """An event recorded behind all that is queued, its handle, and the microseconds that the record took."""
        event = self._torch.cuda.Event(interprocess=True)
        began = time.perf_counter()
        event.record()
        return event, bytes(event.ipc_handle()), (time.perf_counter() - began) * 1e6

    # ---- inside ----------------------------------------------------------------------------------

    def _at(self, address: int, nbytes: int) -> Any:
        for base, tensor in self._tensors.items():
            if base <= address and address + nbytes <= base + tensor.numel():
                return tensor[address - base : address - base + nbytes]
        return tensor_at(self._torch, address, nbytes, self._device)

    def _real(self, view: Tensor) -> Any:
        for base, tensor in self._tensors.items():
            if base <= view.address < base + tensor.numel():
                return tensor.as_strided(view.shape, view.strides, view.address - base)
        return view

    def _calibrate(self) -> float:
        torch = self._torch
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1000)
        start.record()
        torch.cuda._sleep(CALIBRATE_CYCLES)
        end.record()
        self.finish()
        return CALIBRATE_CYCLES / max(float(start.elapsed_time(end)), 1e-3)


class _Shown:
    """Memory at an address, as torch takes it without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def tensor_at(torch: Any, address: int, nbytes: int, device: Any) -> Any:
    """A tensor of device memory that torch did not allocate."""
    return torch.as_tensor(_Shown(address, nbytes), device=device)


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise ConfigError(
            "check.torch", f"the engine is played with torch, which is not here: {error}", NO_TORCH_FIX
        ) from None
    if not torch.cuda.is_available():
        built = torch.version.cuda or "no CUDA at all"
        raise ConfigError("check.torch", f"torch {torch.__version__} (for {built}) sees no GPU here", NO_TORCH_FIX)
    return torch
