"""Descriptors to strided pieces: what numpy copies in one call with the interpreter's lock released.

A block of L layers is L descriptors that are one fixed distance apart in the engine's memory and side by side in
its slot. As one strided copy it runs at memcpy's speed; as L calls of memmove it takes twice as long at
16 KiB a layer and four times at 4 KiB. Pure arithmetic; touches no byte.
"""

from typing import Final, NamedTuple

import numpy as np

from kvferry.gpu_worker.api import U64
from kvferry.gpu_worker.devices.base import CopyPlan

# A thread works off this much before it looks for something more urgent: about 0.1 ms.
CHUNK_BYTES: Final = 1 << 20


class Piece(NamedTuple):
    """`rows` runs of `run` bytes each; row i lies i strides behind the first."""

    src: int
    dst: int
    rows: int
    run: int
    src_stride: int
    dst_stride: int


def pieces_of(plan: CopyPlan) -> list[Piece]:
    """The plan's descriptors in order, equal steps taken together, each piece of at most CHUNK_BYTES."""
    stretches = _progressions(plan.src, plan.dst, plan.size)
    starts = np.array([start for start, _ in stretches])
    seconds = np.minimum(starts + 1, len(plan.size) - 1)  # the second of a stretch; meaningless where it has one
    columns = (plan.src, plan.dst, plan.size)
    rows = zip(stretches, *(c[starts].tolist() for c in columns), *(c[seconds].tolist() for c in columns), strict=True)
    pieces: list[Piece] = []
    for (start, stop), src, dst, run, next_src, next_dst, _ in rows:
        count = stop - start
        src_stride, dst_stride = (next_src - src, next_dst - dst) if count > 1 else (run, run)
        if run > CHUNK_BYTES:
            for row in range(count):
                pieces += _cut_run(src + row * src_stride, dst + row * dst_stride, run)
        elif count * run <= CHUNK_BYTES:
            pieces.append(Piece(src, dst, count, run, src_stride, dst_stride))
        else:
            step = CHUNK_BYTES // run
            pieces += [
                Piece(
                    src + row * src_stride,
                    dst + row * dst_stride,
                    min(step, count - row),
                    run,
                    src_stride,
                    dst_stride,
                )
                for row in range(0, count, step)
            ]
    return pieces


def chunks_of(pieces: list[Piece]) -> list[list[Piece]]:
    """The pieces in order, in handfuls of about CHUNK_BYTES."""
    chunks: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        nbytes = piece.rows * piece.run
        if nbytes > room:
            chunks.append([])
            room = CHUNK_BYTES
        chunks[-1].append(piece)
        room -= nbytes
    return chunks


def _cut_run(src: int, dst: int, run: int) -> list[Piece]:
    starts = range(0, run, CHUNK_BYTES)
    sizes = [min(CHUNK_BYTES, run - at) for at in starts]
    return [Piece(src + at, dst + at, 1, size, size, size) for at, size in zip(starts, sizes, strict=True)]


def _progressions(src: U64, dst: U64, size: U64) -> list[tuple[int, int]]:
    """(start, stop) of longest stretches of equal size and equal, forward, non-overlapping steps."""
    if len(size) == 1:
        return [(0, 1)]
    # Step i leads from descriptor i to the next. It is usable if it goes forward by at least a run on both sides.
    src_step = (src[1:] - src[:-1]).astype(np.int64)
    dst_step = (dst[1:] - dst[:-1]).astype(np.int64)
    run = size[:-1].astype(np.int64)
    usable = (size[1:] == size[:-1]) & (src_step >= run) & (dst_step >= run)
    differs = (src_step[1:] != src_step[:-1]) | (dst_step[1:] != dst_step[:-1]) | (usable[1:] != usable[:-1])
    # Equal steps stand together; one pass over these groups, and not over descriptors.
    firsts = [0, *(np.flatnonzero(differs) + 1).tolist()]
    lasts = [*firsts[1:], len(usable)]
    stretches: list[tuple[int, int]] = []
    start = 0
    for end, is_usable in zip(lasts, usable[firsts].tolist(), strict=True):
        if end <= start:
            continue  # its one step was the way to the present stretch
        if is_usable:
            stretches.append((start, end + 1))
            start = end + 1
        else:
            stretches += [(at, at + 1) for at in range(start, end)]
            start = end
    if start < len(size):
        stretches.append((start, len(size)))
    return stretches
