"""What process C measures of the pool: reserving, filling, registering it, once and again."""

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from kvferry.gpu_check.copier import Copier
from kvferry.gpu_worker.memory import populate
from kvferry.gpu_worker.pool import Pool

PART_BYTES: Final = 256 << 20
MADV_HUGEPAGE: Final = 14


def deeds_of(copier: Copier) -> dict[str, Callable[..., Any]]:
    """What the copier can be asked of this module."""
    return {"fill_times": fill_times, "pin_times": lambda path: pin_times(copier, path)}


def fill_times(path: str, nbytes: int, threads: int, huge: bool) -> dict[str, float]:
    """Make and fill a file as a pool is made and filled, and remove it; seconds."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        began = time.monotonic()
        os.posix_fallocate(fd, 0, nbytes)
        reserved = time.monotonic()
        mapped = mmap.mmap(fd, nbytes)
        base = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        advised = 0
        if huge:
            advised = int(ctypes.CDLL(None).madvise(ctypes.c_void_p(base), ctypes.c_size_t(nbytes), MADV_HUGEPAGE) == 0)
        with ThreadPoolExecutor(threads) as pool:
            parts = range(0, nbytes, PART_BYTES)
            list(pool.map(lambda at: populate(base + at, min(PART_BYTES, nbytes - at)), parts))
        return {"reserve_s": reserved - began, "fill_s": time.monotonic() - reserved, "huge_advice_taken": advised}
    finally:
        os.close(fd)
        Path(path).unlink()


def pin_times(copier: Copier, path: str) -> dict[str, float]:
    """Register a pool, let go, register again and stay so; seconds."""
    pool = copier.pool = Pool(Path(path))
    device = copier.device
    began = time.monotonic()
    region = device.register_host(pool.base, pool.nbytes)
    first = time.monotonic()
    device.unregister_host(region)
    undone = time.monotonic()
    device.register_host(pool.base, pool.nbytes)
    return {
        "register_s": first - began,
        "unregister_s": undone - first,
        "register_again_s": time.monotonic() - undone,
    }
