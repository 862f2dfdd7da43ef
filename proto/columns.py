"""Packed little-endian columns: how lists of numbers travel.

A column is `bytes`; `u64(column)` and its siblings view it as a read-only numpy array without copying.
Decoding a step this way costs 2-3 us where lists of ints cost 75-90 us.
"""

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

U8: TypeAlias = npt.NDArray[np.uint8]
U32: TypeAlias = npt.NDArray[np.uint32]
U64: TypeAlias = npt.NDArray[np.uint64]
Ints: TypeAlias = Sequence[int] | npt.NDArray[np.integer]


def u8(column: bytes) -> U8:
    """View a column of unsigned bytes; shape (n,)."""
    return np.frombuffer(column, dtype="<u1")


def u32(column: bytes) -> U32:
    """View a column of u32; shape (n,)."""
    return np.frombuffer(column, dtype="<u4")


def u64(column: bytes) -> U64:
    """View a column of u64; shape (n,)."""
    return np.frombuffer(column, dtype="<u8")


def pack_u8(values: Ints) -> bytes:
    """Column of unsigned bytes; OverflowError if a value does not fit."""
    return _pack(values, "B")


def pack_u32(values: Ints) -> bytes:
    """Column of u32; OverflowError if a value does not fit."""
    return _pack(values, "I")


def pack_u64(values: Ints) -> bytes:
    """Column of u64; OverflowError if a value does not fit."""
    return _pack(values, "Q")


def _pack(values: Ints, code: str) -> bytes:
    column = array(code)
    if isinstance(values, np.ndarray):
        # numpy casts by wrapping: a block id of -1 would travel as 4294967295.
        if values.dtype.kind not in "iu":
            raise TypeError(f"a column holds integers, not {values.dtype}")
        if values.size and not 0 <= int(values.min()) <= int(values.max()) < 1 << 8 * column.itemsize:
            raise OverflowError(f"{values.min()}..{values.max()} does not fit u{8 * column.itemsize}")
        return values.astype(f"<u{column.itemsize}").tobytes()
    column.extend(values)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def split_keys(keys: bytes, key_bytes: int) -> list[bytes]:
    """The n keys of a key column, in order."""
    return [keys[at : at + key_bytes] for at in range(0, len(keys), key_bytes)]


def join_keys(keys: Iterable[bytes]) -> bytes:
    """The key column of equally wide keys."""
    return b"".join(keys)


def sum_counts(counts: bytes) -> int:
    """The sum of a column of u32; never wraps."""
    if not counts:
        return 0
    # Below some hundred items Python's own sum is faster than numpy's calls.
    return sum(memoryview(counts).cast("I")) if len(counts) <= 1024 else int(u32(counts).sum(dtype=np.uint64))


def spans(counts: bytes) -> Iterator[tuple[int, int]]:
    """(start, stop) of each job within a flattened column, from its u32 counts."""
    start = 0
    for count in u32(counts).tolist():
        yield start, start + count
        start += count
