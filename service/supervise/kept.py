"""What a sidecar that has ended left in /dev/shm for the next one, and whether that one can use it.

Only files are looked at, none is changed: also while a sidecar runs, these are the things that would be kept.
"""

import os
import stat
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvferry.gpu_worker.pool import read_header as read_pool_header
from kvferry.net.paths import RunDir
from kvferry.proto.errors import ConfigError
from kvferry.proto.limits import MAX_RANKS, PAGE_BYTES
from kvferry.scheduler_daemon.core.header import HEADER_BYTES, Header, misfit, read_header
from kvferry.scheduler_daemon.core.slots import RECORD, SlotState
from kvferry.scheduler_daemon.table import machine_boot
from kvferry.supervise.limits import NO_DESCRIPTOR
from kvferry.units import counted, format_bytes


class Unusable(Exception):  # noqa: N818 - no error: the next sidecar begins anew
    """Why what is there cannot be gone on with."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Files of one instance and what they hold."""

    files: tuple[Path, ...]
    nbytes: int  # of all files
    num_slots: int = 0
    num_filled: int = 0  # slots whose key a daemon would serve
    unusable: str = ""  # why nothing of it can be served again

    def __str__(self) -> str:
        if self.unusable:
            return f"{format_bytes(self.nbytes)} in {counted(len(self.files), 'file')}"
        return f"{format_bytes(self.nbytes)}, {self.num_filled:,} of {self.num_slots:,} slots filled"

    def as_dict(self) -> dict[str, int]:
        """For status."""
        return {"bytes": self.nbytes, "slots": self.num_slots, "filled": self.num_filled}


def own_files(run_dir: RunDir) -> list[Path]:
    """Pool and table files of this instance that exist; no descriptor is needed to find them."""
    named = [run_dir.table, *(run_dir.pool(rank) for rank in range(MAX_RANKS))]
    return sorted(path for path in named if os.path.lexists(path))


def not_ours(path: Path) -> str:
    """Why a file of this name is none that a sidecar of this user has left; "" if it may be one, or is gone."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"cannot be looked at: {error.strerror}"
    if not stat.S_ISREG(found.st_mode):
        return "is no file" if not stat.S_ISDIR(found.st_mode) else "is a directory"
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}; this is user {os.geteuid()}"
    return ""


def strangers(run_dir: RunDir) -> list[Path]:
    """Files of other instances."""
    own = set(own_files(run_dir))
    return sorted(path for path in run_dir.table.parent.glob("kvferry-*") if path not in own)


def size_of(paths: list[Path]) -> int:
    """Bytes of these files together; one that is gone by now counts nothing."""
    total = 0
    for path in paths:
        try:
            total += path.stat().st_size
        except OSError:
            continue
    return total


def look(run_dir: RunDir, tp_size: int | None = None, slots_bytes: int | None = None) -> Kept | None:
    """What is there; None if nothing is. Of use only to `tp_size` ranks of `slots_bytes` each, if they are given.

    OSError if there is no descriptor to look with: that says nothing of the files.
    """
    files = own_files(run_dir)
    if not files:
        return None
    nbytes = size_of(files)
    for path in files:
        if why := not_ours(path):
            return Kept(tuple(files), nbytes, unusable=f"{path} {why}")
    try:
        header = _fit(run_dir, files, tp_size, slots_bytes)
        filled = _num_filled(run_dir.table, header.num_slots)
    except ConfigError as error:
        return Kept(tuple(files), nbytes, unusable=error.text)
    except (Unusable, OSError) as error:
        if isinstance(error, OSError) and error.errno in NO_DESCRIPTOR:
            raise
        return Kept(tuple(files), nbytes, unusable=str(error))
    return Kept(tuple(files), nbytes, header.num_slots, filled)


def _fit(run_dir: RunDir, files: list[Path], tp_size: int | None, slots_bytes: int | None) -> Header:
    """The table's header; Unusable or ConfigError with the reason if pool files and table are not one whole of ours."""
    if run_dir.table not in files:
        raise Unusable("there is no slot table beside it")
    pools = [path for path in files if path != run_dir.table]
    found = []
    for rank in range(len(pools)):
        if run_dir.pool(rank) not in pools:
            raise Unusable(f"{run_dir.pool(rank)} is missing")
        found.append(_pool_bytes(run_dir.pool(rank), run_dir.instance))
    if tp_size not in (None, len(found)):
        raise Unusable(f"it is of {counted(len(found), 'rank')}, this sidecar has {tp_size}")
    if slots_bytes is not None and found != [slots_bytes] * len(found):
        had, wanted = [[format_bytes(size + PAGE_BYTES) for size in sizes] for sizes in (found, [slots_bytes])]
        raise Unusable(f"its files have {', '.join(had)}, this sidecar's have {wanted[0]} a rank")
    with run_dir.table.open("rb") as file:
        page = file.read(HEADER_BYTES)
        nbytes = os.fstat(file.fileno()).st_size - HEADER_BYTES
    header = read_header(memoryview(page.ljust(HEADER_BYTES, b"\0")))
    if header is None:
        # A table is zeroed when it is made, and gets its header with the first whole engine.
        raise Unusable("its slot table cannot be read" if any(page) or nbytes > 0 else "nothing was stored in it")
    why = misfit(header, machine=machine_boot(), pool_bytes=tuple(found), table_bytes=nbytes)
    if why:
        raise Unusable(why)
    return header


def _pool_bytes(path: Path, instance: str) -> int:
    with path.open("rb") as file:
        pool_bytes, owner = read_pool_header(file.fileno(), path)
    if owner != instance:
        raise Unusable(f"{path} is of another instance, {owner!r}")
    return pool_bytes


def _num_filled(table: Path, num_slots: int) -> int:
    records = np.memmap(table, dtype=RECORD, mode="r", offset=HEADER_BYTES, shape=(num_slots,))
    return int(np.count_nonzero(records["state"] == SlotState.READY))
