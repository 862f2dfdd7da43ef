"""A real `kvferry up` for tests: started in a directory of its own, watched, and proven gone afterwards.

    with Sidecar(tp_size=2) as sidecar:
        Client(..., run_dir=sidecar.run_dir)

Nothing here is imported by the product; other tests may copy or import it.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from kvferry.cli.ask import ask_status
from kvferry.net.paths import RunDir
from kvferry.supervise.rundir import read_lock

T = TypeVar("T")
KVFERRY = [sys.executable, "-m", "kvferry.cli.main"]


def until(question: Callable[[], T], timeout_s: float = 10.0, what: str = "") -> T:
    """Ask again and again until the answer is true; that answer. AssertionError after `timeout_s`."""
    end = time.monotonic() + timeout_s
    while not (answer := question()):
        assert time.monotonic() < end, f"not within {timeout_s:g} s: {what or question}"
        time.sleep(0.01)
    return answer


def kvferry(*arguments: object, timeout_s: float = 30.0) -> subprocess.CompletedProcess[str]:
    """Run one kvferry command to its end."""
    command = [*KVFERRY, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment(), check=False)


def environment() -> dict[str, str]:
    """Ours, without settings of whoever runs the tests; a crash leaves a stack."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}
    return {**ours, "PYTHONFAULTHANDLER": "1"}


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Sidecar:
    """One `kvferry up` and everything it owns."""

    def __init__(
        self,
        *arguments: str,
        tp_size: int = 2,
        host_memory: str = "64MiB",
        run_dir: Path | None = None,
        ready_s: float = 90.0,
    ) -> None:
        # Short: the path of a unix socket holds 107 bytes, and pytest's own directories may be longer.
        self._temporary = tempfile.TemporaryDirectory(prefix="kvf-", dir="/tmp")
        self.run_dir = run_dir or Path(self._temporary.name) / "run"
        self.lines: list[str] = []
        self.seen: set[int] = set()  # pids of children that were ever listed
        self._ready = threading.Event()
        flags = ["--run-dir", str(self.run_dir), "--tp-size", str(tp_size), "--host-memory", host_memory]
        self._process = subprocess.Popen(
            [*KVFERRY, "up", *flags, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(),
            process_group=0,
        )
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            if not self._ready.wait(ready_s):
                # Each then says where it stands. The supervisor last: its end would end the others.
                spent = {pid: Path(f"/proc/{pid}/stat").read_text().split()[13:15] for pid in self.children()}
                for pid in sorted(spent):
                    os.kill(pid, signal.SIGABRT)
                self._process.send_signal(signal.SIGABRT)
                self._process.wait(10)
                self._reader.join(5)
                said = "\n".join(self.lines)
                raise AssertionError(f"not ready after {ready_s:g} s; CPU ticks of children {spent}; it said:\n{said}")
            assert self._process.poll() is None, f"ended with {self._process.returncode}: {self.lines}"
            self.children()
        except BaseException:
            self.kill()
            raise

    # ---- questions -----------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """What `kvferry status --json` says, asked without a process of its own."""
        run_dir = RunDir.at(self.run_dir)
        _, doing = read_lock(run_dir) or (0, "absent")
        return {"state": doing, "pid": self.pid, **ask_status(run_dir, timeout_s=20)}

    def children(self) -> set[int]:
        """Pids of all living children of the supervisor."""
        path = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        found = {int(pid) for pid in path.read_text().split()} if path.exists() else set()
        found = {pid for pid in found if alive(pid)}
        self.seen |= found
        return found

    def daemon(self) -> int:
        """Pid of the daemon."""
        return self.pids_of("kvferry.scheduler_daemon")[0]

    def workers(self, rank: int) -> list[int]:
        """Pids of the workers of one rank."""
        return self.pids_of("kvferry.gpu_worker", "--rank", str(rank))

    def pids_of(self, *words: str) -> list[int]:
        """Pids of the children that run this module, with this flag at this value."""
        found = []
        for pid in sorted(self.children()):
            try:
                said = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if words[0] in said and (len(words) == 1 or said[said.index(words[1]) + 1] == words[2]):
                found.append(pid)
        return found

    def leftovers(self) -> list[str]:
        """What is still there of it: processes, sockets, files in /dev/shm, the lock."""
        run_dir = RunDir.at(self.run_dir)
        left = [f"process {pid}" for pid in sorted(self.seen | {self.pid}) if alive(pid)]
        left += [str(path) for path in run_dir.table.parent.glob(f"kvferry-{run_dir.instance}*")]
        left += [str(path) for path in self.run_dir.glob("*")] if self.run_dir.exists() else []
        return left

    # ---- deeds ---------------------------------------------------------------------------------------

    def stop(self, number: signal.Signals = signal.SIGINT, timeout_s: float = 15.0) -> int:
        """Signal the supervisor and wait; its exit code."""
        self.children()
        if self._process.poll() is None:
            self._process.send_signal(number)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = 15.0) -> int:
        """Wait for the supervisor to end by itself; its exit code."""
        code = self._process.wait(timeout_s)
        self._reader.join(5)
        return code

    def kill(self, *, files: bool = True) -> None:
        """SIGKILL to the supervisor and whatever it leaves behind; no questions asked. Its `files` go too."""
        if sys.exc_info()[0] is not None:
            print("\n".join(self.lines))
        self.children()
        self._process.kill()
        self._process.wait()
        for pid in self.seen:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        self._reader.join(5)
        where = RunDir.at(self.run_dir)
        for path in where.table.parent.glob(f"kvferry-{where.instance}*") if files else ():
            path.unlink(missing_ok=True)
        self._temporary.cleanup()

    def close(self) -> None:
        """Stop it, and AssertionError if anything is left."""
        try:
            code = self.stop()
            left = self.leftovers()
        finally:
            self.kill()
        assert code == 0, f"exit code {code}: {self.lines}"
        assert not left, f"left behind: {left}\n" + "\n".join(self.lines)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip())
            if line.startswith("kvferry ready"):
                self._ready.set()
        self._process.stdout.close()
        self._ready.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            print("\n".join(self.lines))
            self.kill()
        else:
            self.close()
