"""One look at a child through /proc: at its first thread, not the whole process.

A process that hangs may own threads that do not (ZeroMQ's, a copier's): their work is no sign of life.
"""

from pathlib import Path

from kvferry.supervise.api import Vitals

# Places behind the name in /proc/<pid>/stat, as proc(5) counts them, less the three up to the state.
STATE, PAGE_INS, USER_TICKS, SYSTEM_TICKS = 0, 9, 11, 12


def look(pid: int, proc: Path = Path("/proc")) -> Vitals | None:
    """What its first thread does; None if it is gone, or nothing can be read."""
    try:
        words = (proc / str(pid) / "task" / str(pid) / "stat").read_text().rpartition(")")[2].split()
        ticks = int(words[USER_TICKS]) + int(words[SYSTEM_TICKS])
        return Vitals(words[STATE], ticks, int(words[PAGE_INS]))
    except (OSError, ValueError, IndexError):
        return None
