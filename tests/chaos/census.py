"""What processes hold, and whether it grows: descriptors, threads, private memory, files in /dev/shm.

A sample is taken at the end of each cycle of the drill, while the load goes on. Growth is the difference of the
medians of a run's last and first third, within one life of the process: a single sample says nothing.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

# What may differ between two moments of a healthy life: a link being made, an allocator's pages.
SLACK = {"fds": 3.0, "threads": 2.0, "private_mib": 24.0, "files": 0.0, "file_mib": 0.0}
LEAST_SAMPLES = 6


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at one subject: a group of processes, or the sidecar's files."""

    subject: str  # "engine 2", "daemon 1234": a name for each life
    values: Mapping[str, float]


def of_processes(subject: str, pids: Iterable[int]) -> Sample | None:
    """Sums over these processes; None if one of them ends meanwhile."""
    fds = threads = processes = 0
    private_kib = 0
    try:
        for pid in pids:
            fds += sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
            status = dict(
                line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
            )
            threads += int(status["Threads"])
            private_kib += int(status["RssAnon"].split()[0])
            processes += 1
    except (OSError, KeyError):
        return None
    if not processes:
        return None
    return Sample(subject, {"fds": fds, "threads": threads, "private_mib": private_kib / 1024})


def of_group(subject: str, pgid: int) -> list[Sample]:
    """One sample for each name of process in a group."""
    names: dict[str, list[int]] = {}
    for pid in group(pgid):
        with suppress(OSError):
            names.setdefault(Path(f"/proc/{pid}/comm").read_text().strip(), []).append(pid)
    found = (of_processes(f"{subject} {name}", pids) for name, pids in names.items())
    return [sample for sample in found if sample is not None]


def of_files(subject: str, paths: Iterable[Path]) -> Sample:
    """Number and size of these files."""
    count, nbytes = 0, 0
    for path in paths:
        with suppress(OSError):
            nbytes += path.stat().st_size
            count += 1
    return Sample(subject, {"files": count, "file_mib": nbytes / 2**20})


def group(pgid: int) -> list[int]:
    """Living processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, ProcessLookupError):
                if os.getpgid(int(entry.name)) == pgid:
                    found.append(int(entry.name))
    return found


def cpu_waited_s() -> float:
    """Seconds since boot in which somebody on this machine wanted a processor and had none; 0 if the kernel is mute."""
    with suppress(OSError):
        return int(Path("/proc/pressure/cpu").read_text().split("total=")[1].split()[0]) / 1e6
    return 0.0


@dataclass(frozen=True, slots=True)
class Growth:
    """One measure of one life."""

    subject: str
    measure: str
    samples: int
    first: float
    last: float

    @property
    def is_leak(self) -> bool:
        return self.last - self.first > SLACK[self.measure]


def growth(samples: Sequence[Sample]) -> list[Growth]:
    """First and last third of each life that was seen often enough."""
    lives: dict[str, list[Sample]] = {}
    for sample in samples:
        lives.setdefault(sample.subject, []).append(sample)
    found = []
    for subject, seen in lives.items():
        third = len(seen) // 3
        if len(seen) < LEAST_SAMPLES:
            continue
        for measure in seen[0].values:
            values = [sample.values[measure] for sample in seen]
            found.append(Growth(subject, measure, len(seen), median(values[:third]), median(values[-third:])))
    return found
