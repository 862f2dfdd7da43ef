"""Whether this machine can hold the pool: three numbers, read before anything is reserved."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvferry.net.paths import SHM
from kvferry.proto.errors import ConfigError
from kvferry.scheduler_daemon.core.header import HEADER_BYTES
from kvferry.scheduler_daemon.core.slots import RECORD
from kvferry.units import format_bytes

# Left to the machine beyond the pool: the daemon's index, the workers, the page tables of the mappings.
MARGIN: Final = 0.02
# What a slot is taken to have at least, over all ranks, while no engine has told its geometry: a table for that
# many slots must fit beside the pool. One for smaller slots still may not, and is refused when that engine comes.
MIN_SLOT_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class Machine:
    """What is free now, in bytes. None: this machine sets no such bound."""

    shm_free: int
    available: int | None  # MemAvailable
    cgroup_free: int | None  # memory.max - memory.current of the tightest cgroup above us

    def after(self, freed_bytes: int) -> "Machine":
        """The same once this much of /dev/shm has been given back."""
        return Machine(
            self.shm_free + freed_bytes,
            None if self.available is None else self.available + freed_bytes,
            None if self.cgroup_free is None else self.cgroup_free + freed_bytes,
        )


def read_machine(shm: Path = SHM, root: Path = Path("/")) -> Machine:
    """Look. `root` stands in front of /proc and /sys, for tests."""
    stats = os.statvfs(shm)
    return Machine(stats.f_bavail * stats.f_frsize, _available(root), _cgroup_free(root))


def table_bytes(host_memory: int) -> int:
    """What the slot table of a pool of this size is given room for: a header page, and a record a slot."""
    return HEADER_BYTES + host_memory // MIN_SLOT_BYTES * RECORD.itemsize


def check(host_memory: int, machine: Machine) -> None:
    """ConfigError with both numbers and the fix if the pool and its slot table do not fit."""
    table = table_bytes(host_memory)
    bounds = [("host_memory.shm", f"{SHM}, which has", machine.shm_free, host_memory + table)]
    with_margin = int(host_memory * (1 + MARGIN))
    if machine.available is not None:
        bounds.append(("host_memory.ram", "the memory of this machine, which has", machine.available, with_margin))
    if machine.cgroup_free is not None:
        bounds.append(("host_memory.cgroup", "this container's limit, which leaves", machine.cgroup_free, with_margin))
    # A size that fits all of them, that can be typed: whole MiB.
    at_most = f"{max(0, int(min(free for _, _, free, _ in bounds) / (1 + 2 * MARGIN)) - HEADER_BYTES) >> 20}MiB"
    for code, what, free, needed in bounds:
        if needed > free:
            raise ConfigError(
                code,
                f"the pool of {format_bytes(host_memory)} does not fit {what} {format_bytes(free)} free"
                f" (its slot table may take {format_bytes(table)} beside it)",
                f"set --host-memory to at most {at_most}, or {_ENLARGE[code]}",
            )


_ENLARGE: Final = {
    "host_memory.shm": f"enlarge {SHM} (docker: --shm-size; Kubernetes: an emptyDir of medium Memory;"
    " else: mount -o remount,size=)",
    "host_memory.ram": "run it where more memory is free",
    "host_memory.cgroup": "raise the container's memory limit: the pool counts against it",
}


def _available(root: Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_free(root: Path) -> int | None:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    found: list[int] = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            found += _walk(root / "sys/fs/cgroup", path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            found += _walk(root / "sys/fs/cgroup/memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return min(found, default=None)


def _walk(base: Path, path: str, limit_name: str, usage_name: str) -> list[int]:
    """What each cgroup from ours up to the root leaves; a container sees its own as the root."""
    at: Path = base / path.strip("/")
    found = []
    for group in (at, *at.parents):
        limit, usage = _number(group / limit_name), _number(group / usage_name)
        # Version 1 says "no limit" by a number near 2**63.
        if limit is not None and usage is not None and limit < 1 << 60:
            found.append(max(0, limit - usage))
        if group == base:
            break
    return found


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None
