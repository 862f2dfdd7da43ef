"""`kvferry up` as the drill treats it: started, hurt in every way, started again on the same pool.

Pids are found through /proc at the moment they are needed: workers come and go by themselves.
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvferry.net.paths import RunDir
from tests.process.sidecar import KVFERRY, alive, environment

READY_S = 60.0
DAEMON, WORKER = "kvferry.scheduler_daemon", "kvferry.gpu_worker"


class SidecarError(RuntimeError):
    """It did not come up or did not end; the text holds its last lines."""


class Sidecar:
    """One `kvferry up` after the other, on one run dir."""

    def __init__(self, run_dir: Path, tp_size: int, host_memory: str, log: Path, *flags: str) -> None:
        self.run_dir = RunDir.at(run_dir)
        self.readies: list[float] = []  # when each ready line came; "again" lines too
        self._command = [*KVFERRY, "up", "--run-dir", str(run_dir), "--tp-size", str(tp_size)]
        self._command += ["--host-memory", host_memory, *flags]
        self._log = log.open("a", buffering=1)
        self._lines: list[tuple[float, str]] = []
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._ended: set[int] = set()  # pids of supervisors before this one, for `children`

    # ---- questions -----------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """Of the supervisor."""
        return self._process.pid if self._process is not None else 0

    @property
    def is_up(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def children(self, module: str, rank: int | None = None) -> list[int]:
        """Living children of this run dir that run this module, orphans too."""
        return [pid for pid, said in self._all() if module in said and rank in (None, _rank(said))]

    def workers(self) -> list[int]:
        return self.children(WORKER)

    def daemon(self) -> int | None:
        found = self.children(DAEMON)
        return found[0] if found else None

    def _all(self) -> Iterator[tuple[int, list[str]]]:
        mine = os.fsdecode(self.run_dir.path)
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    said = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                    if mine in said and ({DAEMON, WORKER} & set(said)) and alive(int(entry.name)):
                        yield int(entry.name), said

    def leftovers(self) -> list[str]:
        """Processes and files that are still there."""
        left = [f"process {pid}: {' '.join(said[:4])}" for pid, said in self._all()]
        left += [str(path) for path in self.files()]
        return left + ([str(path) for path in self.run_dir.path.glob("*")] if self.run_dir.path.exists() else [])

    def files(self) -> list[Path]:
        """Its files in /dev/shm."""
        return sorted(self.run_dir.table.parent.glob(f"kvferry-{self.run_dir.instance}*"))

    def last_lines(self, count: int = 30) -> str:
        return "\n".join(line for _, line in self._lines[-count:])

    def said(self, words: str) -> list[tuple[float, str]]:
        """Its lines with these words, each with its moment."""
        return [(moment, line) for moment, line in self._lines if words in line]

    # ---- deeds ---------------------------------------------------------------------------------------

    def start(self, timeout_s: float = READY_S) -> float:
        """`kvferry up`, ready; the moment of its ready line."""
        count = len(self.readies)
        self._process = subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(),
            process_group=0,
        )
        self._reader = threading.Thread(target=self._read, args=(self._process,), name="kvferry-output", daemon=True)
        self._reader.start()
        return self.wait_ready(count, timeout_s)

    def wait_ready(self, after: int, timeout_s: float = READY_S) -> float:
        """Wait until more than `after` ready lines have come; the moment of the last. SidecarError if it ends."""
        until = time.monotonic() + timeout_s
        while len(self.readies) <= after:
            if not self.is_up:
                raise SidecarError(f"kvferry ended with {self._process and self._process.poll()}\n{self.last_lines()}")
            if time.monotonic() > until:
                raise SidecarError(f"kvferry is not ready after {timeout_s:.0f} s\n{self.last_lines()}")
            time.sleep(0.02)
        return self.readies[-1]

    def send(self, pid: int | None, number: signal.Signals) -> bool:
        """A signal; whether there was anybody to get it."""
        if not pid:
            return False
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True

    def kill_supervisor(self) -> None:
        """SIGKILL of the supervisor alone; its children have to end by themselves."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def kill_tree(self) -> None:
        """SIGKILL of everything at one moment."""
        pids = [self.pid, *(pid for pid, _ in self._all())]
        for pid in pids:
            self.send(pid, signal.SIGKILL)
        assert self._process is not None
        self._process.wait()

    def end(self, number: signal.Signals, timeout_s: float = 20.0) -> int:
        """A stop signal; its exit code. SidecarError if it does not end."""
        assert self._process is not None
        self._process.send_signal(number)
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise SidecarError(f"no end {timeout_s:.0f} s after {number.name}\n{self.last_lines()}") from None

    def ask(self, *arguments: str, timeout_s: float = 20.0) -> subprocess.CompletedProcess[str]:
        """One kvferry command on this run dir."""
        command = [*KVFERRY, arguments[0], "--run-dir", str(self.run_dir.path), *arguments[1:]]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, env=environment(), check=False
        )

    def close(self) -> list[str]:
        """End it as `kvferry down` does; what it left, which is then removed."""
        try:
            if self.is_up:
                self.end(signal.SIGUSR1)
        except SidecarError as error:
            self._log.write(f"{error}\n")
        left = self.leftovers()
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for pid, _ in list(self._all()):
            self.send(pid, signal.SIGKILL)
        for path in self.files():
            path.unlink(missing_ok=True)
        if self._reader is not None:
            self._reader.join(5)
        self._log.close()
        return left

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        with process.stdout as output:
            for line in output:
                self._lines.append((time.monotonic(), line.rstrip()))
                with suppress(ValueError):  # closed at the end
                    self._log.write(f"{time.monotonic():.3f} {line.rstrip()}\n")
                if line.startswith("kvferry ready"):
                    self.readies.append(time.monotonic())


def _rank(said: list[str]) -> int | None:
    return int(said[said.index("--rank") + 1]) if "--rank" in said else None
