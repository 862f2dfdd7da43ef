"""The launcher's shell where a process cannot be started at all."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvferry.net.paths import RunDir
from kvferry.settings import Settings
from kvferry.supervise import gpus, shell
from kvferry.supervise.children import Process


def test_no_process_to_be_had_ends_the_start_with_its_reason_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The daemon's failure ends all while the workers of the same breath are not started yet."""

    def refuse(*_: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(shell, "Process", refuse)
    run_dir = tmp_path / "run"
    settings = Settings(run_dir=run_dir, tp_size=2, host_memory="4MiB")
    assert shell.Sidecar(settings).run() == 1
    assert "cannot start kvferry.scheduler_daemon" in caplog.text
    assert "gpu_worker" not in caplog.text, "nobody is started who would have to be ended"
    assert not any(RunDir.at(run_dir).pool(rank).exists() for rank in range(2))


def test_a_child_whose_end_nobody_would_see_is_not_left_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two daemons at once are worse than none."""
    started: list[int] = []

    def refuse(pid: int) -> int:
        started.append(pid)
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    before = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(OSError, match="Too many open files"):
        Process("kvferry.cli.version", [], (), {})
    assert sorted(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    with pytest.raises(ChildProcessError):
        os.waitpid(started[0], os.WNOHANG)


def test_a_driver_that_hangs_is_given_up_though_its_process_may_not_die(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "CHECK_S", 0.05)
    with pytest.raises(subprocess.TimeoutExpired):
        gpus._run(["sleep", "30"])
