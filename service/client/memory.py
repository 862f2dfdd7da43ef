"""Describing an engine's KV memory in bytes: views with strides become regions. Pure; no torch.

    View(handle, offset, sizes, strides, itemsize)      one layer's tensor, as the engine sees it
      │  block dimension out; the others by rising stride; what is contiguous joins into one run
      ▼
    Region(handle, offset, stride, run, blocks)         block b = bytes [offset + b * stride, + run)

The regions of all views, without repeats, sorted by place and joined with their neighbours, are the payload
of a block. Two engines may share a pool only if their payloads mean the same: `Layout.format` therefore
names which part of which view each byte range holds, in order.
"""

import hashlib
import itertools
import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.client.marks import Marks
from kvferry.proto import limits
from kvferry.proto.errors import ConfigError, RemoteProtocolError
from kvferry.proto.layout import Group, Handle, Layout, Region
from kvferry.proto.page import PageWriter
from kvferry.proto.tether import Probe

# Writes known bytes through the engine's own tensors, yields what a worker must then see, restores on exit.
Probing = Callable[[], AbstractContextManager[tuple[Probe, ...]]]
# How marks are set for this memory, given the rank's page and its mapping. ConfigError if it cannot be done.
Marking = Callable[[PageWriter, mmap.mmap], Marks]


@dataclass(frozen=True, slots=True)
class View:
    """One tensor over one handle's memory.

    offset: byte of its first element within the handle.  strides: in elements, one for each size.
    block_dim: which dimension counts blocks.
    """

    handle: int
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    block_dim: int = 0


@dataclass(frozen=True, slots=True)
class KVMemory:
    """What a rank shows its worker: the layout, the descriptors of its handles, and how to prove the mapping.

    `marking` is None where the engine's own thread does the work. `keep` holds whatever must live as long as the
    memory is shared.
    """

    layout: Layout
    fds: tuple[int, ...] = ()
    probing: Probing | None = None
    marking: Marking | None = None
    keep: tuple[Any, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class _Piece:
    """One run of one view, before joining."""

    handle: int
    offset: int
    stride: int
    run: int
    blocks: int
    name: str


def from_views(
    views: Sequence[View],
    handles: Sequence[Handle],
    fds: Sequence[int] = (),
    *,
    block_tokens: int,
    format: str = "",
    null_block: bool = False,
    replicas: int = 1,
    block_bytes: int = 0,
    probing: Probing | None = None,
    marking: Marking | None = None,
    keep: tuple[Any, ...] = (),
) -> KVMemory:
    """The memory of one KV group made of these views.

    format: names what the bytes mean beyond their order (dtype, head layout, ...).
    null_block: block 0 is never stored.  block_bytes: what the engine says a block has on this rank; 0: it does
    not say.
    Errors: ConfigError(layout.geometry) naming the numbers if the views cannot be described, or hold another
    number of bytes than the engine says.
    """
    regions, order = regions_of(views)
    group = Group(regions=regions, block_tokens=block_tokens, replicas=replicas, block_bytes=block_bytes)
    layout = Layout(handles=tuple(handles), groups=(group,), format=f"{format}|{order}", null_block=null_block)
    try:
        layout.check()
    except RemoteProtocolError as error:  # as a worker would say it; here it is our own reading that is wrong
        raise ConfigError(error.code, error.text, "the engine lays its KV out in a way that was misread") from None
    return KVMemory(layout, tuple(fds), probing, marking, keep)


def regions_of(views: Sequence[View]) -> tuple[tuple[Region, ...], str]:
    """The regions of a group of views, and a short name of what they hold in which order."""
    pieces = _without_repeats(piece for index, view in enumerate(views) for piece in _pieces(index, view))
    if not pieces:
        raise ConfigError("layout.geometry", "no view has any block", "register at least one KV tensor")
    regions: list[Region] = []
    for piece in pieces:
        last = regions[-1] if regions else None
        if last and _follows(last, piece):
            regions[-1] = last.model_copy(update={"run": last.run + piece.run})
        else:
            region = (piece.handle, piece.offset, piece.stride, piece.run, piece.blocks)
            regions.append(Region(**dict(zip(Region.model_fields, region, strict=True))))
    if len(regions) > limits.MAX_REGIONS:
        raise ConfigError(
            "layout.geometry",
            f"a block lies in {len(regions)} separate pieces; the limit is {limits.MAX_REGIONS}",
            "choose a KV layout that keeps a block's heads or layers together",
        )
    names = "\n".join(piece.name for piece in pieces)
    return tuple(regions), hashlib.sha256(names.encode()).hexdigest()[:16]


def _pieces(index: int, view: View) -> Iterable[_Piece]:
    """The contiguous runs of one view's block 0, each named by view and position."""
    if len(view.sizes) != len(view.strides) or not 0 <= view.block_dim < len(view.sizes):
        raise ConfigError(
            "layout.geometry",
            f"view {index} has {len(view.sizes)} sizes, {len(view.strides)} strides, block dimension {view.block_dim}",
        )
    if min(view.strides) < 0 or view.offset < 0:
        raise ConfigError("layout.geometry", f"view {index} has a negative stride or offset: {view.strides}")
    if min(view.sizes) == 0:
        return
    blocks, block_stride = view.sizes[view.block_dim], view.strides[view.block_dim] * view.itemsize
    # (bytes, size, dimension), contiguous first; equal strides in dimension order, so that names are stable.
    dims = sorted(
        (stride * view.itemsize, size, dim)
        for dim, (size, stride) in enumerate(zip(view.sizes, view.strides, strict=True))
        if dim != view.block_dim and size > 1
    )
    run, inner = view.itemsize, []
    while dims and dims[0][0] == run:
        _, size, dim = dims.pop(0)
        run *= size
        inner.append(f"{dim}x{size}")
    if run > block_stride and blocks > 1:
        raise ConfigError(
            "layout.geometry",
            f"view {index}: one block's run of {run} bytes passes the block stride of {block_stride} bytes",
            "name the dimension that counts blocks (block_dim)",
        )
    count = int(np.prod([size for _, size, _ in dims], dtype=np.int64)) if dims else 1
    if count > limits.MAX_REGIONS:
        raise ConfigError(
            "layout.geometry", f"view {index}: a block lies in {count} pieces; the limit is {limits.MAX_REGIONS}"
        )
    for position in itertools.product(*(range(size) for _, size, _ in dims)):
        offset = view.offset + sum(at * stride for at, (stride, _, _) in zip(position, dims, strict=True))
        where = ",".join(f"{dim}={at}" for at, (_, _, dim) in zip(position, dims, strict=True))
        name = f"{index}[{where}]{'*'.join(inner)}*{view.itemsize}"
        yield _Piece(view.handle, offset, max(block_stride, run), run, blocks, name)


def _without_repeats(pieces: Iterable[_Piece]) -> list[_Piece]:
    """In order of place; layers that share their KV are one piece, named by the first view."""
    found: dict[tuple[int, int, int, int, int], _Piece] = {}
    for piece in pieces:
        found.setdefault((piece.handle, piece.offset, piece.stride, piece.run, piece.blocks), piece)
    return sorted(found.values(), key=lambda piece: (piece.handle, piece.offset))


def _follows(region: Region, piece: _Piece) -> bool:
    same_walk = (region.handle, region.stride, region.blocks) == (piece.handle, piece.stride, piece.blocks)
    return same_walk and region.offset + region.run == piece.offset and region.run + piece.run <= region.stride


def shared_array(shape: Sequence[int], dtype: npt.DTypeLike) -> tuple[npt.NDArray[Any], int]:
    """A zeroed array over memory that another process can map, and its descriptor.

    A memfd: no name, no limit of /dev/shm, gone with its last holder. The caller owns the descriptor.
    """
    nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    fd = os.memfd_create("kvferry-kv", os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    return np.frombuffer(mmap.mmap(fd, nbytes), dtype=dtype).reshape(tuple(shape)), fd


def from_arrays(
    arrays: Mapping[str, npt.NDArray[Any]],
    base: npt.NDArray[Any],
    fd: int,
    *,
    block_tokens: int,
    block_dim: int = 0,
    format: str = "",
    null_block: bool = False,
) -> KVMemory:
    """The memory of numpy arrays that are views into `base`, which `shared_array` made with `fd`."""
    start = base.__array_interface__["data"][0]
    views = [
        View(
            handle=0,
            offset=array.__array_interface__["data"][0] - start,
            sizes=array.shape,
            strides=tuple(stride // array.itemsize for stride in array.strides),
            itemsize=array.itemsize,
            block_dim=block_dim,
        )
        for array in arrays.values()
    ]
    dtype = next(iter(arrays.values())).dtype.str
    handle = Handle(kind="shm_fd", nbytes=base.nbytes)
    return from_views(
        views,
        [handle],
        [fd],
        block_tokens=block_tokens,
        format=format or dtype,
        null_block=null_block,
        keep=(base,),
    )
