"""What is said to nobody, or to a full disk: it is dropped, and costs no process its life or its exit code."""

import logging
import os
import pty
import subprocess
import sys
import termios
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from kvferry import logs
from kvferry.supervise.progress import Progress
from tests.process.sidecar import environment
from tests.service.unread import Place, closed_pipe, drain, full_disk, full_pipe, full_socket, paused_terminal

SPEAKS = """
import logging, sys
from kvferry import logs
from kvferry.supervise.progress import Progress
logs.set_up("info")
logging.getLogger("kvferry.up").warning("a line")
logs.say("kvferry ready")
logs.say("why", sys.stderr)
Progress("the pool", 8).reach(8)
logs.say("again")
print("by somebody else, and without an end", end="")
print("the same", end="", file=sys.stderr)
logs.let_go()
END
"""
EXITS = "sys.exit(7)"
RAISES = "raise ValueError('a bug')"


@pytest.mark.parametrize(("end", "code"), [(EXITS, 7), (RAISES, 1)], ids=["exits", "raises"])
@pytest.mark.parametrize("place", [closed_pipe, full_disk, full_pipe, full_socket, paused_terminal])
def test_what_nobody_reads_holds_no_process_and_changes_no_exit_code(
    place: Callable[[], AbstractContextManager[Place]], end: str, code: int
) -> None:
    """Neither in a log call, nor in a traceback, nor in the interpreter's own last flush."""
    with place() as (fd, _):
        command = [sys.executable, "-c", SPEAKS.replace("END", end)]
        done = subprocess.run(command, stdout=fd, stderr=fd, env=environment(), timeout=60, check=False)
    assert done.returncode == code


IN_THE_BACKGROUND = """
import os, subprocess, sys
os.open(os.ttyname(1), os.O_RDWR)  # a session's first terminal: where it was started from
speaks = "import logging; from kvferry import logs; logs.set_up(); logging.getLogger('kvferry').warning('heard')"
child = subprocess.Popen([sys.executable, "-c", speaks], process_group=0)
_, status = os.waitpid(child.pid, os.WUNTRACED)
child.kill()
sys.exit(os.WIFSTOPPED(status))
"""


def test_a_terminal_that_stops_who_writes_from_the_background_stops_no_process_of_ours() -> None:
    """`stty tostop`: daemon and workers stand in the background of the terminal of `kvferry up`."""
    reading, writing = pty.openpty()
    modes = termios.tcgetattr(writing)
    modes[3] |= termios.TOSTOP
    termios.tcsetattr(writing, termios.TCSANOW, modes)
    command = [sys.executable, "-c", IN_THE_BACKGROUND]
    done = subprocess.run(
        command, stdout=writing, stderr=writing, env=environment(), timeout=60, start_new_session=True, check=False
    )
    said = drain(reading)
    os.close(writing)
    os.close(reading)
    assert done.returncode == 0 and said.rstrip().endswith(b"heard"), said


def test_a_line_that_could_not_be_written_does_not_keep_the_next_ones_back(tmp_path: Path) -> None:
    """A full disk has room again later."""
    path = tmp_path / "log"
    with path.open("w") as file:
        room = os.dup(file.fileno())
        with full_disk() as (full, _):
            os.dup2(full, file.fileno())
        logs.say("lost or late", file)
        os.dup2(room, file.fileno())
        os.close(room)
        logs.say("kvferry ready", file)
    assert path.read_text().splitlines()[-1] == "kvferry ready"


def test_a_terminal_that_goes_away_ends_no_progress() -> None:
    class Gone:
        def update(self, _step: int) -> None:
            raise OSError(5, "Input/output error")

    progress = Progress("the pool", 8)
    progress._bar = Gone()
    progress.reach(4)
    progress.reach(8)
    progress.close()
    assert progress.text == "8 B of 8 B"


def test_a_mistake_in_a_log_call_is_still_told(capsys: pytest.CaptureFixture[str]) -> None:
    handler = logs.Handler(sys.stderr)
    handler.handle(logging.LogRecord("kvferry", logging.INFO, __file__, 1, "%d", ("no number",), None))
    assert "TypeError" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["version"], ["--help"], ["status", "--run-dir", "/nowhere"]])
def test_a_command_whose_output_goes_nowhere_ends_without_a_traceback(flags: list[str]) -> None:
    command = [sys.executable, "-m", "kvferry.cli.main", *flags]
    with full_disk() as (full, _):
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment(), timeout=60, check=False
        )
    print(done.stderr)
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert done.returncode in (0, 1)
    if flags == ["version"]:
        assert (done.returncode, done.stderr) == (1, "cannot write the answer to stdout: No space left on device\n")
