"""The daemon's plan, taken apart into jobs and checked against this rank's memory. Nothing here has state."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvferry.gpu_worker.api import U32, U64, WorkerSettings
from kvferry.proto.columns import spans, u8, u32, u64
from kvferry.proto.hot import Plan
from kvferry.proto.outcome import Kind


@dataclass(frozen=True, slots=True, eq=False)
class PlannedJob:
    """One job of a plan: block i of it goes to or comes from slot i."""

    ticket: int
    job: int
    kind: Kind
    group: int
    slots: U32  # (n,)
    generations: U64  # (n,)
    blocks: U32  # (n,)
    is_known_kind: bool = True


def jobs_of(message: Plan) -> Iterator[PlannedJob]:
    """The jobs of a plan, in order; its columns are viewed, not copied."""
    slots, generations, blocks = u32(message.slots), u64(message.generations), u32(message.blocks)
    rows = zip(
        u64(message.tickets).tolist(),
        u64(message.jobs).tolist(),
        u8(message.kinds).tolist(),
        u8(message.groups).tolist(),
        spans(message.counts),
        strict=True,
    )
    for ticket, job, kind, group, (start, stop) in rows:
        is_known = kind in (Kind.STORE, Kind.LOAD)
        yield PlannedJob(
            ticket,
            job,
            Kind(kind) if is_known else Kind.LOAD,
            group,
            slots[start:stop],
            generations[start:stop],
            blocks[start:stop],
            is_known,
        )


def what_is_wrong(job: PlannedJob, settings: WorkerSettings) -> str:
    """Why this job may not touch memory; "" if it may.

    A destination named twice is refused too: two copies into one place have no order.
    """
    if not job.is_known_kind:
        return "a kind that is neither store nor load"
    if job.group >= len(settings.payload_bytes):
        return f"group {job.group} of {len(settings.payload_bytes)}"
    if not len(job.blocks):
        return ""
    if int(job.blocks.max()) >= settings.num_blocks:
        return f"block {int(job.blocks.max())} of {settings.num_blocks}"
    if int(job.slots.max()) >= settings.num_slots:
        return f"slot {int(job.slots.max())} of {settings.num_slots}"
    targets = job.blocks if job.kind is Kind.LOAD else job.slots
    if has_repeats(targets):
        return "a destination named twice"
    return ""


def has_repeats(numbers: U32) -> bool:
    """Whether a number stands in the column twice."""
    # np.unique would import numpy.ma at its first call: 50 ms in the first load.
    ordered = np.sort(numbers)
    return bool((ordered[1:] == ordered[:-1]).any())
