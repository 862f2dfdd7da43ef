"""The slot table's bytes, which outlive every daemon: what `scheduler_daemon/table.py` keeps in a file.

The header page and the records are the real ones, written and read by the real code; only the file is missing.
A daemon's death leaves them as they stand; a torn record is one that it left half written.
"""

import random
from dataclasses import replace

import numpy as np

from kvferry.proto.layout import slot_bytes
from kvferry.scheduler_daemon.core.api import Recovered, TableShape
from kvferry.scheduler_daemon.core.header import HEADER_BYTES, Header, misfit, read_header, write_header
from kvferry.scheduler_daemon.core.namespaces import ALL
from kvferry.scheduler_daemon.core.slots import RECORD, SlotState, Table, sound, zeroed_table

MACHINE = bytes(range(16))


class TableBytes:
    """The header page and the records."""

    def __init__(self, num_slots: int, world_size: int, payload_bytes: int) -> None:
        self.page = bytearray(HEADER_BYTES)
        self.records: Table = zeroed_table(0)
        self.pool_bytes = (num_slots * slot_bytes(payload_bytes),) * world_size
        self._header: Header | None = None
        self._epochs: tuple[tuple[bytes, int], ...] = ()

    # ---- the daemon's side -----------------------------------------------------------------------------

    def recover(self) -> Recovered | None:
        """What an earlier daemon left; None if there is none, or it does not fit."""
        header = read_header(memoryview(self.page))
        if header is None or misfit(
            header, machine=MACHINE, pool_bytes=self.pool_bytes, table_bytes=self.records.nbytes
        ):
            return None
        self._epochs = header.epochs
        self._put(replace(header, boots=header.boots + 1))
        shape = TableShape(header.num_slots, header.slot_bytes, header.pool_bytes)
        return Recovered(shape, self.records, header.epochs, header.boots + 1)

    def make(self, shape: TableShape) -> Table:
        """A zeroed table in place of an earlier one."""
        self.page[:] = bytes(HEADER_BYTES)
        self.records = zeroed_table(shape.num_slots)
        self._put(Header(MACHINE, shape.slot_bytes, shape.pool_bytes, shape.num_slots, epochs=self._epochs))
        return self.records

    def keep_epochs(self, epochs: tuple[tuple[bytes, int], ...]) -> None:
        """Put epochs on record."""
        self._epochs = epochs
        if self._header is not None:
            self._put(replace(self._header, epochs=epochs))

    def _put(self, header: Header) -> None:
        self._header = header
        write_header(memoryview(self.page), header)

    # ---- the voyage's side -----------------------------------------------------------------------------

    def epochs(self) -> dict[bytes, int]:
        """What the header has on record; nothing before there is a table, which then has nothing to serve either."""
        header = read_header(memoryview(self.page))
        return dict(header.epochs) if header is not None else {}

    def digest(self, slot: int) -> bytes:
        """The namespace that the record of `slot` names."""
        return self.records["namespace"][slot].tobytes()

    def ready(self) -> list[tuple[bytes, bytes, int, int]]:
        """(namespace, key, slot, generation) of each whole READY record of a present epoch, oldest first."""
        epochs = self.epochs()
        found = []
        for slot in np.flatnonzero(sound(self.records) & (self.records["state"] == SlotState.READY)).tolist():
            record = self.records[slot]
            digest = record["namespace"].tobytes()
            if epochs.get(digest, epochs.get(ALL, 0)) == record["epoch"]:
                key = record["key"].tobytes()[: int(record["key_bytes"])]
                found.append((digest, key, slot, int(record["generation"])))
        return sorted(found, key=lambda row: row[3])

    def change_in_part(self, before: Table, rng: random.Random) -> set[int]:
        """The daemon dies amid its writes: of the records that differ from `before` some are new, some old, one torn.

        The slots of those records.
        """
        old, new = (records.view(np.uint8).reshape(-1, RECORD.itemsize) for records in (before, self.records))
        changed = np.flatnonzero((old != new).any(axis=1)).tolist()
        for slot in changed:
            if rng.random() < 0.5:
                upto = rng.choice((0, 8 * rng.randrange(RECORD.itemsize // 8)))  # memory is written in words
                new[slot, upto:] = old[slot, upto:]
        return set(changed)

    def tear(self, rng: random.Random) -> int | None:
        """Leave one record half written; its slot, or None if there is none to tear."""
        written = np.flatnonzero(self.records["format"]).tolist()
        ready = np.flatnonzero(self.records["state"] == SlotState.READY).tolist()
        written = ready if ready and rng.random() < 0.7 else written
        if not written:
            return None
        slot = rng.choice(written)
        raw = self.records.view(np.uint8).reshape(len(self.records), RECORD.itemsize)
        raw[slot, rng.randrange(2, RECORD.itemsize - 8)] ^= rng.randrange(1, 256)
        return int(slot)
