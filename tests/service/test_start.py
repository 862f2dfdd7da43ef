"""The launcher's shell where a process cannot be started at all."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvferry.net.paths import RunDir
from kvferry.settings import Settings
from kvferry.supervise import gpus, shell


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


def test_a_driver_that_hangs_is_given_up_though_its_process_may_not_die(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "CHECK_S", 0.05)
    with pytest.raises(subprocess.TimeoutExpired):
        gpus._run(["sleep", "30"])
