"""The slot table's file: a header page and one fixed-size record a slot, kept by the daemon alone.

    /dev/shm/kvferry-<instance>-table      [header page, `core/header.py` | records, `core/slots.py`]

It outlives the daemon, and `kvferry up` too: the next daemon goes on with it if its header fits the pool
files and this boot of the machine, and begins anew if not. The daemon locks it exclusively for its life:
whoever can lock it knows that no daemon serves this instance. Memory is reserved before it is mapped, so a full
/dev/shm is an error at registration and never a SIGBUS later.
"""

import fcntl
import mmap
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from kvferry.proto.errors import ConfigError
from kvferry.scheduler_daemon.core.api import Recovered, TableShape
from kvferry.scheduler_daemon.core.header import HEADER_BYTES, Header, misfit, read_header, write_header
from kvferry.scheduler_daemon.core.slots import RECORD, Table

# A dead predecessor's lock goes with its process, which may be a moment behind the notice of its death.
LOCK_PATIENCE_S: Final = 5.0


def machine_boot(path: Path = Path("/proc/sys/kernel/random/boot_id")) -> bytes:
    """This boot of the machine, 16 bytes: another one has other memory."""
    return bytes.fromhex(path.read_text().strip().replace("-", ""))


class TableFile:
    """Takes over, makes and holds the table of one daemon."""

    def __init__(self, path: Path, machine: bytes, patience_s: float = LOCK_PATIENCE_S) -> None:
        """ConfigError if another daemon holds the file longer than `patience_s`."""
        self.path = path
        self.discarded = ""  # why what an earlier daemon left was not taken over
        self._machine = machine
        self._header: Header | None = None  # as it stands in the file
        self._epochs: tuple[tuple[bytes, int], ...] = ()
        self._boots = 0
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        give_up = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() < give_up:
                    time.sleep(0.01)
                    continue
                os.close(self._fd)
                raise ConfigError(
                    "table.locked", f"another daemon holds {path}", "stop it, or choose another run dir"
                ) from None
        try:
            os.posix_fallocate(self._fd, 0, HEADER_BYTES)
        except OSError as error:
            os.close(self._fd)
            raise ConfigError("table.shm", f"the slot table {path} cannot be made: {error.strerror}") from None
        self._page = memoryview(mmap.mmap(self._fd, HEADER_BYTES))

    @property
    def boots(self) -> int:
        """Daemons that have held these records, this one included; 0 while there are none."""
        return self._boots

    def recover(self, pool_bytes: tuple[int, ...]) -> Recovered | None:
        """What an earlier daemon left, if it fits pool files of these sizes; else None, and `discarded` says why."""
        header = read_header(self._page)
        nbytes = os.fstat(self._fd).st_size - HEADER_BYTES
        if header is None:
            self.discarded = "its header is not whole" if nbytes > 0 else ""
            return None
        self.discarded = misfit(header, machine=self._machine, pool_bytes=pool_bytes, table_bytes=nbytes)
        if self.discarded:
            return None
        self._boots, self._epochs = header.boots + 1, header.epochs
        self._put(replace(header, boots=self._boots))
        shape = TableShape(header.num_slots, header.slot_bytes, header.pool_bytes)
        return Recovered(shape, self._records(header.num_slots), header.epochs, self._boots)

    def make(self, shape: TableShape) -> Table:
        """A zeroed table of this shape, shape (num_slots,) of RECORD; replaces an earlier one.

        ConfigError with the bytes needed if /dev/shm has no room for them.
        """
        nbytes = HEADER_BYTES + shape.num_slots * RECORD.itemsize
        # The file only ever grows: shrinking it would turn a view that somebody still holds into a SIGBUS.
        try:
            os.posix_fallocate(self._fd, 0, nbytes)
        except OSError as error:
            raise ConfigError(
                "table.shm", f"the slot table needs {nbytes} bytes in {self.path.parent}: {error.strerror}"
            ) from None
        # Old records under a new header would be slots that nobody wrote: no header stands while they go.
        self._page[:] = bytes(HEADER_BYTES)
        table = self._records(shape.num_slots)
        table.view(np.uint8)[:] = 0
        self._boots = max(1, self._boots)  # counts on: generations hang on it
        self._put(
            Header(
                machine=self._machine,
                slot_bytes=shape.slot_bytes,
                pool_bytes=shape.pool_bytes,
                num_slots=shape.num_slots,
                boots=self._boots,
                epochs=self._epochs,
            )
        )
        return table

    def keep_epochs(self, epochs: tuple[tuple[bytes, int], ...]) -> None:
        """Put the namespaces' epochs on record; before there is a table they wait for it."""
        self._epochs = epochs
        if self._header is not None:
            self._put(replace(self._header, epochs=epochs))

    def close(self) -> None:
        """Give the lock back. The file stays: the supervisor keeps or removes it."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)  # a mapping keeps a copy of the descriptor, and with it the lock
        os.close(self._fd)

    def _records(self, num_slots: int) -> Table:
        mapped = mmap.mmap(self._fd, HEADER_BYTES + num_slots * RECORD.itemsize)
        return np.frombuffer(mapped, dtype=RECORD, count=num_slots, offset=HEADER_BYTES)

    def _put(self, header: Header) -> None:
        self._header = header
        write_header(self._page, header)
