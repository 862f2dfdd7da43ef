"""From blocks and slots to copy descriptors. Pure arithmetic on arrays; touches no byte.

    engine   region r of block b:  [mapping + offset_r + b * stride_r, + run_r)
    pool     slot s:               [header page | run_0 | run_1 | ... | rest of the last page]
                                    never touched  └── payload: slots_base + s * slot_bytes + 4096

Neighbours that touch on both sides become one descriptor; batches keep to the limits of
`devices.base`. One block's bytes may span two batches: the caller counts batches, not blocks.
"""

from collections.abc import Sequence

import numpy as np

from kvferry.gpu_worker.api import U32, U64
from kvferry.gpu_worker.devices.base import MAX_DESCRIPTORS, MAX_PLAN_BYTES, CopyPlan, PlanError
from kvferry.gpu_worker.plans import has_repeats
from kvferry.proto.layout import Group
from kvferry.proto.limits import PAGE_BYTES
from kvferry.proto.outcome import Kind


class Planner:
    """Plans the copies of one KV group between one rank's memory and its pool file.

    `mapping_bases[h]` is the address of byte 0 of handle h, `slots_base` that of slot 0's header page.
    PlanError if the payload does not fit a slot or a region names no mapping.
    """

    def __init__(
        self, group: Group, mapping_bases: Sequence[int], slots_base: int, slot_bytes: int, num_slots: int
    ) -> None:
        if group.payload_bytes > slot_bytes - PAGE_BYTES:
            raise PlanError(
                "plan.slot", f"a block of {group.payload_bytes} bytes does not fit a slot of {slot_bytes} bytes"
            )
        if any(region.handle >= len(mapping_bases) for region in group.regions):
            raise PlanError("plan.handle", f"a region names a handle beyond the {len(mapping_bases)} mapped ones")
        self._num_blocks = group.num_blocks
        self._num_slots = num_slots
        self._slot_bytes = np.uint64(slot_bytes)
        starts = [mapping_bases[region.handle] + region.offset for region in group.regions]
        runs = [region.run for region in group.regions]
        self._starts: U64 = np.array(starts, dtype=np.uint64)
        self._strides: U64 = np.array([region.stride for region in group.regions], dtype=np.uint64)
        self._runs: U64 = np.array(runs, dtype=np.uint64)
        # Where each region's run begins, counted from slot 0's header page.
        self._payload: U64 = np.cumsum([slots_base + PAGE_BYTES, *runs[:-1]], dtype=np.uint64)

    def plan(self, blocks: U32, slots: U32, kind: Kind) -> list[CopyPlan]:
        """The batches that copy block i to (STORE) or from (LOAD) slot i, in order.

        Shapes: blocks, slots (n,) -> batches whose descriptors add up to n * payload bytes.
        Errors: PlanError on a block or slot outside its memory, or a destination named twice.
        """
        self._check(blocks, slots, kind)
        if not len(blocks):
            return []
        engine = (self._starts + blocks.astype(np.uint64)[:, None] * self._strides).ravel()
        pool = (self._payload + slots.astype(np.uint64)[:, None] * self._slot_bytes).ravel()
        size = np.tile(self._runs, len(blocks))
        src, dst = (engine, pool) if kind is Kind.STORE else (pool, engine)
        return split(*coalesce(src, dst, size))

    def _check(self, blocks: U32, slots: U32, kind: Kind) -> None:
        if len(blocks) != len(slots):
            raise PlanError("plan.lengths", f"{len(blocks)} blocks for {len(slots)} slots")
        if not len(blocks):
            return
        if int(blocks.max()) >= self._num_blocks:
            raise PlanError("plan.block", f"block {int(blocks.max())} of {self._num_blocks}")
        if int(slots.max()) >= self._num_slots:
            raise PlanError("plan.slot", f"slot {int(slots.max())} of {self._num_slots}")
        targets = slots if kind is Kind.STORE else blocks
        if has_repeats(targets):
            raise PlanError("plan.twice", "a destination is named twice: two copies into one place have no order")


def coalesce(src: U64, dst: U64, size: U64) -> tuple[U64, U64, U64]:
    """Join each descriptor with the one before it if they touch on both sides; order kept."""
    if len(size) < 2:
        return src, dst, size
    touches = (src[:-1] + size[:-1] == src[1:]) & (dst[:-1] + size[:-1] == dst[1:])
    if not touches.any():
        return src, dst, size
    heads = np.flatnonzero(np.concatenate(([True], ~touches)))
    return src[heads], dst[heads], np.add.reduceat(size, heads)


def split(src: U64, dst: U64, size: U64) -> list[CopyPlan]:
    """Cut descriptors into batches within the limits; one that is larger than a batch goes alone."""
    ends = np.cumsum(size, dtype=np.uint64)
    batches: list[CopyPlan] = []
    start = 0
    while start < len(size):
        before = int(ends[start - 1]) if start else 0
        fits = int(np.searchsorted(ends, before + MAX_PLAN_BYTES, side="right"))
        stop = max(start + 1, min(fits, start + MAX_DESCRIPTORS))
        batches.append(CopyPlan(src[start:stop], dst[start:stop], size[start:stop]))
        start = stop
    return batches
