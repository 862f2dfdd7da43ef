"""Which NUMA node a pool's pages lie on. Linux calls that Python lacks; best effort, and said when it fails.

    prefer(mapping, node)   before a page exists: on tmpfs the wish belongs to the file, for whoever touches it first
    pages(mapping)          where they came to lie

A GPU copies to the memory beside it at full speed, to another socket's with half of it or less. The node is
preferred and not demanded: where it is full, pages of another node are slower, and a demand would be the
out-of-memory killer. A container may forbid the call (Docker's default profile does without CAP_SYS_NICE).
"""

import ctypes
import os
import platform
from pathlib import Path
from typing import Final

MPOL_PREFERRED: Final = 1  # linux/mempolicy.h
MAX_NODES: Final = 1024
_NUMBERS: Final = {"x86_64": 237, "aarch64": 235}  # of the system call mbind
_libc = ctypes.CDLL(None, use_errno=True)


def prefer(address: int, nbytes: int, node: int) -> str:
    """Ask for pages of this node from now on; why that cannot be, or ""."""
    number = _NUMBERS.get(platform.machine())
    if number is None:
        return f"mbind has no number here for {platform.machine()}"
    bits = ctypes.sizeof(ctypes.c_ulong) * 8
    mask = (ctypes.c_ulong * (MAX_NODES // bits))()
    if not 0 <= node < MAX_NODES - 1:
        return f"node {node} is none"
    mask[node // bits] = 1 << node % bits
    result = _libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_int(MPOL_PREFERRED),
        mask,
        ctypes.c_ulong(MAX_NODES),
        ctypes.c_uint(0),
    )
    return os.strerror(ctypes.get_errno()) if result else ""


def pages(address: int, maps: Path = Path("/proc/self/numa_maps")) -> dict[int, int]:
    """Pages of the mapping that begins at `address`, by node; {} where the kernel does not say it."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return {}
    for line in lines:
        start, *words = line.split()
        if int(start, 16) == address:
            counts = [word[1:].split("=") for word in words if word[:1] == "N" and "=" in word]
            return {int(node): int(count) for node, count in counts}
    return {}


def told(found: dict[int, int], node: int) -> str:
    """How well a wish was met, in a line; "" if it was."""
    total = sum(found.values())
    if not total or found.get(node, 0) >= total * 0.99:
        return ""
    parts = ", ".join(f"{count * 100 // total} % on node {other}" for other, count in sorted(found.items()))
    return f"the GPU's memory node {node} did not have room for all of it: {parts}; copies are slower from afar"
