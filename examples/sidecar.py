"""A kvferry of one's own for a demonstration or a test: its own run dir, gone without a trace afterwards."""

import ctypes
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kvferry.net.paths import RunDir

END: Final = signal.SIGUSR1  # what `kvferry down` sends: stop, and keep nothing
PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
_libc = ctypes.CDLL(None)


def _end_with_parent() -> None:
    """In the child: END if the thread that started it dies, so that even a SIGKILL of the demo leaves nothing."""
    _libc.prctl(PR_SET_PDEATHSIG, END)


class SidecarError(RuntimeError):
    """`kvferry up` did not come up, or went away; the text holds its last lines."""


class Sidecar:
    """`kvferry up` as a child process. It runs in a process group of its own, so that Ctrl-C reaches us first
    and the engine is closed before its sidecar.
    """

    def __init__(self, tp: int, host_memory: str, ready_timeout_s: float = 60.0) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="kvferry-demo-")
        self.run_dir = Path(self._temporary.name) / "run"
        self.command = [sys.executable, "-m", "kvferry.cli.main", "up", "--run-dir", str(self.run_dir)]
        self.command += ["--tp-size", str(tp), "--host-memory", host_memory, "--device", "cpu"]
        self.pools = [RunDir.at(self.run_dir).pool(rank) for rank in range(tp)]
        self.lines: list[str] = []  # what it said so far
        self.ready_line = ""
        self._ready = threading.Event()
        # A Ctrl-C while it is being started would lose sight of it. (It inherits the mask; END is what ends it.)
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process = subprocess.Popen(
                self.command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                process_group=0,
                preexec_fn=_end_with_parent,
            )
            self._reader = threading.Thread(target=self._read, name="sidecar-output", daemon=True)
            self._reader.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        try:
            if not self._ready.wait(ready_timeout_s):
                raise SidecarError(f"kvferry is not ready after {ready_timeout_s:.0f} s; {self._last_words()}")
            if not self.ready_line:
                raise SidecarError(f"kvferry ended with status {self._process.wait(5.0)}; {self._last_words()}")
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Process id of the supervisor."""
        return self._process.pid

    def close(self) -> list[str]:
        """Stop it as `kvferry down` would; what it left behind, as text: nothing, if all is well."""
        if self._process.poll() is None:
            self._process.send_signal(END)
            try:
                self._process.wait(15.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._reader.join(5.0)
        left = [str(path) for path in self.pools if path.exists()]
        left += [str(path) for path in self.run_dir.glob("*.sock")] if self.run_dir.exists() else []
        self._temporary.cleanup()
        return left

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> None:
        """Keep its output: its pipe must never fill, and its words are wanted if it fails."""
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                self.lines.append(line.rstrip())
                if line.startswith("kvferry ready"):
                    self.ready_line = line.rstrip()
                    self._ready.set()
        self._ready.set()  # it is over: nobody need wait any longer

    def _last_words(self) -> str:
        return "its last lines:\n  " + "\n  ".join(self.lines[-12:] or ["(none)"])
