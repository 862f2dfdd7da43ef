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
    pieces: list[Piece] = []
    for start, stop in _progressions(plan.src, plan.dst, plan.size):
        src, dst, run = int(plan.src[start]), int(plan.dst[start]), int(plan.size[start])
        rows = stop - start
        src_stride = int(plan.src[start + 1]) - src if rows > 1 else run
        dst_stride = int(plan.dst[start + 1]) - dst if rows > 1 else run
        if run > CHUNK_BYTES:
            # A run cut into chunks is a progression again, but for its last chunk.
            for row in range(rows):
                pieces += _cut_run(src + row * src_stride, dst + row * dst_stride, run)
            continue
        step = max(1, CHUNK_BYTES // run)
        for row in range(0, rows, step):
            pieces.append(
                Piece(
                    src + row * src_stride,
                    dst + row * dst_stride,
                    min(step, rows - row),
                    run,
                    src_stride,
                    dst_stride,
                )
            )
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
    # A step from i to i+1 is usable if it goes forward by at least a run on both sides.
    src_step = (src[1:] - src[:-1]).astype(np.int64)
    dst_step = (dst[1:] - dst[:-1]).astype(np.int64)
    run = size[:-1].astype(np.int64)
    usable = ((size[1:] == size[:-1]) & (src_step >= run) & (dst_step >= run)).tolist()
    same = ((src_step[1:] == src_step[:-1]) & (dst_step[1:] == dst_step[:-1])).tolist()
    stretches: list[tuple[int, int]] = []
    start = 0
    for at in range(len(usable)):
        # Step `at` leads from descriptor `at` to the next; the stretch so far is [start, at].
        if usable[at] and (at == start or same[at - 1]):
            continue
        stretches.append((start, at + 1))
        start = at + 1
    stretches.append((start, len(size)))
    return stretches
