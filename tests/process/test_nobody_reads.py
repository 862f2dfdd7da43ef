"""A sidecar whose words reach nobody, and one whose run dir was emptied under it: both go on serving."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvferry.cli.ask import ask_status
from kvferry.net.paths import RunDir
from kvferry.proto.errors import LostError
from kvferry.supervise.rundir import SERVING, read_lock
from tests.process.sidecar import KVFERRY, Sidecar, alive, environment, kvferry, until
from tests.service.unread import drain, fill, full_pipe, paused_terminal

pytestmark = pytest.mark.process


@contextmanager
def into_a_closed_pipe(command: list[str]) -> Iterator["subprocess.Popen[bytes]"]:
    """Its output is read up to the ready line, and then its reader is gone, as `up | head` does."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment()) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(b"kvferry ready"):
                break
        process.stdout.close()
        yield process


@contextmanager
def onto_a_full_disk(command: list[str]) -> Iterator["subprocess.Popen[bytes]"]:
    """Not even its first line can be written."""
    with (
        Path("/dev/full").open("w") as full,
        subprocess.Popen(command, stdout=full, stderr=full, env=environment()) as process,
    ):
        yield process


@contextmanager
def into_a_pipe_that_is_full(command: list[str]) -> Iterator["subprocess.Popen[bytes]"]:
    """Its reader lives and reads nothing, from the first line on: a log shipper that hangs."""
    with (
        full_pipe() as (writing, _),
        subprocess.Popen(command, stdout=writing, stderr=writing, env=environment()) as process,
    ):
        yield process


@contextmanager
def onto_a_paused_terminal(command: list[str]) -> Iterator["subprocess.Popen[bytes]"]:
    """Ctrl-S."""
    with (
        paused_terminal() as (writing, _),
        subprocess.Popen(command, stdout=writing, stderr=writing, env=environment()) as process,
    ):
        yield process


def served_by(run_dir: RunDir) -> int:
    """Pid of the daemon that answers; 0 if none does."""
    if (read_lock(run_dir) or (0, ""))[1] != SERVING:
        return 0
    try:
        return int(ask_status(run_dir)["daemon_pid"])
    except LostError:
        return 0


STARTS = [into_a_closed_pipe, onto_a_full_disk, into_a_pipe_that_is_full, onto_a_paused_terminal]


@pytest.mark.parametrize("start", STARTS)
def test_a_sidecar_that_nobody_reads_still_replaces_its_daemon_and_ends_with_0(
    tmp_path: Path, start: Callable[[list[str]], Iterator["subprocess.Popen[bytes]"]]
) -> None:
    run_dir = RunDir.at(Path("/tmp") / f"kvf-{os.getpid()}-mute")
    command = [*KVFERRY, "up", "--run-dir", str(run_dir.path), "--host-memory", "8MiB"]
    with start(command) as process:  # type: ignore[attr-defined]
        try:
            first = until(lambda: served_by(run_dir), 30, "ready")
            os.kill(first, signal.SIGKILL)
            second = until(lambda: (found := served_by(run_dir)) != first and found, 30, "another daemon")
            assert second != first and process.poll() is None
            assert kvferry("down", "--run-dir", run_dir.path).returncode == 0
            assert process.wait(15) == 0
            assert not run_dir.path.exists()
        finally:
            process.kill()
            shutil.rmtree(run_dir.path, ignore_errors=True)
            for path in run_dir.table.parent.glob(f"kvferry-{run_dir.instance}*"):
                path.unlink()


def test_a_log_that_is_read_again_says_how_much_of_it_is_missing_and_goes_on() -> None:
    """No process waits for the reader, and none holds on to what it had no room for."""
    run_dir = RunDir.at(Path("/tmp") / f"kvf-{os.getpid()}-late-reader")
    reading, writing = os.pipe()
    command = [*KVFERRY, "up", "--run-dir", str(run_dir.path), "--host-memory", "8MiB"]
    with subprocess.Popen(command, stdout=writing, stderr=writing, env=environment()) as process:
        try:
            first = until(lambda: served_by(run_dir), 30, "ready")
            fill(writing)
            os.kill(first, signal.SIGKILL)
            second = until(lambda: (found := served_by(run_dir)) != first and found, 30, "another daemon")
            unread = drain(reading)
            assert b"kvferry ready" in unread and b"daemon ended by signal 9" not in unread
            os.kill(second, signal.SIGKILL)
            until(lambda: served_by(run_dir) not in (0, first, second), 30, "a third daemon")
            said = drain(reading).decode().lstrip("x")
            print(said)
            assert f"kvferry[{process.pid}]: " in said and "dropped here, which nobody took\n" in said
            assert "daemon ended by signal 9" in said
            assert kvferry("down", "--run-dir", run_dir.path).returncode == 0
            assert process.wait(15) == 0
        finally:
            process.kill()
            shutil.rmtree(run_dir.path, ignore_errors=True)
            for path in run_dir.table.parent.glob(f"kvferry-{run_dir.instance}*"):
                path.unlink()
            os.close(reading)
            os.close(writing)


def test_a_living_sidecar_whose_run_dir_was_emptied_is_left_alone_by_up_and_down() -> None:
    sidecar = Sidecar(tp_size=1)
    try:
        table = RunDir.at(sidecar.run_dir).table
        ours = f"{table.name.removesuffix('table')}*"  # others run beside us
        files = sorted(path.name for path in table.parent.glob(ours))
        children = sidecar.children()
        shutil.rmtree(sidecar.run_dir)
        for command in (["up", "--host-memory", "64MiB"], ["down"]):
            done = kvferry(*command, "--run-dir", sidecar.run_dir)
            print(done.stderr)
            assert done.returncode == 2
            assert f"run_dir.locked: kvferry up (pid {sidecar.pid}) still serves {sidecar.run_dir}" in done.stderr
        assert alive(sidecar.pid) and sidecar.children() == children
        assert files and set(files) <= {path.name for path in table.parent.glob(ours)}
        assert sidecar.stop(signal.SIGUSR1) == 0
        assert sidecar.leftovers() == []
    finally:
        sidecar.kill()
