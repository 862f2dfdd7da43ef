"""One rank's pool file: its creation, its mapping, and the generation words of its slots.

    byte 0      file header page: magic, format, bytes, instance
    byte 4096   slot 0: [header page | payload], slot 1, ...          slot_bytes is one for the whole file

    header page words, u64 LE:   0 magic   1 gen_open   2 gen_close   rest 0

Memory is reserved at creation (`posix_fallocate`): a tmpfs that is too small is an error at start with both
numbers, never a SIGBUS later. Every process that maps the file holds a shared flock on it, so that a kept
pool is told from an orphan. Never truncates an existing file; never decides by a pid.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import resource
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from kvferry.gpu_worker import numa
from kvferry.gpu_worker.api import U32, U64
from kvferry.gpu_worker.memory import populate, prefault
from kvferry.proto.errors import ConfigError
from kvferry.proto.limits import PAGE_BYTES

FILE_MAGIC: Final = 0x314C_4F4F_5059_564B  # "KVYPOOL1"
SLOT_MAGIC: Final = 0x3154_4F4C_5359_564B  # "KVYSLOT1"
FORMAT: Final = 1
FILE_HEADER: Final = struct.Struct("<QQQ32s")  # magic, format, pool bytes, instance
STEP_BYTES: Final = 1 << 30  # reserved between two words of progress
POPULATE_BYTES: Final = 256 << 20  # of one prefault call
NUM_POPULATE_THREADS: Final = 4

Progress = Callable[[int, int], None]  # bytes reserved and populated so far, bytes in all


def _no_progress(done: int, total: int) -> None:
    """Nobody watches."""


def create(path: Path, pool_bytes: int, instance: str, progress: Progress = _no_progress, node: int = -1) -> str:
    """Make the file with room for `pool_bytes` of slots, all of it reserved and filled with zeros.

    `progress` hears every GiB twice: when it is reserved and when it is populated. `node` is the NUMA node that its
    pages should lie on, -1: wherever; returns "", or a line on why they do not.
    ConfigError if the file system has too little room or the file exists; then no file is left behind.
    """
    total = PAGE_BYTES + pool_bytes
    _check_room(path, total)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(
            "pool.exists",
            f"{path} exists: another kvferry of this run dir left or uses it",
            f"stop that one, or remove the file if `fuser {path}` names nobody",
        ) from None
    except OSError as error:
        raise ConfigError("pool.create", f"{path} cannot be made: {error.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        refused = _prefer(fd, total, node)
        _reserve(fd, path, total, progress)
        os.pwrite(fd, FILE_HEADER.pack(FILE_MAGIC, FORMAT, pool_bytes, instance.encode()[:32]), 0)
        _populate(fd, total, progress)
        return refused or (_where(fd, total, node) if node >= 0 else "")
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def remove(path: Path) -> None:
    """Take the name away; whoever maps the file keeps it until the mapping ends."""
    path.unlink(missing_ok=True)


def _check_room(path: Path, total: int) -> None:
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if 0 <= most < total:
        raise ConfigError(
            "limit.file_size",
            f"{path} needs {total} bytes, but this process may make no file larger than {most} bytes",
            "raise the limit (`ulimit -f unlimited`; systemd: LimitFSIZE=infinity), or give less --host-memory",
        )
    try:
        stat = os.statvfs(path.parent)
    except OSError as error:
        raise ConfigError("pool.create", f"{path.parent} cannot be used: {error.strerror}") from None
    free = stat.f_bavail * stat.f_frsize
    if free < total:
        raise _too_small(path, total, free)


def _too_small(path: Path, total: int, free: int) -> ConfigError:
    return ConfigError(
        "pool.shm_too_small",
        f"{path} needs {total} bytes ({total / (1 << 30):.2f} GiB), but {path.parent} has"
        f" {free} bytes ({free / (1 << 30):.2f} GiB) free",
        "give less --host-memory, or enlarge the file system (docker: --shm-size; else: mount -o remount,size=...)",
    )


def _reserve(fd: int, path: Path, total: int, progress: Progress) -> None:
    for start in range(0, total, STEP_BYTES):
        stop = min(start + STEP_BYTES, total)
        try:
            os.posix_fallocate(fd, start, stop - start)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise ConfigError("pool.create", f"{path} cannot be reserved: {error.strerror}") from None
            # Somebody else took the room between the question and now.
            stat = os.statvfs(path.parent)
            raise _too_small(path, total, start + stat.f_bavail * stat.f_frsize) from None
        progress(stop // 2, total)


def _prefer(fd: int, total: int, node: int) -> str:
    """Wish for pages of a node before there are any; why that cannot be, or ""."""
    if node < 0:
        return ""
    os.ftruncate(fd, total)  # of a file that was made just now: what is not mapped cannot have a wish
    with mmap.mmap(fd, total, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
        view = np.frombuffer(mapped, dtype=np.uint8)
        why = numa.prefer(int(view.__array_interface__["data"][0]), total, node)
        del view
    return why and f"its pages cannot be asked for on the GPU's memory node {node}: {why} (in Docker: CAP_SYS_NICE)"


def _where(fd: int, total: int, node: int) -> str:
    """Why not all pages lie on the node that was wished for, or ""."""
    with mmap.mmap(fd, total, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
        view = np.frombuffer(mapped, dtype=np.uint8)
        address = int(view.__array_interface__["data"][0])
        del view
        populate(address, total)  # into this mapping's tables: only what is there is counted
        return numa.told(numa.pages(address), node)


def _populate(fd: int, total: int, progress: Progress) -> None:
    with mmap.mmap(fd, total, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
        view = np.frombuffer(mapped, dtype=np.uint8)
        base = int(view.__array_interface__["data"][0])
        del view
        starts = range(0, total, POPULATE_BYTES)
        with ThreadPoolExecutor(NUM_POPULATE_THREADS) as threads:
            calls = [threads.submit(populate, base + at, min(POPULATE_BYTES, total - at)) for at in starts]
            for at, call in zip(starts, calls, strict=True):
                call.result()
                progress((total + min(at + POPULATE_BYTES, total)) // 2, total)


class Pool:
    """A mapped pool file. Holds its shared lock until `close`.

    ConfigError if the file is missing, has another size than its header says, or is none of ours.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError("pool.open", f"{path} cannot be opened: {error.strerror}") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            self.pool_bytes, self.instance = read_header(self._fd, path)
            total = PAGE_BYTES + self.pool_bytes
            self._mapped = mmap.mmap(self._fd, total, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except BlockingIOError:
            os.close(self._fd)
            raise ConfigError("pool.locked", f"{path} is locked by another process") from None
        except BaseException:
            os.close(self._fd)
            raise
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(self._mapped, dtype=np.uint8)
        self.base = int(self._bytes.__array_interface__["data"][0])
        prefault(self.base, total, self._bytes)

    @property
    def nbytes(self) -> int:
        """Of the whole mapping, file header included."""
        return PAGE_BYTES + self.pool_bytes

    @property
    def slots_base(self) -> int:
        """Address of slot 0's header page."""
        return self.base + PAGE_BYTES

    def num_slots(self, slot_bytes: int) -> int:
        """Slots of this size that fit."""
        return self.pool_bytes // slot_bytes

    def headers(self, slot_bytes: int, num_slots: int) -> "PoolHeaders":
        """The generation words of slots of this size."""
        return PoolHeaders(self._bytes, slot_bytes, num_slots)

    def close(self) -> None:
        """Give the lock back; the mapping goes when nothing views it any more. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._bytes = np.empty(0, dtype=np.uint8)
            with contextlib.suppress(BufferError):
                self._mapped.close()


def read_header(fd: int, path: Path) -> tuple[int, str]:
    """(bytes for slots, instance) of an open pool file; ConfigError if it is none of ours or was cut."""
    raw = os.pread(fd, FILE_HEADER.size, 0)
    if len(raw) < FILE_HEADER.size:
        raise ConfigError("pool.format", f"{path} is no pool file: it has {len(raw)} bytes")
    magic, fmt, pool_bytes, instance = FILE_HEADER.unpack(raw)
    if magic != FILE_MAGIC or fmt != FORMAT:
        raise ConfigError("pool.format", f"{path} is no pool file of format {FORMAT}", "remove it and start again")
    size = os.fstat(fd).st_size
    if size != PAGE_BYTES + pool_bytes:
        raise ConfigError(
            "pool.size",
            f"{path} has {size} bytes; its header says {PAGE_BYTES + pool_bytes}",
            "somebody cut or grew it: remove it and start again",
        )
    return int(pool_bytes), bytes(instance).rstrip(b"\0").decode(errors="replace")


class PoolHeaders:
    """The header words of all slots as strided columns over the mapping; one plain 8-byte store or load each."""

    def __init__(self, file_bytes: npt.NDArray[np.uint8], slot_bytes: int, num_slots: int) -> None:
        def column(word: int) -> U64:
            return np.ndarray(
                (num_slots,), dtype="<u8", buffer=file_bytes, offset=PAGE_BYTES + 8 * word, strides=(slot_bytes,)
            )

        self._magic = column(0)
        self._gen_open = column(1)
        self._gen_close = column(2)

    def open(self, slots: U32, generations: U64) -> None:
        """Before the first byte of a store."""
        self._magic[slots] = SLOT_MAGIC
        self._gen_open[slots] = generations

    def close(self, slots: U32, generations: U64) -> None:
        """After the last byte of a store that may be published."""
        self._gen_close[slots] = generations

    def torn(self, slots: U32, generations: U64) -> U32:
        """Positions whose header is not, in every word, that of a whole slot of the plan's generation."""
        whole = (self._gen_open[slots] == generations) & (self._gen_close[slots] == generations)
        whole &= self._magic[slots] == SLOT_MAGIC
        return np.flatnonzero(~whole).astype(np.uint32)
