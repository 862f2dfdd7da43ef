"""What an engine passes in, checked: the one place where the caller's own mistakes are told."""

from collections.abc import Sequence

from kvferry.client.types import ArgumentError
from kvferry.proto import limits


def key_column(keys: Sequence[bytes] | bytes, key_bytes: int, group: int) -> bytes:
    """Keys as one column; ArgumentError if a key has another width or the group cannot exist."""
    if not 0 <= group < limits.MAX_GROUPS:
        raise ArgumentError(f"group {group} is outside 0..{limits.MAX_GROUPS - 1}")
    if isinstance(keys, bytes | bytearray | memoryview):
        column = bytes(keys)
        if len(column) % key_bytes:
            raise ArgumentError(f"keys have {len(column)} bytes, no multiple of key_bytes = {key_bytes}")
        return column
    for key in keys:
        if len(key) != key_bytes:
            raise ArgumentError(f"a key has {len(key)} bytes; this client was made for key_bytes = {key_bytes}")
    return b"".join(keys)


def pairs(
    keys: Sequence[bytes] | bytes, blocks: Sequence[int], key_bytes: int, num_blocks: int, group: int
) -> tuple[bytes, tuple[int, ...]]:
    """(key column, block ids) of the common part of both; ArgumentError on a block outside 0..num_blocks-1.

    Unequal and empty lists are data: a request may have keys for all its blocks and no block yet.
    """
    column = key_column(keys, key_bytes, group)
    ids = tuple(int(block) for block in blocks[: len(column) // key_bytes])
    if ids and not (min(ids) >= 0 and max(ids) < num_blocks):
        raise ArgumentError(f"block ids {min(ids)}..{max(ids)} are outside 0..{num_blocks - 1}")
    return column[: len(ids) * key_bytes], ids
