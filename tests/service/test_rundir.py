"""The run directory: who may use it, and who holds it."""

import os
from pathlib import Path

import pytest

from kvferry.net.paths import RunDir
from kvferry.proto.errors import ConfigError
from kvferry.supervise import rundir


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A private directory, with a stand-in for /dev/shm beside it."""
    shm = tmp_path / "shm"
    shm.mkdir()
    monkeypatch.setattr("kvferry.net.paths.SHM", shm)
    one = RunDir.at(tmp_path / "run")
    assert rundir.make_private(one)
    return one


def test_a_directory_that_is_missing_is_made_private_with_its_parents(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    assert rundir.make_private(RunDir.at(path)) is True
    assert path.stat().st_mode & 0o777 == 0o700


def test_a_private_directory_that_was_there_is_used_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "mine"
    path.mkdir(mode=0o700)
    assert rundir.make_private(RunDir.at(path)) is False
    assert path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o1777])
def test_a_directory_that_is_open_to_others_is_refused_and_left_as_it_is(tmp_path: Path, mode: int) -> None:
    """It may be /tmp, or somebody's home: closing it would be no favour."""
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"run_dir\.open: .* has mode {mode:04o}") as error:
        rundir.make_private(RunDir.at(path))
    is_sticky = bool(mode & 0o1000)
    assert (f"chmod 700 {path}" in error.value.fix) is not is_sticky
    assert path.stat().st_mode & 0o7777 == mode
    assert not list(path.iterdir())


@pytest.mark.parametrize(("name", "is_told"), [("daemon.sock", True), ("rank-12.sock", True), ("passwd", False)])
def test_nobody_is_told_to_close_a_directory_that_holds_anything_else(tmp_path: Path, name: str, is_told: bool) -> None:
    """`chmod 700 /etc` would end the machine."""
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(0o755)
    (path / name).touch()
    with pytest.raises(ConfigError, match=r"run_dir\.open") as error:
        rundir.make_private(RunDir.at(path))
    assert ("chmod" in error.value.fix) is is_told


def test_an_empty_name_is_no_directory_and_an_empty_variable_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"run_dir\.empty"):
        RunDir.at("")
    unset = RunDir.at()
    monkeypatch.setenv("KVFERRY_RUN_DIR", "")
    assert RunDir.at() == unset


@pytest.mark.skipif(os.getuid() != 0, reason="needs to give a directory away")
def test_another_users_directory_is_refused_with_both_users(tmp_path: Path) -> None:
    path = tmp_path / "theirs"
    path.mkdir(mode=0o700)
    os.chown(path, 12345, -1)
    with pytest.raises(ConfigError, match=r"run_dir\.owner: .* belongs to user 12345; this is user 0") as error:
        rundir.make_private(RunDir.at(path))
    assert "--run-dir" in error.value.fix


def test_the_lock_is_held_by_one_and_says_what_it_does(run_dir: RunDir) -> None:
    """Case 50: starting is a state with progress that can be asked for."""
    assert rundir.read_lock(run_dir) is None
    lock = rundir.Lock(run_dir)
    lock.say("starting: pool 3.0 GiB of 8.0 GiB")
    assert rundir.read_lock(run_dir) == (os.getpid(), "starting: pool 3.0 GiB of 8.0 GiB")
    lock.say("serving")
    assert rundir.read_lock(run_dir) == (os.getpid(), "serving")
    with pytest.raises(ConfigError, match=rf"run_dir\.locked: another kvferry \(pid {os.getpid()}\) serves"):
        rundir.Lock(run_dir)
    lock.release()
    assert rundir.read_lock(run_dir) is None
    assert not run_dir.lock.exists()
    rundir.Lock(run_dir).release()


def test_a_lock_file_that_nobody_holds_is_no_sidecar(run_dir: RunDir) -> None:
    """Never decide by a pid: the number may be a stranger's by now."""
    run_dir.lock.write_text(f"{os.getpid()}\nserving\n")
    assert rundir.read_lock(run_dir) is None
    rundir.Lock(run_dir).release()


def test_cleaning_up_leaves_what_is_not_ours(run_dir: RunDir) -> None:
    run_dir.pool(0).write_bytes(b"")
    run_dir.tether.write_bytes(b"")
    rundir.clean_up(run_dir)
    assert run_dir.pool(0).exists()
    rundir.remove_files(run_dir)
    rundir.remove_if_empty(run_dir)
    assert not run_dir.pool(0).exists()
    assert not run_dir.path.exists()
    run_dir.path.mkdir()
    (run_dir.path / "kvferry.toml").write_text("")
    rundir.clean_up(run_dir)
    rundir.remove_if_empty(run_dir)
    assert (run_dir.path / "kvferry.toml").exists()


def test_a_listener_is_private_and_does_not_block(run_dir: RunDir) -> None:
    with rundir.listen(run_dir.rank(0)) as listener:
        assert run_dir.rank(0).stat().st_mode & 0o777 == 0o600
        with pytest.raises(BlockingIOError):
            listener.accept()
