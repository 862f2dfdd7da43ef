"""The slot table's file: one fixed-size record a slot, kept by the daemon alone.

`/dev/shm/kvferry-<instance>-table` holds the records of all slots as one numpy structured array; what
they say is the core's (`core/slots.py`), the file is the shell's. The daemon locks it exclusively for its
life: whoever can lock it knows that no daemon serves this instance. Memory is reserved before it is mapped, so
a full /dev/shm is an error at registration and never a SIGBUS later.
"""

import fcntl
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.proto.errors import ConfigError


class TableFile:
    """Makes and holds the table of one daemon."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise ConfigError(
                "table.locked", f"another daemon holds {path}", "stop it, or choose another run dir"
            ) from None
        self._map: mmap.mmap | None = None

    def make(self, num_slots: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """A zeroed table of `num_slots` records, shape (num_slots,); replaces an earlier one.

        ConfigError with the bytes needed if /dev/shm has no room for them.
        """
        nbytes = max(1, num_slots * dtype.itemsize)
        # The file only ever grows: shrinking it would turn a view that somebody still holds into a SIGBUS.
        try:
            os.posix_fallocate(self._fd, 0, nbytes)
        except OSError as error:
            raise ConfigError(
                "table.shm", f"the slot table needs {nbytes} bytes in {self.path.parent}: {error.strerror}"
            ) from None
        self._map = mmap.mmap(self._fd, nbytes)
        table: npt.NDArray[Any] = np.frombuffer(self._map, dtype=dtype, count=num_slots)
        table.view(np.uint8)[:] = 0
        return table

    def close(self) -> None:
        """Give the lock back. The file stays: the supervisor removes it."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)  # a mapping keeps a copy of the descriptor, and with it the lock
        os.close(self._fd)
