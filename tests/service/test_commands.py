"""Flags of `reset`, `drain` and `down` that cannot be, and what they say where nothing runs."""

from pathlib import Path

import pytest

from kvferry.cli.main import main


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["reset", "--namespace", "x" * 10_000], "settings.namespace"),
        (["reset", "--namespace", ""], "settings.namespace"),
        (["drain", "--timeout", "soon"], "settings.timeout"),
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
