"""Sharing an engine's torch KV tensors on the CPU, in place. The only module of the client that imports torch.

    storage ──_share_fd_cpu_()──▶ the same storage object, its bytes now in a nameless shared file, and its fd

Sharing swaps the pointer inside the storage, so every view of it (the runner's, the layers', ours) follows.
It copies once: for a moment the KV is there twice, and afterwards it counts against /dev/shm. Both are
checked first, with both numbers, because the failure later would be a SIGBUS or the OOM killer.
"""

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch

from kvferry.client.memory import KVMemory, View, from_views
from kvferry.proto.errors import ConfigError
from kvferry.proto.layout import Handle
from kvferry.proto.tether import Probe

PROBE_BYTES: Final = 64
SHM: Final = "/dev/shm"


def export_cpu(
    views: Mapping[str, torch.Tensor],
    *,
    block_tokens: int,
    block_dim: int = 0,
    format: str = "",
    null_block: bool = False,
    replicas: int = 1,
    block_bytes: int = 0,
    probe_with: Sequence[torch.Tensor] | None = None,
) -> KVMemory:
    """The KV memory of one rank's CPU tensors, shared in place.

    views: layer name -> tensor, strides as they are; `block_dim` counts blocks.  format: dtype and head
    layout in words; the dtype is added.  block_bytes: as for `from_views`.  probe_with: the tensors that the
    attention layers themselves use, if they are other objects than `views`: a first attachment proves through
    them that the sharing reached the layers. Call it before anybody has taken a raw pointer into the tensors.
    Errors: ConfigError with both numbers if memory or /dev/shm cannot hold the KV.
    """
    if not views:
        raise ConfigError("memory.none", "no KV tensor to share", "register the KV caches first")
    storages: dict[int, torch.UntypedStorage] = {}
    owners: dict[str, int] = {}
    for name, tensor in views.items():
        if tensor.device.type != "cpu":
            raise ConfigError("memory.device", f"{name} is on {tensor.device}; this exporter shares CPU memory")
        storage = tensor.untyped_storage()
        owners[name] = storage.data_ptr()
        storages.setdefault(storage.data_ptr(), storage)
    check_room(sum(s.nbytes() for s in storages.values() if not s.is_shared()))

    handles: list[Handle] = []
    fds: list[int] = []
    index: dict[int, int] = {}
    for pointer, storage in storages.items():
        index[pointer] = len(handles)
        fds.append(_share(storage))
        handles.append(Handle(kind="shm_fd", nbytes=storage.nbytes()))
    described = [
        View(
            handle=index[owners[name]],
            offset=int(tensor.storage_offset()) * tensor.element_size(),
            sizes=tuple(tensor.shape),
            strides=tuple(tensor.stride()),
            itemsize=tensor.element_size(),
            block_dim=block_dim,
        )
        for name, tensor in views.items()
    ]
    dtypes = ",".join(sorted({str(tensor.dtype) for tensor in views.values()}))
    probed = list(probe_with) if probe_with is not None else [next(iter(views.values()))]
    starts = [storage.data_ptr() for storage in storages.values()]
    return from_views(
        described,
        handles,
        fds,
        block_tokens=block_tokens,
        format=f"{format}|{dtypes}",
        null_block=null_block,
        replicas=replicas,
        block_bytes=block_bytes,
        probing=lambda: _probe(probed, starts, [handle.nbytes for handle in handles]),
        keep=tuple(storages.values()),
    )


def check_room(nbytes: int, shm: str = SHM, meminfo: str = "/proc/meminfo", cgroup: str = "/sys/fs/cgroup") -> None:
    """ConfigError with both numbers unless `nbytes` more fit into memory and into /dev/shm."""
    if nbytes == 0:
        return
    stat = os.statvfs(shm)
    in_shm = stat.f_bavail * stat.f_frsize
    if in_shm < nbytes:
        raise ConfigError(
            "memory.shm",
            f"sharing {_size(nbytes)} of KV needs as much free in {shm}; it has {_size(in_shm)}",
            f"enlarge it (docker: --shm-size={_size(nbytes + nbytes // 8)}) or shrink the engine's KV cache",
        )
    in_memory = _free_memory(Path(meminfo), Path(cgroup))
    if in_memory is not None and in_memory < nbytes:
        raise ConfigError(
            "memory.free",
            f"sharing {_size(nbytes)} of KV copies it once; {_size(in_memory)} of memory are free",
            "shrink the engine's KV cache or give the machine or container more memory",
        )


def _share(storage: torch.UntypedStorage) -> int:
    """Move the storage into shared memory, in place; a descriptor of ours."""
    try:
        fd, _ = storage._share_fd_cpu_()
    except RuntimeError as error:
        raise ConfigError("memory.share", f"torch cannot share {_size(storage.nbytes())}: {error}") from None
    return os.dup(fd)  # torch keeps its own


def _free_memory(meminfo: Path, cgroup: Path) -> int | None:
    """Bytes that can be had: of the machine, or of the control group if that is less; None if unknown."""
    found = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        line = next(each for each in meminfo.read_text().splitlines() if each.startswith("MemAvailable:"))
        found.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):  # "max" is no number: no limit
        limit = int((cgroup / "memory.max").read_text())
        found.append(limit - int((cgroup / "memory.current").read_text()))
    return min(found, default=None)


@contextlib.contextmanager
def _probe(tensors: Sequence[torch.Tensor], starts: list[int], sizes: list[int]) -> Iterator[tuple[Probe, ...]]:
    """Write random bytes into block 0 through each tensor; yields what a worker must see; restores them.

    Only for an idle engine: whoever reads block 0 meanwhile reads noise.
    """
    probes, saved = [], []
    seen: set[int] = set()
    try:
        for tensor in tensors:
            pointer = tensor.data_ptr()
            handle = next(
                (h for h, (at, n) in enumerate(zip(starts, sizes, strict=True)) if at <= pointer < at + n), -1
            )
            if pointer in seen:
                continue
            seen.add(pointer)
            if handle < 0:
                raise ConfigError(
                    "layout.probe",
                    f"a layer's tensor lies at {pointer:#x}, outside the memory that was shared",
                    "share the tensors before the layers take views of other storage",
                )
            window = _first_bytes(tensor)
            saved.append((window, window.clone()))
            expect = secrets.token_bytes(window.numel())
            window.copy_(torch.frombuffer(bytearray(expect), dtype=torch.uint8))
            probes.append(Probe(handle=handle, offset=pointer - starts[handle], expect=expect))
        yield tuple(probes)
    finally:
        for window, before in saved:
            window.copy_(before)


def _first_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The first bytes of a tensor's memory that surely are its own, as a view of bytes."""
    flat = tensor
    while flat.dim() > 1:
        flat = flat.select(0, 0)
    if flat.dim() == 0 or flat.stride(0) != 1:
        flat = flat.reshape(-1)[:1] if flat.dim() == 0 else flat[:1]
    return flat.view(torch.uint8)[:PROBE_BYTES]


def _size(nbytes: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f}{unit}"
    return f"{nbytes}B"
