"""The first page of the slot table's file: what the records behind it were made for, and the namespaces' epochs.

    byte 0                     2048                     4096
    ├── copy, number even ──────┼── copy, number odd ────┼── records, `slots.RECORD` each
        checksum · number magic format machine boots geometry epochs

A writer that dies within a write must lose neither the records nor an epoch, so two copies take turns:
`write_header` overwrites the older one, `read_header` takes the newest that is whole. Pure: the shell
gives the page, as memory that it has mapped.
"""

import hashlib
import struct
from dataclasses import dataclass
from typing import Final

from kvferry.proto.limits import MAX_RANKS
from kvferry.scheduler_daemon.core.slots import RECORD

HEADER_BYTES: Final = 4096
FORMAT: Final = 1  # of the page and of the records behind it
MAX_EPOCHS: Final = 44  # the newest are kept
_MAGIC: Final = b"kvferryT"
_COPY: Final = HEADER_BYTES // 2
# checksum, number, magic, format, 0, machine, boots, slots, ranks, epochs
_FIXED: Final = struct.Struct("<QQ8sII16sQQII")
_RANK: Final = struct.Struct("<QQ")  # slot bytes, pool bytes
_EPOCH: Final = struct.Struct("<16sI")


@dataclass(frozen=True, slots=True)
class Header:
    """What a later daemon must find equal before it takes the records over."""

    machine: bytes  # the machine's own boot id, 16 bytes: memory of another boot is gone
    slot_bytes: tuple[int, ...]  # by rank; its length is the world size
    pool_bytes: tuple[int, ...]  # by rank, behind the pool file's own header page
    num_slots: int  # records that follow
    boots: int = 1  # daemons that have held this table
    epochs: tuple[tuple[bytes, int], ...] = ()  # (namespace digest, 16 bytes; epoch), newest last


def write_header(page: memoryview, header: Header) -> None:
    """Put `header` over the older of the page's two copies; at most MAX_EPOCHS epochs, the newest, are kept."""
    numbers = [_number(page, at) for at in (0, 1)]
    number = max(numbers) + 1
    epochs = header.epochs[-MAX_EPOCHS:]
    ranks = list(zip(header.slot_bytes, header.pool_bytes, strict=True))
    if len(ranks) > MAX_RANKS or len(header.machine) != 16:
        raise ValueError(f"{len(ranks)} ranks, {len(header.machine)} bytes of machine boot id")
    raw = _FIXED.pack(
        0, number, _MAGIC, FORMAT, 0, header.machine, header.boots, header.num_slots, len(ranks), len(epochs)
    )
    raw += b"".join(_RANK.pack(*sizes) for sizes in ranks)
    raw += b"".join(_EPOCH.pack(digest, epoch) for digest, epoch in epochs)
    raw = raw.ljust(_COPY, b"\0")
    at = (number % 2) * _COPY
    page[at : at + _COPY] = _sum(raw) + raw[8:]


def read_header(page: memoryview) -> Header | None:
    """The newest whole copy; None if there is none, or none of this format."""
    newest = max((0, 1), key=lambda at: _number(page, at))
    if not _number(page, newest):
        return None
    raw = bytes(page[newest * _COPY : (newest + 1) * _COPY])
    _, _, _, _, _, machine, boots, num_slots, num_ranks, num_epochs = _FIXED.unpack_from(raw)
    at = _FIXED.size
    if num_ranks > MAX_RANKS or num_epochs > MAX_EPOCHS:
        return None
    ranks = list(_RANK.iter_unpack(raw[at : at + num_ranks * _RANK.size]))
    at += num_ranks * _RANK.size
    epochs = tuple(_EPOCH.iter_unpack(raw[at : at + num_epochs * _EPOCH.size]))
    return Header(
        machine=machine,
        slot_bytes=tuple(sizes[0] for sizes in ranks),
        pool_bytes=tuple(sizes[1] for sizes in ranks),
        num_slots=num_slots,
        boots=boots,
        epochs=epochs,
    )


def misfit(header: Header, *, machine: bytes, pool_bytes: tuple[int, ...], table_bytes: int) -> str:
    """Why records under this header cannot be taken over, with both values; "" if they can.

    `pool_bytes` are those of the files that are there, behind their header pages; `table_bytes` is what the
    table's file holds behind this page.
    """
    if header.machine != machine:
        return "it is of another boot of this machine"
    if header.pool_bytes != pool_bytes:
        return f"its pool files had {list(header.pool_bytes)} bytes by rank, these have {list(pool_bytes)}"
    if not header.num_slots or any(size <= 0 for size in header.slot_bytes):
        return "its geometry was never fixed"
    fits = min(pool // slot for pool, slot in zip(header.pool_bytes, header.slot_bytes, strict=True))
    if header.num_slots > fits:
        return f"it names {header.num_slots} slots, the pool files hold {fits}"
    if header.num_slots * RECORD.itemsize > table_bytes:
        return f"it names {header.num_slots} slots, the table's file holds {table_bytes // RECORD.itemsize}"
    return ""


def _number(page: memoryview, copy: int) -> int:
    """The number of a copy that is whole and of this format, else 0."""
    raw = bytes(page[copy * _COPY : (copy + 1) * _COPY])
    if len(raw) < _COPY:
        return 0
    _, number, magic, form, *_ = _FIXED.unpack_from(raw)
    if magic != _MAGIC or form != FORMAT or number % 2 != copy or raw[:8] != _sum(raw):
        return 0
    return int(number)


def _sum(raw: bytes) -> bytes:
    return hashlib.blake2b(raw[8:], digest_size=8).digest()
