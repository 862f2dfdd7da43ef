"""What an earlier run left: taken over where it fits, else removed; and who may still hold it."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvferry.cli.main import main
from kvferry.gpu_worker import pool
from kvferry.net.paths import RunDir
from kvferry.proto.errors import ConfigError
from kvferry.scheduler_daemon.core.api import TableShape
from kvferry.scheduler_daemon.core.slots import SlotState
from kvferry.scheduler_daemon.table import TableFile, machine_boot
from kvferry.supervise import kept, rundir, sweep

SLOTS_BYTES = 16 * 8192


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A private directory, with a stand-in for /dev/shm beside it."""
    shm = tmp_path / "shm"
    shm.mkdir()
    monkeypatch.setattr("kvferry.net.paths.SHM", shm)
    one = RunDir.at(tmp_path / "run")
    assert rundir.make_private(one)
    return one


def leave(run_dir: RunDir, *, ranks: int = 2, machine: bytes | None = None, shape: bool = True) -> None:
    """What a sidecar with these ranks leaves: 3 of 16 slots filled."""
    for rank in range(ranks):
        pool.create(run_dir.pool(rank), SLOTS_BYTES, run_dir.instance)
    file = TableFile(run_dir.table, machine or machine_boot())
    if shape:
        table = file.make(TableShape(16, (8192,) * ranks, (SLOTS_BYTES,) * ranks))
        table["state"][[2, 5, 7]] = SlotState.READY
    file.close()


def files(run_dir: RunDir) -> list[str]:
    return [path.name for path in kept.own_files(run_dir)]


def test_what_fits_is_gone_on_with_and_its_size_is_told(run_dir: RunDir) -> None:
    """Case 32: a hard exit never makes the next start fail."""
    leave(run_dir)
    before = {path: path.stat().st_ino for path in kept.own_files(run_dir)}
    run_dir.daemon.write_bytes(b"")
    run_dir.rank(1).write_bytes(b"")
    (run_dir.path / "notes.txt").write_text("mine")
    assert sweep.take_over(run_dir, 2, SLOTS_BYTES) == (
        True,
        ["going on with what an earlier run kept: 270.0 KiB, 3 of 16 slots filled"],
    )
    assert {path: path.stat().st_ino for path in kept.own_files(run_dir)} == before
    assert list(run_dir.path.iterdir()) == [run_dir.path / "notes.txt"]


def test_nothing_there_is_nothing_to_tell(run_dir: RunDir) -> None:
    assert sweep.take_over(run_dir, 2, SLOTS_BYTES) == (False, [])
    assert kept.look(run_dir) is None


def cut_a_pool(run_dir: RunDir) -> None:
    os.truncate(run_dir.pool(1), 9000)


def garble_a_pool(run_dir: RunDir) -> None:
    with run_dir.pool(0).open("r+b") as file:
        file.write(b"something else")


def take_the_table(run_dir: RunDir) -> None:
    run_dir.table.unlink()


def take_a_pool(run_dir: RunDir) -> None:
    run_dir.pool(0).unlink()


def empty_the_table(run_dir: RunDir) -> None:
    """Its header is gone, its records are there."""
    with run_dir.table.open("r+b") as file:
        file.write(bytes(4096))


def garble_the_header(run_dir: RunDir) -> None:
    with run_dir.table.open("r+b") as file:
        file.write(np.full(4096, 7, dtype=np.uint8).tobytes())


@pytest.mark.parametrize(
    ("harm", "tp_size", "slots_bytes", "why"),
    [
        (None, 1, SLOTS_BYTES, "it is of 2 ranks, this sidecar has 1"),
        (None, 2, 2 * SLOTS_BYTES, "its files have 132.0 KiB, 132.0 KiB, this sidecar's have 260.0 KiB a rank"),
        (cut_a_pool, 2, SLOTS_BYTES, "has 9000 bytes; its header says"),
        (garble_a_pool, 2, SLOTS_BYTES, "is no pool file of format 1"),
        (take_the_table, 2, SLOTS_BYTES, "there is no slot table beside it"),
        (take_a_pool, 2, SLOTS_BYTES, "-r0 is missing"),
        (garble_the_header, 2, SLOTS_BYTES, "its slot table cannot be read"),
        (empty_the_table, 2, SLOTS_BYTES, "its slot table cannot be read"),
    ],
)
def test_what_does_not_fit_goes_with_one_line_that_says_why(
    run_dir: RunDir, harm: object, tp_size: int, slots_bytes: int, why: str
) -> None:
    leave(run_dir)
    if callable(harm):
        harm(run_dir)
    adopted, [line] = sweep.take_over(run_dir, tp_size, slots_bytes)
    assert not adopted
    assert line.startswith("discarded what an earlier run kept, ")
    assert why in line
    assert files(run_dir) == []


def test_a_size_that_this_machine_cannot_hold_costs_nothing_of_what_was_kept(run_dir: RunDir) -> None:
    leave(run_dir)
    asked: list[int] = []

    def check(freed_bytes: int) -> None:
        asked.append(freed_bytes)
        raise ConfigError("host_memory.shm", "too large")

    with pytest.raises(ConfigError, match="too large"):
        sweep.take_over(run_dir, 2, 1 << 50, check)
    assert len(files(run_dir)) == 3
    assert asked == [kept.size_of(kept.own_files(run_dir))], "what would go first counts as free"
    assert sweep.take_over(run_dir, 2, SLOTS_BYTES, check)[0], "what fits needs no new memory"


def test_another_boot_of_the_machine_keeps_nothing(run_dir: RunDir) -> None:
    leave(run_dir, machine=bytes(16))
    adopted, [line] = sweep.take_over(run_dir, 2, SLOTS_BYTES)
    assert (adopted, files(run_dir)) == (False, [])
    assert line.endswith("it is of another boot of this machine")


def test_another_instances_files_are_named_with_their_size_and_left(run_dir: RunDir) -> None:
    stranger = run_dir.table.parent / "kvferry-0123456789-r0"
    stranger.write_bytes(bytes(8192))
    leave(run_dir, shape=False)
    adopted, lines = sweep.take_over(run_dir, 2, SLOTS_BYTES)
    assert not adopted
    assert f"left alone: 8.0 KiB of other run dirs in {stranger.parent}: {stranger.name}" in lines
    assert stranger.exists()
    assert files(run_dir) == []


# ---- who holds them --------------------------------------------------------------------------------------

HOLD = "import fcntl,sys,time; f=open(sys.argv[1]); fcntl.flock(f,fcntl.LOCK_SH); print(flush=True); time.sleep(60)"


def holder(run_dir: RunDir, *, module: str, at: Path) -> "subprocess.Popen[bytes]":
    """A process that holds a pool file; its command line is that of a child of the sidecar at `at`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run_dir.pool(0)), module, "--run-dir", str(at)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    return process


def test_a_process_that_is_just_ending_is_waited_for(run_dir: RunDir) -> None:
    leave(run_dir)
    held = run_dir.pool(0).open()
    fcntl.flock(held, fcntl.LOCK_SH)
    timer = threading.Timer(0.1, held.close)
    timer.start()
    assert sweep.free_files(run_dir, patience_s=10) == []
    timer.join()


@pytest.mark.parametrize("stopped", [False, True])
def test_an_own_child_that_does_not_go_is_killed_a_stopped_one_at_once(run_dir: RunDir, stopped: bool) -> None:
    leave(run_dir)
    with holder(run_dir, module="kvferry.gpu_worker", at=run_dir.path) as process:
        if stopped:
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        [line] = sweep.free_files(run_dir, patience_s=30 if stopped else 0.1)
        assert f"killing process {process.pid}" in line
        assert process.wait(5) == -signal.SIGKILL


@pytest.mark.parametrize(("module", "elsewhere"), [("kvferry.gpu_worker", True), ("backup", False)])
def test_anybody_else_is_refused_with_the_pid_and_left_alive(run_dir: RunDir, module: str, elsewhere: bool) -> None:
    leave(run_dir)
    at = run_dir.path.parent if elsewhere else run_dir.path
    with holder(run_dir, module=module, at=at) as process:
        with pytest.raises(ConfigError, match=r"pool\.in_use") as error:
            sweep.take_over(run_dir, 2, SLOTS_BYTES, patience_s=0.1)
        assert f"held by process {process.pid}" in str(error.value)
        assert process.poll() is None
        assert len(files(run_dir)) == 3
        process.kill()


def a_directory(path: Path) -> None:
    path.mkdir()


def another_users(path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs to give a file away")
    path.touch()
    os.chown(path, 12345, -1)


def a_link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (a_directory, "is a directory"),
        (another_users, "belongs to user 12345; this is user 0"),
        (a_link, "is no file"),
    ],
)
def test_what_only_has_the_name_of_a_pool_file_is_refused_by_up_and_down_and_left(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str], make: Callable[[Path], None], why: str
) -> None:
    """Root's `up` kept a pool, and a user takes its run dir; or somebody plays tricks in a place that all share."""
    path = run_dir.pool(0)
    make(path)
    with pytest.raises(ConfigError, match=r"pool\.foreign"):
        sweep.take_over(run_dir, 1, SLOTS_BYTES)
    assert main(["down", "--run-dir", str(run_dir.path)]) == 2
    said = capsys.readouterr().err
    assert f"pool.foreign: {path} has the name of a file of {run_dir.path}, but {why}" in said
    assert "fix: remove it as its owner (`rm " in said
    assert "Traceback" not in said
    assert path.is_dir() or path.is_symlink() or path.exists()


UP = """
import subprocess, sys
from kvferry.net.paths import RunDir
from kvferry.supervise import rundir
run_dir = RunDir.at(sys.argv[1])
lock = rundir.Lock(run_dir)
lock.say(rundir.SERVING)
child = subprocess.Popen([sys.executable, "-c", *sys.argv[2:]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
child.kill()
child.wait()
"""


@pytest.fixture
def living_up(run_dir: RunDir) -> Iterator[tuple[int, int]]:
    """Pids of a process that holds the lock as `kvferry up` does, and of a child of it that holds the pool."""
    leave(run_dir)
    child = [HOLD, str(run_dir.pool(0)), "kvferry.gpu_worker", "--run-dir", str(run_dir.path)]
    command = [sys.executable, "-c", UP, str(run_dir.path), *child]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
        process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("all_of_it", [False, True])
def test_a_living_sidecar_whose_run_dir_was_emptied_keeps_its_pool_and_its_children(
    run_dir: RunDir, living_up: tuple[int, int], all_of_it: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some clean up /tmp by age. The lock is free then, and the children look like those of a dead one."""
    up, child = living_up
    if all_of_it:
        shutil.rmtree(run_dir.path)
        rundir.make_private(run_dir)
    else:
        run_dir.lock.unlink()
    with pytest.raises(ConfigError, match=rf"run_dir\.locked: kvferry up \(pid {up}\) still serves .* deleted"):
        sweep.take_over(run_dir, 2, SLOTS_BYTES, patience_s=30)
    assert main(["down", "--run-dir", str(run_dir.path)]) == 2
    assert f"kill -USR1 {up}" in capsys.readouterr().err
    os.kill(child, 0)
    assert len(files(run_dir)) == 3


def test_an_up_that_is_stopped_is_named_by_status_and_down_with_what_to_do(
    run_dir: RunDir, living_up: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever would start another daemon stands still, so none will come."""
    up, _ = living_up
    os.kill(up, signal.SIGSTOP)
    os.waitid(os.P_PID, up, os.WSTOPPED | os.WNOWAIT)
    for command in ("status", "drain"):
        assert main([command, "--run-dir", str(run_dir.path)]) == 1
        said = capsys.readouterr().err
        assert said.startswith(f"daemon.lost: kvferry up (pid {up}) at {run_dir.path} is stopped (state T)")
        assert f"`kill -CONT {up}`" in said and f"`kill -KILL {up}`" in said
    assert main(["down", "--run-dir", str(run_dir.path)]) == 1
    told, fix = capsys.readouterr().err.splitlines()
    assert told == f"kvferry up (pid {up}) at {run_dir.path} is stopped (state T)"
    assert fix.endswith("it was told to stop, and does when it goes on")


def test_a_table_that_no_engine_has_filled_is_no_damage(run_dir: RunDir) -> None:
    leave(run_dir, shape=False)
    found = kept.look(run_dir)
    assert found is not None and found.unusable == "nothing was stored in it"
