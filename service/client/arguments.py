"""What an engine passes in, checked: the one place where the caller's own mistakes are told."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from operator import index
from typing import Final

from kvferry.client.registration import ClientSettings
from kvferry.client.types import ArgumentError
from kvferry.proto import limits

MAX_BLOCK_TOKENS: Final = 1 << 20  # this and the next one: of the fields of `Register`
MAX_SALT_BYTES: Final = 256


def check_settings(settings: ClientSettings) -> None:
    """ArgumentError on what no daemon could take: told where it was written, not as a refusal later."""
    check_engine(settings.engine_id, settings.world_size, settings.facts)
    check_number("key_bytes", settings.key_bytes, limits.MIN_KEY_BYTES, limits.MAX_KEY_BYTES)
    check_number("num_blocks", settings.num_blocks, 1, limits.MAX_BLOCKS)
    check_number("block_tokens", settings.block_tokens, 1, MAX_BLOCK_TOKENS)
    check_salt(settings.salt)


def check_rank(engine_id: str, rank: int, world_size: int, facts: Mapping[str, str]) -> None:
    """ArgumentError on what no worker could take."""
    check_engine(engine_id, world_size, facts)
    check_number("rank", rank, 0, world_size - 1)


def check_engine(engine_id: str, world_size: int, facts: Mapping[str, str]) -> None:
    """What both halves of an engine say of it."""
    if not isinstance(engine_id, str) or not engine_id:
        raise ArgumentError(f"engine_id is {engine_id!r}; it must be a text that is not empty")
    _check_text("engine_id", engine_id)
    check_number("world_size", world_size, 1, limits.MAX_RANKS)
    if len(facts) > limits.MAX_FACTS:
        raise ArgumentError(f"there are {len(facts)} facts; at most {limits.MAX_FACTS} are allowed")
    for name, value in facts.items():
        _check_text("the name of a fact", name)
        _check_text(f"fact {name[:80]!r}", value)


def check_salt(salt: bytes) -> None:
    """ArgumentError if the salt is too long, or no bytes."""
    if not isinstance(salt, bytes):
        raise ArgumentError(f"salt is a {type(salt).__name__}; it must be bytes")
    if len(salt) > MAX_SALT_BYTES:
        raise ArgumentError(f"salt has {len(salt)} bytes; at most {MAX_SALT_BYTES} are allowed")


def check_number(name: str, value: int, low: int, high: int) -> None:
    """ArgumentError unless it is an int within low..high."""
    if not isinstance(value, int):
        raise ArgumentError(f"{name} is a {type(value).__name__}; it must be an int")
    if not low <= value <= high:
        raise ArgumentError(f"{name} = {value} is outside {low}..{high}")


def check_request(request: str) -> None:
    """ArgumentError unless it is text: requests are found by it."""
    if not isinstance(request, str):
        raise ArgumentError(f"request is a {type(request).__name__}; it must be text")


def check_ticket(ticket: int) -> None:
    """ArgumentError unless it is an int; whose, and whether it is still open, is no mistake of the caller's."""
    if not isinstance(ticket, int):
        raise ArgumentError(f"ticket is a {type(ticket).__name__}; it must be the int that load or store gave")


def key_column(keys: Sequence[bytes] | bytes, key_bytes: int, group: int) -> bytes:
    """Keys as one column; ArgumentError if one is no bytes, has another width, or the group cannot exist."""
    check_number("group", group, 0, limits.MAX_GROUPS - 1)
    if isinstance(keys, bytes | bytearray | memoryview):
        column = bytes(keys)
        if len(column) % key_bytes:
            raise ArgumentError(f"keys have {len(column)} bytes, no multiple of key_bytes = {key_bytes}")
        return column
    if not isinstance(keys, Iterable):
        raise ArgumentError(f"keys are a {type(keys).__name__}; they must be bytes in a sequence")
    for key in keys:
        if not isinstance(key, bytes):
            raise ArgumentError(f"a key is a {type(key).__name__}; keys must be bytes, {key_bytes} each")
        if len(key) != key_bytes:
            raise ArgumentError(f"a key has {len(key)} bytes; this client was made for key_bytes = {key_bytes}")
    return b"".join(keys)


def block_ids(blocks: Iterable[int], most: int | None = None) -> tuple[int, ...]:
    """The first `most` blocks as ints; ArgumentError if one is none."""
    try:
        return tuple(map(index, islice(blocks, most)))
    except TypeError as error:
        raise ArgumentError(f"blocks must be ints in a sequence: {error}") from None


def pairs(
    keys: Sequence[bytes] | bytes, blocks: Sequence[int], key_bytes: int, num_blocks: int, group: int
) -> tuple[bytes, tuple[int, ...]]:
    """(key column, block ids) of the common part of both; ArgumentError on a block outside 0..num_blocks-1.

    Unequal and empty lists are data: a request may have keys for all its blocks and no block yet.
    """
    column = key_column(keys, key_bytes, group)
    ids = block_ids(blocks, len(column) // key_bytes)
    if ids and not (min(ids) >= 0 and max(ids) < num_blocks):
        raise ArgumentError(f"block ids {min(ids)}..{max(ids)} are outside 0..{num_blocks - 1}")
    return column[: len(ids) * key_bytes], ids


def targets(
    keys: Sequence[bytes] | bytes, blocks: Sequence[int], key_bytes: int, num_blocks: int, group: int
) -> tuple[bytes, tuple[int, ...]]:
    """As `pairs`, for blocks that are written; ArgumentError if one would be written twice."""
    column, ids = pairs(keys, blocks, key_bytes, num_blocks, group)
    if len(set(ids)) != len(ids):
        twice = next(block for at, block in enumerate(ids) if block in ids[:at])
        raise ArgumentError(f"block {twice} is named twice: {len(ids)} keys for {len(set(ids))} blocks")
    return column, ids


def _check_text(name: str, value: str) -> None:
    if not isinstance(value, str):
        raise ArgumentError(f"{name} is a {type(value).__name__}; it must be text")
    if len(value) > limits.MAX_TEXT:
        raise ArgumentError(f"{name} has {len(value)} characters; at most {limits.MAX_TEXT} are allowed")
