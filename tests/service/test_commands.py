"""Flags of `reset`, `drain` and `down` that cannot be, and what they say where nothing runs."""

import os
from pathlib import Path

import pytest

from kvferry.cli.main import main


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["reset", "--namespace", "x" * 10_000], "settings.namespace"),
        (["reset", "--namespace", ""], "settings.namespace"),
        (["drain", "--timeout", "soon"], "settings.timeout"),
        (["drain", "--timeout", "-1s"], "settings.timeout"),
        (["up", "--host-memory", "-5GiB"], "settings.host_memory"),
        (["drain", "--timeout", "999999h"], "settings.timeout"),
    ],
)
def test_a_flag_that_cannot_be_is_two_lines_and_exit_code_2(
    flags: list[str], code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*flags, "--run-dir", str(tmp_path)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert said[0].startswith(f"{code}: ")
    assert said[1].startswith("  fix: ")


@pytest.mark.parametrize("flags", [[], ["--all", "--namespace", "ab"]])
def test_reset_wants_to_know_exactly_what(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["reset", *flags])
    assert done.value.code == 2


@pytest.mark.parametrize("command", [["reset", "--all"], ["drain"], ["down"], ["down", "--keep"], ["status"]])
def test_where_nothing_runs_a_command_says_so_in_one_line(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--run-dir", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"no kvferry runs at {tmp_path}\n"


@pytest.mark.parametrize("command", [["reset", "--all"], ["drain"], ["down"], ["status"]])
@pytest.mark.parametrize("toml", ["tp_size = \n", "tp_sise = 2\n", "tp_size = 65\n", 'lease = "soon"\n'])
def test_a_setting_that_only_up_needs_fails_no_other_command(
    command: list[str], toml: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A health probe that runs beside somebody's bad file or variable must say how the sidecar is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kvferry.toml").write_text(toml)
    monkeypatch.setenv("KVFERRY_TP_SIZE", "none")
    assert main([*command, "--run-dir", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"no kvferry runs at {tmp_path}\n"
    monkeypatch.setenv("KVFERRY_RUN_DIR", str(tmp_path))
    assert main(command) == 1
    assert capsys.readouterr().err == f"no kvferry runs at {tmp_path}\n"


def test_a_file_here_that_cannot_be_read_costs_a_status_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVFERRY_RUN_DIR", raising=False)
    monkeypatch.delenv("KVFERRY_CONFIG", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "kvferry.toml").write_text("tp_size = \n")
    assert main(["status"]) == 1
    told, said = capsys.readouterr().err.splitlines()
    assert told.startswith("kvferry.toml is not TOML: ") and "ignored" in told
    assert said == f"no kvferry runs at {tmp_path / 'kvferry'}"
    assert main(["status", "--config", "kvferry.toml"]) == 2, "one that was named may hold the run dir"


def test_the_run_dir_of_a_command_comes_from_flag_variable_and_file_in_this_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVFERRY_RUN_DIR", raising=False)
    monkeypatch.delenv("KVFERRY_CONFIG", raising=False)
    (tmp_path / "kvferry.toml").write_text(f'run_dir = "{tmp_path}/file"\n')
    assert main(["status"]) == 1
    monkeypatch.setenv("KVFERRY_RUN_DIR", f"{tmp_path}/variable")
    assert main(["status"]) == 1
    assert main(["status", "--run-dir", f"{tmp_path}/flag"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said == [f"no kvferry runs at {tmp_path}/{name}" for name in ("file", "variable", "flag")]


@pytest.mark.parametrize("toml", ['run_dir = ""\n', "run_dir = 5\n"])
def test_a_run_dir_in_the_file_that_cannot_be_is_refused(
    toml: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVFERRY_RUN_DIR", raising=False)
    (tmp_path / "kvferry.toml").write_text(toml)
    assert main(["status"]) == 2
    assert capsys.readouterr().err.startswith("settings.run_dir: run_dir in kvferry.toml: ")
    assert main(["status", "--run-dir", ""]) == 2


@pytest.mark.parametrize("command", ["status", "up", "drain", "version"])
def test_an_unknown_flag_is_told_with_the_usage_of_its_command(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        main([command, "--frobnicate"])
    assert done.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"usage: kvferry {command} ")
    assert said.endswith(f"kvferry {command}: error: unknown: --frobnicate\n")


NAMES = ("daemon.sock", "kvferry.lock", "rank-0.sock", "tether.sock")


@pytest.mark.parametrize("is_default", [False, True])
def test_down_removes_what_a_killed_up_has_left_and_a_directory_that_only_kvferry_makes(
    is_default: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("KVFERRY_RUN_DIR", raising=False)
    run_dir = tmp_path / ("kvferry" if is_default else "mine")
    run_dir.mkdir(mode=0o700)
    for name in NAMES:
        (run_dir / name).touch()
    assert main(["down", "--run-dir", str(run_dir)]) == 0
    said = capsys.readouterr().out
    assert said == f"no kvferry runs at {run_dir}; removed what a killed one left: {', '.join(NAMES)}\n"
    assert run_dir.exists() is not is_default
    assert main(["down", "--run-dir", str(run_dir)]) == 1


def test_status_names_what_a_killed_up_has_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("daemon.sock", "kvferry.lock", "notes.txt"):
        (tmp_path / name).touch()
    assert main(["status", "--run-dir", str(tmp_path)]) == 1
    first, left = capsys.readouterr().err.splitlines()
    assert first == f"no kvferry runs at {tmp_path}"
    assert left == "  left by one that was killed: daemon.sock, kvferry.lock; the next `up` or `down` removes them"


@pytest.mark.parametrize("command", [["status"], ["status", "--check"], ["drain"], ["down"], ["reset", "--all"]])
def test_a_run_dir_that_one_may_not_enter_is_not_said_to_be_empty(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "theirs"
    run_dir.mkdir(mode=0)
    user = os.geteuid()
    if user == 0:  # may enter all
        os.seteuid(65534)
    try:
        assert main([*command, "--run-dir", str(run_dir)]) == 2
    finally:
        os.seteuid(user)
    said = capsys.readouterr().err
    assert said.startswith("run_dir.unusable: user ") and f"may not look into the run dir {run_dir}" in said


def test_down_leaves_what_is_not_of_kvferry(tmp_path: Path) -> None:
    run_dir = tmp_path / "mine"
    run_dir.mkdir(mode=0o700)
    for name in ("daemon.sock", "notes.txt"):
        (run_dir / name).touch()
    assert main(["down", "--run-dir", str(run_dir)]) == 0
    assert [path.name for path in run_dir.iterdir()] == ["notes.txt"]


def test_the_version_is_a_flag_and_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    said = capsys.readouterr().out
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == said
    assert said.startswith("kvferry ")
