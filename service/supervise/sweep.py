"""The start on ground where another sidecar may have stood: nobody else holds it, and what fits is taken over.

    our files in /dev/shm ── held? ── wait ── kill if it is our own child ── else refuse, with its pid
          └─▶ they fit ─▶ adopted as they are         └─▶ they do not ─▶ removed, one line

Called with the run dir's lock held, so no other supervisor of ours lives. Children of a killed one end by
themselves within two seconds, and the kernel helps them; one that does not must be dead before anybody else
may write into the files that it maps. Files of other instances are named, never touched.
"""

import contextlib
import fcntl
import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from kvferry.net.paths import RunDir
from kvferry.proto.errors import ConfigError
from kvferry.supervise import kept
from kvferry.units import format_bytes

PATIENCE_S: Final = 3.0  # for children that are ending; one that is stopped does not get it
KILL_S: Final = 2.0  # from SIGKILL to the end
MODULES: Final = ("kvferry.scheduler_daemon", "kvferry.gpu_worker")


def take_over(
    run_dir: RunDir,
    tp_size: int,
    slots_bytes: int,
    check: Callable[[int], None] = lambda _freed_bytes: None,
    patience_s: float = PATIENCE_S,
) -> tuple[bool, list[str]]:
    """Whether a kept pool is there and fits these ranks and sizes; and lines for the log.

    `check` refuses, by raising, a new pool that this machine cannot hold; it is given the bytes that go first,
    and asked before they do: a wrong size must not cost what was kept. ConfigError if a process that is none of
    our children holds a file.
    """
    lines = free_files(run_dir, patience_s)
    for path in [run_dir.daemon, run_dir.tether, *run_dir.path.glob("rank-*.sock")]:
        path.unlink(missing_ok=True)
    found = kept.look(run_dir, tp_size, slots_bytes)
    others = kept.strangers(run_dir)
    if others:
        size = format_bytes(kept.size_of(others))
        named = ", ".join(path.name for path in others[:4]) + (", ..." if len(others) > 4 else "")
        lines.append(f"left alone: {size} of other run dirs in {run_dir.table.parent}: {named}")
    if found is None:
        check(0)
        return False, lines
    if found.unusable:
        check(found.nbytes)
        for path in found.files:
            path.unlink(missing_ok=True)
        lines.append(f"discarded what an earlier run kept, {found}: {found.unusable}")
        return False, lines
    lines.append(f"going on with what an earlier run kept: {found}")
    return True, lines


def free_files(run_dir: RunDir, patience_s: float = PATIENCE_S) -> list[str]:
    """Make sure that no process holds a file of this instance; a line for each one that had to be killed.

    ConfigError naming the process if it is none of our children, or its `kvferry up` if that lives: its lock file
    and all its sockets may have been deleted under it. ConfigError too if a file is not this user's.
    """
    _refuse_foreign(run_dir)
    give_up = time.monotonic() + patience_s
    lines = []
    while held := [path for path in kept.own_files(run_dir) if not _is_free(path)]:
        by = _holders(held)
        ours = [pid for pid in by if _is_ours(pid, run_dir)]
        strange = [pid for pid in by if pid not in ours]
        for pid in ours:
            if up := _living_up(pid, run_dir):
                raise ConfigError(
                    "run_dir.locked",
                    f"kvferry up (pid {up}) still serves {run_dir.path}, though its files there were deleted",
                    f"`kill {up}` ends it and keeps the pool, `kill -USR1 {up}` removes it; then start again",
                )
        over = time.monotonic() >= give_up
        for pid in ours:
            if over or _is_stopped(pid):
                lines.append(f"killing process {pid}, left by an earlier kvferry of {run_dir.path}: it holds {held[0]}")
                if not _kill(pid):
                    raise _in_use(held[0], run_dir, [pid])
        if over and not ours:
            raise _in_use(held[0], run_dir, strange)
        time.sleep(0.05)
    return lines


def _refuse_foreign(run_dir: RunDir) -> None:
    """All users share /dev/shm: what has our name there need not be ours, and is then neither used nor removed."""
    for path in kept.own_files(run_dir):
        if why := kept.not_ours(path):
            deed = f"rm -r {path}" if path.is_dir() else f"rm {path}"
            raise ConfigError(
                "pool.foreign",
                f"{path} has the name of a file of {run_dir.path}, but {why}",
                f"remove it as its owner (`{deed}`) if nobody uses it, or choose another --run-dir",
            )


def _in_use(path: Path, run_dir: RunDir, pids: list[int]) -> ConfigError:
    who = f"process {', '.join(map(str, pids))}" if pids else "a process that this user cannot see"
    return ConfigError(
        "pool.in_use",
        f"{path} of {run_dir.path} is still held by {who}",
        f"end it, then start again; `fuser {path}` as root names every holder",
    )


def _is_free(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        pass
    return True


def _holders(paths: Iterable[Path]) -> list[int]:
    """Processes that have one of these files open, as far as this user can see."""
    wanted = set()
    for path in paths:
        with contextlib.suppress(OSError):
            wanted.add((path.stat().st_dev, path.stat().st_ino))
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            with contextlib.suppress(OSError):
                if any(_identity(fd) in wanted for fd in (process / "fd").iterdir()):
                    found.append(int(process.name))
    return found


def _identity(fd: Path) -> tuple[int, int] | None:
    try:
        found = fd.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _is_ours(pid: int, run_dir: RunDir) -> bool:
    """Whether it is a daemon or worker that was started for this run dir."""
    try:
        said = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    at = os.fsencode(run_dir.path)
    is_child = any(module.encode() in said for module in MODULES)
    return is_child and b"--run-dir" in said and said[said.index(b"--run-dir") + 1] == at


def _living_up(pid: int, run_dir: RunDir) -> int:
    """Pid of the `kvferry up` whose child this is, if it lives; 0 if not. It has the lock file open, deleted or not."""
    lock = os.path.realpath(run_dir.lock)
    try:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        opened = [_target(fd) for fd in Path(f"/proc/{parent}/fd").iterdir()]
    except (OSError, ValueError, IndexError):
        return 0
    return parent if parent != os.getpid() and {lock, f"{lock} (deleted)"} & set(opened) else 0


def _target(fd: Path) -> str:
    try:
        return os.readlink(fd)  # noqa: PTH115 - it need not exist
    except OSError:
        return ""


def _is_stopped(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in ("T", "t")


def _kill(pid: int) -> bool:
    """SIGKILL; whether it was gone soon after."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        return bool(select.select([pidfd], [], [], KILL_S)[0])
    except ProcessLookupError:
        return True
    finally:
        os.close(pidfd)
