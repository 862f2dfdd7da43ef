"""Daemons come and go: how they are looked for, what is said of it, and what the client's own thread does meanwhile."""

import logging
import time
from pathlib import Path
from typing import Any

import pytest

from kvferry import Client
from kvferry.net.paths import RunDir
from kvferry.proto.control import Register
from kvferry.proto.errors import LostError
from kvferry.proto.hot import Lookup, Step
from tests.client.fakes import chain, refused
from tests.client.stage import FakeCarrier, daemon, every_call, generous, stage


def test_each_change_of_state_is_one_line() -> None:
    with stage() as s:
        s.attached()
        for _ in range(50):
            s.turn(50)
            every_call(s.client)
        assert s.notes == ["attached to the sidecar at /nonexistent/kvferry: 64 slots"]
        s.is_there = s.carrier.alive = False
        for _ in range(50):
            s.turn(500)
        assert len(s.notes) == 2 and s.notes[1].startswith("no sidecar at /nonexistent/kvferry")
        s.is_there = True
        s.turn(2000)
        s.attached()
        assert len(s.notes) == 3


def test_a_lost_daemon_is_looked_for_at_a_bounded_pace() -> None:
    with stage() as s:
        s.attached()
        s.carrier.alive = s.is_there = False
        tries = 0

        def refuse(run_dir: RunDir) -> FakeCarrier:
            nonlocal tries
            tries += 1
            raise LostError("daemon.lost", "nobody there")

        s.client._connect = refuse
        for _ in range(200):
            s.turn(50)
        assert 12 <= tries <= 20, "100 ms, growing to 1 s, for 10 s"


def test_registration_is_the_same_after_a_loss() -> None:
    """Case 45: ten restarts, ten registrations, and hits after each."""
    with stage(generous) as s:
        for _ in range(10):
            s.turn(2000)
            s.attached()
            s.client.lookup("a", chain(1))
            assert s.client.hits("a").count == 1
            s.carrier.alive = False
            s.turn()
            assert not s.client.attached
        assert len(s.carriers) == 10


def test_a_refused_engine_stays_off_with_one_line_and_asks_again_slowly() -> None:
    def refusing(message: Any) -> list[Any]:
        return [refused()] if isinstance(message, Register) else daemon(message)

    with stage(refusing) as s:
        for _ in range(100):
            s.turn(50)
            every_call(s.client)
        assert s.notes == [
            "the sidecar refused this engine: register.world_size: 2 against 4 (fix: start kvferry with --tp-size 4)"
        ]
        assert len(s.carriers) == 1
        s.answer = daemon
        s.turn(10_000)
        s.attached()
        assert len(s.carriers) == 2


def test_a_refusal_that_passes_by_itself_is_asked_again_soon() -> None:
    def taken(message: Any) -> list[Any]:
        return [refused("register.engine_taken")] if isinstance(message, Register) else daemon(message)

    with stage(taken) as s:
        s.turn()
        s.turn()
        s.answer = daemon
        s.turn(600)
        s.attached()


def test_a_daemon_that_welcomes_nobody_is_given_up() -> None:
    with stage(lambda message: []) as s:
        s.turn(4000)
        assert len(s.carriers) == 1 and s.carrier.alive
        s.turn(1500)
        assert not s.carrier.alive
        s.turn(2000)
        assert len(s.carriers) == 2


def test_a_daemon_that_says_nothing_is_no_absent_one() -> None:
    with stage(lambda message: []) as s:
        for _ in range(200):
            s.turn(100)
        assert s.notes == ["the daemon at /nonexistent/kvferry does not answer: every lookup is a miss until it does"]
        s.is_there = s.carrier.alive = False
        s.turn(100)
        s.turn(2000)
        assert len(s.notes) == 2 and s.notes[1].startswith("no sidecar at /nonexistent/kvferry")
        s.is_there, s.answer = True, daemon
        s.turn(2000)
        s.attached()
        assert len(s.notes) == 3


def test_without_a_listener_a_refusal_is_a_warning_and_a_change_of_state_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refusing(message: Any) -> list[Any]:
        return [refused()] if isinstance(message, Register) else daemon(message)

    caplog.set_level(logging.INFO, "kvferry.client")
    for answer in (daemon, refusing):
        with stage(answer) as s:
            s.client._on_note = None
            for _ in range(3):
                s.turn()
    assert [(one.levelname, one.getMessage()[:31]) for one in caplog.records] == [
        ("INFO", "attached to the sidecar at /non"),
        ("WARNING", "the sidecar refused this engine"),
    ]


def test_messages_wait_for_room_in_the_window_and_keep_their_order() -> None:
    with stage() as s:
        s.attached()
        s.carrier.has_room = False
        s.client.lookup("a", chain(1))
        s.client.store("a", chain(2), [2])
        s.client.end_step()
        s.carrier.has_room = True
        s.client.poll()
        assert [type(message) for message in s.carrier.sent[-2:]] == [Lookup, Step]


def test_an_error_in_the_own_thread_does_not_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[int] = []

    def fail(self: Client) -> float:
        turns.append(1)
        raise RuntimeError("a bug of ours")

    with Client("e", world_size=1, key_bytes=8, num_blocks=1, block_tokens=1, run_dir=tmp_path) as client:
        monkeypatch.setattr("kvferry.client.background.AFTER_ERROR_S", 0.001)
        monkeypatch.setattr(Client, "housekeep", fail)
        end = time.monotonic() + 10
        while len(turns) < 3 and time.monotonic() < end:
            time.sleep(0.005)
        assert len(turns) >= 3 and client._thread.is_alive()


def test_leases_are_renewed_without_a_call_of_the_engine() -> None:
    """Case 10, 43: renewal hangs on no hook."""
    with stage(generous) as s:
        s.attached()
        s.client.lookup("a", chain(1))
        s.client.hits("a")
        before = len(s.carrier.sent)
        for _ in range(100):
            s.turn(50)
        assert len(s.carrier.sent) == before + 1
