"""How KV memory is described on the wire: bytes only, no dtype, no device types.

    Handle   one piece of memory of the engine that a worker can map
    Region   block b of it lies at [offset + b * stride, + run) of its handle
    Group    the regions that make up one block of one KV group; a slot's payload is their runs, in order
    Layout   all handles and groups of one rank, with the digest that names the payload's byte format

The digest covers what a reader of a slot must know: per group the runs in order, the tokens of a block,
the kind, window and replicas, and `format` (the inner order of dimensions, as the exporter names it).
Handles, offsets, strides and block counts are no part of it: engines that share a pool may differ there.
"""

import hashlib
import itertools
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvferry.proto import limits
from kvferry.proto.errors import RemoteProtocolError

U64Field = Annotated[int, Field(ge=0, lt=1 << 64)]
U32Field = Annotated[int, Field(ge=0, lt=1 << 32)]
HandleKind = Literal["shm_fd", "cuda_ipc", "cuda_vmm_fd"]


class Wire(BaseModel):
    """Base of all validated wire structures: frozen, no unknown fields, no coercion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Handle(Wire):
    """One mappable piece of the engine's memory. Its descriptor, if any, travels beside the message."""

    kind: HandleKind
    nbytes: U64Field
    base_offset: U64Field = 0  # of the engine's byte 0 within the mapped object
    device: Annotated[str, Field(max_length=limits.MAX_TEXT)] = ""  # GPU UUID; "" on CPU
    blob: Annotated[bytes, Field(max_length=64)] = b""
    pid: U64Field = 0
    pid_ns: U64Field = 0


class Region(Wire):
    """Where one piece of every block lies: bytes [offset + b * stride, + run) for b in 0..blocks-1."""

    handle: Annotated[int, Field(ge=0, lt=limits.MAX_HANDLES)]
    offset: U64Field
    stride: U64Field
    run: Annotated[int, Field(gt=0, lt=1 << 40)]
    blocks: Annotated[int, Field(gt=0, le=limits.MAX_BLOCKS)]


class Group(Wire):
    """One KV group: every block of it is the runs of all its regions."""

    regions: Annotated[tuple[Region, ...], Field(min_length=1, max_length=limits.MAX_REGIONS, strict=False)]
    block_tokens: Annotated[int, Field(gt=0, le=1 << 20)]
    kind: Literal["full", "window", "state"] = "full"
    window_tokens: U32Field = 0
    replicas: Annotated[int, Field(ge=1, le=limits.MAX_RANKS)] = 1
    # What the engine itself says one block has on this rank; 0: it does not say. A layout that was read
    # wrong leaves bytes out, and nothing else would notice.
    block_bytes: U64Field = 0

    @property
    def payload_bytes(self) -> int:
        """Bytes of one block on this rank."""
        return sum(region.run for region in self.regions)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: a header page and the payload, in whole pages."""
        return slot_bytes(self.payload_bytes)

    @property
    def num_blocks(self) -> int:
        """Blocks every region has; the smallest where they differ."""
        return min(region.blocks for region in self.regions)


class Layout(Wire):
    """One rank's KV memory."""

    handles: Annotated[tuple[Handle, ...], Field(min_length=1, max_length=limits.MAX_HANDLES, strict=False)]
    groups: Annotated[tuple[Group, ...], Field(min_length=1, max_length=limits.MAX_GROUPS, strict=False)]
    format: Annotated[str, Field(max_length=limits.MAX_TEXT)] = ""
    null_block: bool = False  # block 0 is never stored

    @property
    def digest(self) -> str:
        """Hex digest of the payload's byte format."""
        lines = [self.format]
        for group in self.groups:
            runs = ",".join(str(region.run) for region in group.regions)
            lines.append(f"{group.kind}:{group.block_tokens}:{group.window_tokens}:{group.replicas}:{runs}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]

    def check(self) -> None:
        """RemoteProtocolError(layout.geometry) naming group, region and numbers if bytes do not fit."""
        for g, group in enumerate(self.groups):
            if group.block_bytes and group.block_bytes != group.payload_bytes:
                raise RemoteProtocolError(
                    "layout.geometry",
                    f"group {g}: its regions hold {group.payload_bytes} bytes of a block, the engine says"
                    f" {group.block_bytes}",
                )
            spans: dict[int, list[Region]] = {}
            for r, region in enumerate(group.regions):
                where = f"group {g} region {r}"
                if region.handle >= len(self.handles):
                    raise RemoteProtocolError(
                        "layout.geometry", f"{where} names handle {region.handle} of {len(self.handles)}"
                    )
                if region.run > region.stride and region.blocks > 1:
                    raise RemoteProtocolError(
                        "layout.geometry", f"{where}: run {region.run} bytes passes the stride of {region.stride}"
                    )
                end = _end(region)
                have = self.handles[region.handle].nbytes
                if end > have:
                    raise RemoteProtocolError(
                        "layout.geometry",
                        f"{where}: {region.blocks} blocks end at byte {end} of memory of {have} bytes",
                    )
                spans.setdefault(region.handle, []).append(region)
            for regions in spans.values():
                _check_apart(g, regions)


def _check_apart(group: int, regions: list[Region]) -> None:
    """Refuse regions of one group and handle that share a byte. O(n log n).

    Regions follow each other, or interleave: equal strides, different phases. Anything else is refused
    rather than reasoned about.

        follow       AA.AA.AA.BB.BB.BB.        interleave   AABB.AABB.AABB.
    """
    ordered = sorted(regions, key=lambda r: r.offset)
    while ordered:
        # A cluster: regions whose extents are chained together by overlap.
        cluster, end = [ordered[0]], _end(ordered[0])
        for region in itertools.islice(ordered, 1, None):
            if region.offset >= end:
                break
            cluster.append(region)
            end = max(end, _end(region))
        del ordered[: len(cluster)]
        if len(cluster) > 1:
            _check_interleaved(group, cluster)


def _check_interleaved(group: int, cluster: list[Region]) -> None:
    # A region of one block fits any stride.
    strides = sorted({region.stride for region in cluster if region.blocks > 1})
    if len(strides) > 1:
        raise RemoteProtocolError(
            "layout.geometry", f"group {group}: interleaved regions have strides {strides[0]} and {strides[-1]}"
        )
    # Where each region's run begins within a stride, counted from the first region's; and once more the
    # first one a stride later, which the last run must not pass.
    first = cluster[0]
    stride = strides[0] if strides else _end(max(cluster, key=_end)) - first.offset
    phases = sorted(((region.offset - first.offset) % stride, region.run, region.offset) for region in cluster)
    for (at, run, offset), (next_at, _, next_offset) in itertools.pairwise([*phases, (stride, 0, first.offset)]):
        if at + run > next_at:
            raise RemoteProtocolError(
                "layout.geometry", f"group {group}: the regions at bytes {offset} and {next_offset} overlap"
            )


def _end(region: Region) -> int:
    return region.offset + (region.blocks - 1) * region.stride + region.run


def slot_bytes(payload_bytes: int) -> int:
    """Bytes of a slot that holds `payload_bytes`: one header page and whole payload pages."""
    page = limits.PAGE_BYTES
    return page + -(-payload_bytes // page) * page
