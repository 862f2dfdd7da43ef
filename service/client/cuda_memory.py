"""Lending an engine's GPU tensors: their allocations become handles that a worker can map. Imported only when used.

    tensor ──data pointer──▶ its allocation (base, bytes), once each ──▶ may be exported ──▶ Handle
                                                     cudaMalloc, so torch's own ──▶ cuda_ipc: 64 bytes
                                  cuMemCreate with the descriptor bit (vLLM's cumem) ──▶ cuda_vmm_fd: a descriptor
                                                                 anything else ──▶ refused, naming the setting

    base          base + base_offset: byte 0 of the handle                       end of the allocation
    ├── somebody else's ──┼──── layer 0 ──── layer 1 ──── ... ────┼── somebody else's ──┤
                          └───────────── shown: nbytes ───────────┘     (a descriptor shows up to the end)

Whoever opens a handle has the whole allocation; what it says it shows, and all that a worker touches, are the
views in it. Done once, in the thread that owns the engine's context and before it serves; what is found is kept, and
shown again to every later worker without another call of the driver.

Never: torch's own sharing (it counts references in /dev/shm, and fails for memory that is exported here), a copy
of the tensors, a call from another thread.
"""

import contextlib
import ctypes
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kvferry.client.cuda_marks import PROBE_S, CudaMarks, Stream, torch_stream
from kvferry.client.memory import KVMemory, View, from_views
from kvferry.cuda.driver import AddressRange, CudaError, Driver, pid_namespace
from kvferry.cuda.structs import HANDLE_TYPE_POSIX_FD, PointerAttribute
from kvferry.proto.errors import ConfigError
from kvferry.proto.layout import Handle
from kvferry.proto.tether import MarkMode, Probe

PROBE_BYTES: Final = 64
ALLOCATOR_SETTINGS: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


class GpuTensor(Protocol):
    """What is asked of a tensor; torch's have it all."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> object: ...
    def data_ptr(self) -> int: ...
    def stride(self) -> Sequence[int]: ...
    def element_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class _Gpu:
    """Where the tensors are."""

    driver: Driver
    device: int
    context: int
    uuid: str


@dataclass(slots=True)
class _Used:
    """One allocation, and what of it the views use."""

    where: AddressRange
    name: str  # of the first view in it
    start: int
    end: int


def export_cuda(
    views: Mapping[str, GpuTensor],
    *,
    block_tokens: int,
    block_dim: int = 0,
    format: str = "",
    null_block: bool = False,
    replicas: int = 1,
    block_bytes: int = 0,
    probe_with: Sequence[GpuTensor] | None = None,
    driver: Driver | None = None,
    current_stream: Stream = torch_stream,
    marks: MarkMode | None = None,
    mark_probe_s: float = PROBE_S,
) -> KVMemory:
    """The KV memory of one rank's tensors on one GPU, as a worker on the same GPU can map it.

    views, block_dim, format, null_block, block_bytes, probe_with: as for `export_cpu`.  current_stream: the
    stream that the engine launches on at the moment of the call, asked at each mark.  marks: "host" leaves the
    probe out and orders by events.
    Call it in the thread that computes, with its context current. The descriptors in it are the caller's, for as
    long as workers shall be able to come.
    Errors: ConfigError naming what stands against it, and the setting that does.
    """
    shown = {name: tensor for name, tensor in views.items() if min(tensor.shape, default=0) > 0}
    if not shown:
        raise ConfigError("memory.none", "no KV tensor to share", "register the KV caches first")
    gpu = _gpu_of(driver if driver is not None else Driver.load(), shown)
    used: dict[int, _Used] = {}  # by base, in order of first use
    homes = {name: _find(gpu, name, tensor, used) for name, tensor in shown.items()}
    order = {base: index for index, base in enumerate(used)}
    handles: list[Handle] = []
    fds: list[int] = []
    try:
        for allocation in used.values():
            handle, fd = _show(gpu, allocation)
            handles.append(handle)
            fds += [] if fd is None else [fd]
        windows = [
            AddressRange(base + handle.base_offset, handle.nbytes) for base, handle in zip(used, handles, strict=True)
        ]
        return from_views(
            [
                View(
                    handle=order[homes[name]],
                    offset=tensor.data_ptr() - windows[order[homes[name]]].base,
                    sizes=tuple(tensor.shape),
                    strides=tuple(tensor.stride()),
                    itemsize=tensor.element_size(),
                    block_dim=block_dim,
                )
                for name, tensor in shown.items()
            ],
            handles,
            fds,
            block_tokens=block_tokens,
            format=f"{format}|{','.join(sorted({str(tensor.dtype) for tensor in shown.values()}))}",
            null_block=null_block,
            replicas=replicas,
            block_bytes=block_bytes,
            probing=lambda: _probe(gpu, current_stream, list(probe_with or [next(iter(shown.values()))]), windows),
            marking=lambda page, memory: CudaMarks(
                gpu.driver,
                gpu.device,
                gpu.context,
                page,
                memory,
                current_stream=current_stream,
                wanted=marks,
                probe_s=mark_probe_s,
            ),
            keep=tuple(shown.values()),
        )
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def _gpu_of(driver: Driver, tensors: Mapping[str, GpuTensor]) -> _Gpu:
    """The one GPU that all of them are on. ConfigError if they are not, or if a pointer is none of a GPU's."""
    ordinals: dict[int, str] = {}
    for name, tensor in tensors.items():
        with _saying(f"{name} lies at {tensor.data_ptr():#x}, which is no GPU memory that the driver knows"):
            ordinals.setdefault(driver.pointer_attribute(PointerAttribute.DEVICE_ORDINAL, tensor.data_ptr()), name)
    if len(ordinals) > 1:
        where = ", ".join(f"{name} on GPU {ordinal}" for ordinal, name in ordinals.items())
        raise ConfigError("memory.device", f"the KV tensors of one rank lie on several GPUs: {where}")
    with _saying("the GPU of the KV tensors cannot be asked"):
        device = driver.device(next(iter(ordinals)))
        context = driver.current_context()
        if not context or driver.current_device() != device:
            raise ConfigError(
                "memory.device",
                f"this thread has {'another GPU as its current one' if context else 'no CUDA context'}",
                "export in the thread that computes, with the tensors' GPU as its current one",
            )
        return _Gpu(driver, device, context, driver.device_uuid(device))


def _find(gpu: _Gpu, name: str, tensor: GpuTensor, used: dict[int, _Used]) -> int:
    """The base of the allocation that a tensor lies in, noted in `used`. ConfigError if it lies in several."""
    start = tensor.data_ptr()
    with _saying(f"{name} lies at {start:#x}, and the driver names no allocation there"):
        where = gpu.driver.address_range(start)
    end = start + _extent(tensor)
    if end > where.base + where.nbytes:
        setting, fix = _setting()
        raise ConfigError(
            "memory.pieces",
            f"{name} needs {end - start} bytes from {start:#x} on; the piece of memory there has"
            f" {where.base + where.nbytes - start}: the KV cache is mapped from several{setting}",
            fix,
        )
    known = used.setdefault(where.base, _Used(where, name, start, end))
    known.start, known.end = min(known.start, start), max(known.end, end)
    return where.base


def _show(gpu: _Gpu, used: _Used) -> tuple[Handle, int | None]:
    """What is used of an allocation as a handle, and its descriptor if it has one. ConfigError if it has neither."""
    driver, base = gpu.driver, used.where.base
    common = Handle(
        kind="cuda_ipc",
        nbytes=used.end - used.start,
        base_offset=used.start - base,
        device=gpu.uuid,
        pid=os.getpid(),
        pid_ns=pid_namespace(),
    )
    with _saying(f"the memory of {used.name} cannot be exported"):
        if driver.pointer_attribute(PointerAttribute.IS_LEGACY_CUDA_IPC_CAPABLE, used.start):
            return common.model_copy(update={"blob": driver.ipc_export(base)}), None
        if driver.pointer_attribute(PointerAttribute.ALLOWED_HANDLE_TYPES, used.start) & HANDLE_TYPE_POSIX_FD:
            allocation = driver.retain_handle(base)
            try:
                fd = driver.export_fd(allocation)
            finally:
                driver.release(allocation)
            # An allocation is mapped whole, and whoever imports it knows no other size of it than this.
            nbytes = base + used.where.nbytes - used.start
            return common.model_copy(update={"kind": "cuda_vmm_fd", "nbytes": nbytes}), fd
    setting, fix = _setting()
    raise ConfigError(
        "memory.not_exportable",
        f"the memory of {used.name} ({used.where.nbytes} bytes) can be shown to no other process{setting}",
        fix,
    )


def _setting() -> tuple[str, str]:
    """The allocator setting that is the likeliest cause, as the end of a sentence, and what to do."""
    for name in ALLOCATOR_SETTINGS:
        chosen = os.environ.get(name, "").replace(" ", "")
        for word in ("expandable_segments:True", "backend:cudaMallocAsync"):
            if word.lower() in chosen.lower():
                return f"; {name} has {word}", f"start the engine without {word} in {name}"
    return (
        "; it was made without an exportable handle (sleep mode, cumem, expandable segments, a memory pool of"
        " the engine's own)",
        "start the engine with torch's ordinary allocator: without --enable-sleep-mode, without"
        " --enable-cumem-allocator and with expandable_segments:False",
    )


def _extent(tensor: GpuTensor) -> int:
    """Bytes from a tensor's first element to behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _first_run(tensor: GpuTensor) -> int:
    """Bytes at a tensor's start that surely are its own."""
    run = tensor.element_size()
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride * tensor.element_size() == run:
            run *= size
    return run


@contextlib.contextmanager
def _probe(
    gpu: _Gpu, current_stream: Stream, tensors: Sequence[GpuTensor], windows: Sequence[AddressRange]
) -> Iterator[tuple[Probe, ...]]:
    """Write random bytes at the start of each tensor; yields what a worker must see there; restores them.

    On the engine's own stream, behind what it has launched, and waited for. Only for an idle engine.
    """
    probes: list[Probe] = []
    saved: dict[int, bytes] = {}
    with _saying("the probes cannot be written"):
        bridge = _Bridge(gpu.driver, current_stream())
    try:
        for tensor in tensors:
            start = tensor.data_ptr()
            handle = next((h for h, (at, n) in enumerate(windows) if at <= start < at + n), -1)
            if start in saved:
                continue
            if handle < 0:
                raise ConfigError(
                    "layout.probe",
                    f"a layer's tensor lies at {start:#x}, outside the memory that was shared",
                    "share the tensors that the layers compute with",
                )
            with _saying("the probes cannot be written"):
                saved[start] = bridge.read(start, min(PROBE_BYTES, _first_run(tensor)))
                expect = secrets.token_bytes(len(saved[start]))
                bridge.write(start, expect)
            probes.append(Probe(handle=handle, offset=start - windows[handle].base, expect=expect))
        yield tuple(probes)
    finally:
        with _saying("the bytes under the probes cannot be restored"):
            for start, content in saved.items():
                bridge.write(start, content)
            bridge.close()


class _Bridge:
    """A few bytes of pinned memory, to look at the GPU's and to write there, on one stream and waited for."""

    def __init__(self, driver: Driver, stream: int) -> None:
        self._driver, self._stream = driver, stream
        self._address = driver.host_allocate(PROBE_BYTES)

    def read(self, address: int, nbytes: int) -> bytes:
        self._driver.copy(self._address, address, nbytes, self._stream)
        self._driver.stream_synchronize(self._stream)
        return ctypes.string_at(self._address, nbytes)

    def write(self, address: int, content: bytes) -> None:
        ctypes.memmove(self._address, content, len(content))
        self._driver.copy(address, self._address, len(content), self._stream)
        self._driver.stream_synchronize(self._stream)

    def close(self) -> None:
        self._driver.host_free(self._address)


@contextlib.contextmanager
def _saying(what: str) -> Iterator[None]:
    """A driver's error in here is a ConfigError that says what was meant to be done."""
    try:
        yield
    except CudaError as error:
        raise ConfigError("memory.export", f"{what}: {error.text}", "see `kvferry gpu-check`") from None
