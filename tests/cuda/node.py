"""A machine with a stub GPU, for tests of a whole `kvferry up --device cuda`.

workers     find the stub as libcuda.so.1 and are steered by one control file
engine      the test's process, or one of its own where it is to be killed; on the same stub, steered by nobody
"""

import contextlib
import time
from pathlib import Path
from typing import Any

import pytest

from tests.client.fake_gpu import FakeEngine
from tests.cuda.engine_process import EngineProcess
from tests.cuda.stubs import Stub, environment
from tests.process.sidecar import Sidecar, until
from tests.process.test_cuda_engine import GpuEngine


class Node:
    """One machine with a stub GPU: its sidecar, its engines, the file that steers the workers' driver."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, cleanup: contextlib.ExitStack) -> None:
        self.journal, self._control, self._cleanup = folder / "calls", folder / "control", cleanup
        self.stub = Stub(folder / "engine")
        self.stub.control()  # told so, it looks at no file: what follows is for the workers
        for name, value in environment(self.journal, self._control).items():
            monkeypatch.setenv(name, value)

    def up(self, *arguments: str, **options: Any) -> Sidecar:
        """The sidecar; nothing is left of it in the end."""
        made = Sidecar("--device", "cuda", *arguments, **{"tp_size": 1, "host_memory": "4MiB", **options})
        return self._cleanup.enter_context(made)

    def engine(self, sidecar: Sidecar, name: str = "tiny", kind: str = "cuda_ipc") -> GpuEngine:
        """An engine in this process."""
        gpu = FakeEngine(self.stub.path)
        self._cleanup.callback(gpu.close)
        return self._cleanup.enter_context(GpuEngine(sidecar, gpu, kind, None, name=name))

    def engine_process(self, sidecar: Sidecar, name: str, kind: str = "cuda_ipc") -> EngineProcess:
        """An engine in a process of its own."""
        made = EngineProcess(sidecar.run_dir, self.stub.path, name, kind)
        self._cleanup.callback(made.kill)
        return made

    def steer(self, *lines: str) -> None:
        """How the workers' driver behaves from now on. The old file is replaced, never half there."""
        new = self._control.with_suffix(".new")
        new.write_text("\n".join(lines) + "\n")
        new.rename(self._control)

    def calls_of(self, pid: int) -> list[str]:
        """What a worker asked of the driver."""
        return self.journal.with_name(f"{self.journal.name}.{pid}").read_text().splitlines()

    def await_batch(self, pid: int, number: int) -> None:
        """Wait until a worker has given the driver its so-manieth batch."""
        until(lambda: sum("BatchAsync stream" in line for line in self.calls_of(pid)) >= number, 10, f"batch {number}")


def attached(engine: GpuEngine) -> GpuEngine:
    assert engine.client.wait_attached(10), engine.notes
    # The daemon tells the scheduler's side; the rank hears it of its worker, perhaps a moment later.
    until(lambda: engine.ranks[0].attached, 5, f"the rank's own word; {engine.notes}")
    return engine


def said(sidecar: Sidecar, words: str) -> None:
    """Wait until one of its processes has logged these words."""
    end = time.monotonic() + 10
    while not any(words in line for line in list(sidecar.lines)):
        assert time.monotonic() < end, "\n".join([f"nobody said {words!r}:", *sidecar.lines])
        time.sleep(0.01)


def at_rest(sidecar: Sidecar) -> dict[str, Any]:
    """The status once no slot is being written or held back."""

    def ask() -> dict[str, Any] | None:
        status = sidecar.status()
        busy = status["slots"]["writing"] + status["slots"]["quarantined"] + status["jobs"]["stores"]
        return None if busy or status["jobs"]["loads"] else status

    return until(ask, 15, "at rest")


def worker_of(engine: GpuEngine, not_pid: int = 0) -> int:
    """The worker that serves the engine's rank."""

    def ask() -> int:
        pid = engine.ranks[0].worker_pid
        return pid if pid not in (0, not_pid) and engine.client.attached and engine.ranks[0].attached else 0

    return until(ask, 15, f"a worker; {engine.notes}")
