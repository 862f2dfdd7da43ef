"""The run directory of one sidecar: made, locked, filled with listeners, and left as it was found."""

import contextlib
import fcntl
import os
import re
import socket
import stat
from pathlib import Path

from kvferry.net.paths import RunDir
from kvferry.proto import limits
from kvferry.proto.errors import ConfigError
from kvferry.supervise import kept
from kvferry.supervise.limits import NO_DESCRIPTOR

SERVING = "serving"  # what the lock file says when the daemon answers


def make_private(run_dir: RunDir) -> bool:
    """Make the directory with mode 0700 if it is missing; True if it was. One that is there is never changed.

    ConfigError naming it and the fix if it cannot be used, is another user's, or is open to others.
    """
    path, created = run_dir.path, False
    try:
        created = not path.exists()  # raises where a directory above may not be entered
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_shared(path, path.stat())
        probe = path / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        if created:
            remove_if_empty(run_dir)
        if error.errno in NO_DESCRIPTOR:  # the directory may be as it should
            raise
        raise ConfigError(
            "run_dir.unusable",
            f"cannot write in the run dir {path}: {error.strerror}",
            "choose a directory that you may write: --run-dir DIR or KVFERRY_RUN_DIR",
        ) from None
    return created


def _refuse_shared(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.getuid():
        raise ConfigError(
            "run_dir.owner",
            f"the run dir {path} belongs to user {found.st_uid}; this is user {os.getuid()}",
            "choose a directory of your own: --run-dir DIR or KVFERRY_RUN_DIR",
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        # Whoever can enter could attach to our memory. Closing it ourselves would lock others out of what is
        # theirs to use: it may be /tmp, or somebody's home.
        close_it = f", or `chmod 700 {path}`" if not mode & stat.S_ISVTX and _is_only_ours(path) else ""
        raise ConfigError(
            "run_dir.open",
            f"the run dir {path} has mode {mode:04o}, so others can enter it; it must be 0700",
            f"choose a directory of your own that is missing or empty{close_it}; one that is missing is made so",
        )


def _is_only_ours(path: Path) -> bool:
    """Whether nothing but names of kvferry is in it: closing any other to others may break what is theirs."""
    try:
        return all(_is_our_name(found.name) for found in path.iterdir())
    except OSError:
        return False


def _is_our_name(name: str) -> bool:
    return name in ("daemon.sock", "tether.sock", "kvferry.lock") or bool(re.fullmatch(r"rank-\d+\.sock", name))


class Lock:
    """`kvferry.lock`: held for the life of `kvferry up`. Line 1 is its pid, line 2 what it is doing."""

    def __init__(self, run_dir: RunDir) -> None:
        """ConfigError naming the holder if another sidecar serves this directory."""
        self._path = run_dir.lock
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                holder = read_lock(run_dir)
                raise ConfigError(
                    "run_dir.locked",
                    f"another kvferry (pid {holder[0] if holder else '?'}) serves {run_dir.path}",
                    "use that one, end it with `kvferry down`, or choose another --run-dir",
                ) from None
            # The last holder may have removed the file between our open and our lock: then it is nobody's.
            with contextlib.suppress(FileNotFoundError):
                if os.stat(self._path).st_ino == os.fstat(fd).st_ino:  # noqa: PTH116
                    break
            os.close(fd)
        self._fd = fd
        self.say("starting")

    def say(self, doing: str) -> None:
        """Write what this sidecar is doing, for `kvferry status` before the daemon answers; if the disk has room."""
        text = f"{os.getpid()}\n{doing}\n".encode()
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, text, 0)
            os.ftruncate(self._fd, len(text))

    def release(self) -> None:
        """Remove the file, then let it go."""
        self._path.unlink(missing_ok=True)
        os.close(self._fd)


def read_lock(run_dir: RunDir) -> tuple[int, str] | None:
    """(pid, what it is doing) of the sidecar that holds the lock; None if nobody does.

    ConfigError if this user may not look: that says nothing of who runs there.
    """
    try:
        with run_dir.lock.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                lines = file.read().splitlines()
                return (int(lines[0]), lines[1]) if len(lines) >= 2 and lines[0].isdigit() else (0, "starting")
    except PermissionError as error:
        raise ConfigError(
            "run_dir.unusable",
            f"user {os.geteuid()} may not look into the run dir {run_dir.path}: {error.strerror}",
            "run this as the user of its `kvferry up`, or name another directory: --run-dir DIR or KVFERRY_RUN_DIR",
        ) from None
    except OSError:
        pass
    return None


def listen(path: Path) -> socket.socket:
    """A private stream listener; non-blocking, because several spares accept from it."""
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old_umask = os.umask(0o177)
    try:
        sock.bind(str(path))
    finally:
        os.umask(old_umask)
    sock.listen(128)
    sock.setblocking(False)
    return sock


def clean_up(run_dir: RunDir) -> None:
    """Remove all sockets, by their names: there may be no descriptor left to list the directory with."""
    for path in [run_dir.daemon, run_dir.tether, *(run_dir.rank(rank) for rank in range(limits.MAX_RANKS))]:
        path.unlink(missing_ok=True)


def left_in(run_dir: RunDir) -> list[str]:
    """Names in the run dir that a sidecar has left which was killed."""
    try:
        return sorted(found.name for found in run_dir.path.iterdir() if _is_our_name(found.name))
    except OSError:
        return []


def remove_files(run_dir: RunDir) -> None:
    """Drop the pool and the table. Only when no process of ours maps them any more. What is not ours stays."""
    for path in kept.own_files(run_dir):
        if not kept.not_ours(path):
            path.unlink(missing_ok=True)


def remove_if_empty(run_dir: RunDir) -> None:
    """Remove the directory, if nobody has put anything else into it."""
    with contextlib.suppress(OSError):
        run_dir.path.rmdir()
