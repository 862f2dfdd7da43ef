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
                end = region.offset + (region.blocks - 1) * region.stride + region.run
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
    """Refuse regions of one group that share a byte.

    Regions interleave (equal strides, different phases) or follow each other; anything else is refused
    rather than reasoned about.
    """
    ordered = sorted(regions, key=lambda r: (r.offset, r.run))
    for one, two in itertools.pairwise(ordered):
        one_end = one.offset + (one.blocks - 1) * one.stride + one.run
        if one_end <= two.offset:
            continue
        if one.offset + one.run > two.offset:
            raise RemoteProtocolError(
                "layout.geometry", f"group {group}: regions at bytes {one.offset} and {two.offset} overlap"
            )
        if one.stride != two.stride:
            raise RemoteProtocolError(
                "layout.geometry",
                f"group {group}: interleaved regions have strides {one.stride} and {two.stride}",
            )
    # All regions that interleave with the first one must end before its next block begins.
    for one in ordered:
        inside = [two for two in ordered if one.offset < two.offset < one.offset + (one.blocks - 1) * one.stride]
        for two in inside:
            if (two.offset - one.offset) % one.stride + two.run > one.stride:
                raise RemoteProtocolError(
                    "layout.geometry",
                    f"group {group}: the region at byte {two.offset} runs into the next block of the region"
                    f" at byte {one.offset}",
                )
            if (two.offset - one.offset) % one.stride < one.run:
                raise RemoteProtocolError(
                    "layout.geometry", f"group {group}: regions at bytes {one.offset} and {two.offset} overlap"
                )


def slot_bytes(payload_bytes: int) -> int:
    """Bytes of a slot that holds `payload_bytes`: one header page and whole payload pages."""
    page = limits.PAGE_BYTES
    return page + -(-payload_bytes // page) * page
