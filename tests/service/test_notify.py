"""What a service manager hears: over real sockets, with names in files and without; and one that does not listen."""

import itertools
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvferry.supervise.notify import Manager


@pytest.fixture(params=["a file", "abstract"])
def heard(request: pytest.FixtureRequest) -> Iterator[tuple[str, socket.socket]]:
    """$NOTIFY_SOCKET, and the manager's end of it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        is_file = request.param == "a file"
        name = str(Path(place) / "notify") if is_file else f"@kvferry-test-{os.getpid()}"
        sock.bind(name if is_file else "\0" + name[1:])
        sock.setblocking(False)
        yield name, sock


def said(sock: socket.socket) -> list[str]:
    found = []
    with suppress(BlockingIOError):
        while True:
            found.append(sock.recv(4096).decode())
    return found


def test_words_of_one_moment_are_one_message(heard: tuple[str, socket.socket]) -> None:
    name, sock = heard
    manager = Manager({"NOTIFY_SOCKET": name})
    manager.say(READY=1)
    manager.say(STATUS="starting again:\nthe daemon died", STOPPING=1)
    manager.live(5.0)
    assert said(sock) == ["READY=1", "STATUS=starting again: the daemon died\nSTOPPING=1"]
    assert manager.period_s is None, "nobody waits for signs of life"


def test_a_sign_of_life_is_given_at_least_twice_in_the_time_that_is_allowed(heard: tuple[str, socket.socket]) -> None:
    name, sock = heard
    for limit_s, period_s in ((30, 1.0), (1, 0.5)):
        manager = Manager({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": str(limit_s * 10**6)})
        assert manager.period_s == period_s
        told = []
        for turn in itertools.count():
            now_s = 100 + turn * period_s / 4  # the loop turns for other reasons too
            manager.live(now_s)
            told += [now_s for text in said(sock) if text == "WATCHDOG=1"]
            if turn == 40:
                break
        gaps = [b - a for a, b in itertools.pairwise(told)]
        assert gaps and max(gaps) <= limit_s / 2 and min(gaps) >= period_s / 2


def test_what_a_manager_has_no_room_for_is_told_with_the_next_turn(heard: tuple[str, socket.socket]) -> None:
    """A READY=1 that is lost would end the start."""
    name, sock = heard
    manager = Manager({"NOTIFY_SOCKET": name})
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other, suppress(BlockingIOError):
        while True:
            other.sendto(b"noise", socket.MSG_DONTWAIT, "\0" + name[1:] if name[0] == "@" else name)
    manager.say(READY=1, STATUS="serving")
    manager.say(STATUS="stopping")
    assert set(said(sock)) == {"noise"}
    manager.live(1.0)
    manager.live(2.0)
    assert said(sock) == ["READY=1\nSTATUS=stopping"]


@pytest.mark.parametrize(
    "name", ["", "/nowhere/notify", "@nobody-listens-here", "vsock:2:1234", "/" + "x" * 300, "a\0b"]
)
def test_where_nobody_listens_nothing_happens(name: str) -> None:
    manager = Manager({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "1000000"})
    manager.say(READY=1)
    manager.live(1.0)


@pytest.mark.parametrize("limit", ["", "0", "soon", "-5"])
def test_a_limit_that_is_none_asks_for_no_signs_of_life(limit: str) -> None:
    assert Manager({"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": limit}).period_s is None


def test_signs_of_life_that_another_process_owes_are_not_ours() -> None:
    both = {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "2000000"}
    assert Manager({**both, "WATCHDOG_PID": "1"}).period_s is None
    assert Manager({**both, "WATCHDOG_PID": str(os.getpid())}).period_s == 1.0
    assert Manager({"WATCHDOG_USEC": "2000000"}).period_s is None


def test_what_is_meant_for_us_is_taken_out_of_the_environment_that_our_children_inherit() -> None:
    environment = {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "2000000", "WATCHDOG_PID": str(os.getpid()), "HOME": "/"}
    assert Manager(environment).period_s == 1.0
    assert environment == {"HOME": "/"}
