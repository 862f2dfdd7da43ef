"""Words that find no room: dropped and counted, never waited for, and nobody else's descriptors are changed by it."""

import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from kvferry import outlet
from kvferry.outlet import CHUNK_BYTES
from tests.process.sidecar import environment
from tests.service.unread import Place, drain, fill, full_pipe, full_socket, paused_terminal

Open = Callable[[], AbstractContextManager[Place]]


@pytest.fixture(autouse=True)
def a_wait_is_a_failure() -> Iterator[None]:
    """Whoever waits after all is not waited for."""
    signal.alarm(20)
    yield
    signal.alarm(0)


def no_second_opening(*_: object) -> int:
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize("is_ours", [True, False], ids=["opened again", "another user's"])
@pytest.mark.parametrize("place", [full_pipe, full_socket, paused_terminal])
def test_who_reads_no_more_costs_lines_that_are_counted_and_said_once_he_reads_again(
    place: Open, is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with place() as (writing, reading):
        if not is_ours:
            monkeypatch.setattr(outlet.os, "open", no_second_opening)
        stream = outlet.over(writing)
        for number in range(3):
            stream.write(f"lost {number}\n")
        stream.write("two\nlines, and the beginning of a third")
        stream.flush()
        if os.isatty(writing):
            termios.tcflow(writing, termios.TCOON)
        before = drain(reading)
        assert b"lost" not in before and b"two" not in before
        stream.write("heard\n")
        stream.write("heard too\n")
        said = drain(reading).replace(b"\r", b"").decode().splitlines()
        note = f"kvferry[{os.getpid()}]: 4 lines were dropped here, which nobody took"
        assert [line for line in said if line] == [note, "heard", "heard too"]


def test_a_line_of_which_a_part_was_taken_counts_as_dropped_and_the_next_begins_a_new_one() -> None:
    with full_pipe() as (writing, reading):
        drain(reading)
        stream = outlet.over(writing)
        stream.write("long " * 50_000 + "\n")
        stream.flush()
        part = drain(reading)
        assert part and not part.endswith(b"\n")
        stream.write("next\n")
        assert drain(reading).decode().splitlines()[1:] == [
            f"kvferry[{os.getpid()}]: 1 line was dropped here, which nobody took",
            "next",
        ]


def test_what_fits_a_chunk_is_written_whole_or_not_at_all() -> None:
    """Lines of several processes go into one pipe."""
    with full_pipe() as (writing, reading):
        stream = outlet.over(writing)
        os.read(reading, 8000)  # room for less than two of them
        for letter in "ab":
            stream.write(letter * (CHUNK_BYTES - 1) + "\n")
        said = drain(reading).decode().lstrip("x").splitlines()
        assert said == ["a" * (CHUNK_BYTES - 1)]


@pytest.mark.parametrize("place", [full_pipe, full_socket, paused_terminal])
def test_whoever_else_has_the_descriptor_finds_it_as_it_was(place: Open) -> None:
    with place() as (writing, _):
        outlet.over(writing).write("lost\n")
        assert os.get_blocking(writing)


def test_a_file_is_written_on_where_others_have_left_off(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.write(b"before\n")
        file.flush()
        stream = outlet.over(file.fileno())
        stream.write("ours\n")
        os.write(file.fileno(), b"after\n")
        stream.write("ours again, \N{SNOWMAN} \udc80\n")
    assert path.read_text() == "before\nours\nafter\nours again, \N{SNOWMAN} \\udc80\n"


def test_a_line_of_any_length_goes_into_a_file_in_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of several processes are appended to one file: a traceback is not to be cut by a line of another's."""
    pieces: list[bytes] = []
    write = os.write
    monkeypatch.setattr(outlet.os, "write", lambda fd, data: pieces.append(data) or write(fd, data))
    text = "long " * 50_000 + "\n"
    with (tmp_path / "log").open("ab") as file:
        outlet.over(file.fileno()).write(text)
    assert pieces == [text.encode()] == [(tmp_path / "log").read_bytes()]


def test_room_that_comes_back_is_used_though_it_was_full_when_we_began() -> None:
    with full_pipe() as (writing, reading):
        stream = outlet.over(writing)
        for _ in range(3):
            stream.write("lost\n")
            drain(reading)
            stream.write("heard\n")
            assert drain(reading).endswith(b"heard\n")
            os.set_blocking(reading, True)
            fill(writing)


OF_ANOTHER_USER = """
import os, sys
from kvferry import outlet
os.open(os.ttyname(1), os.O_RDWR)  # a session's first terminal: where it was started from
real = os.open
def denied(name, *rest):
    if name != "/dev/tty":
        raise PermissionError(13, "Permission denied")
    return real(name, *rest)
os.open = denied
stream = outlet.over(1)
for _ in range(2000):
    stream.write("x" * 149 + "\\n")
"""


def test_a_terminal_of_another_user_that_shows_nothing_any_more_holds_nobody_who_was_started_from_it() -> None:
    """`su`, and then the connection hangs: not paused, only full."""
    reading, writing = pty.openpty()
    command = [sys.executable, "-c", OF_ANOTHER_USER]
    done = subprocess.run(command, stdout=writing, env=environment(), timeout=15, start_new_session=True, check=False)
    os.close(writing)
    os.close(reading)
    assert done.returncode == 0


def test_the_other_end_of_a_terminal_is_written_to_and_not_a_new_one() -> None:
    ours, theirs = pty.openpty()
    outlet.over(ours).write("heard\n")
    assert drain(theirs) == b"heard\n"
    os.close(ours)
    os.close(theirs)
