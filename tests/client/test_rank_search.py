"""A rank that looks for a worker: it attaches, is refused, tries again, and never waits longer than said."""

import errno
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvferry import Directive, KVMemory, RankClient
from kvferry.client.types import ArgumentError
from kvferry.proto.control import Refused
from kvferry.proto.tether import Probe, RankRegister
from tests.client.dock import Dock, until


def test_without_a_sidecar_nothing_waits_and_every_load_fails_at_once(tmp_path: Path, memory: KVMemory) -> None:
    """Case 46: the engine starts and serves."""
    begin = time.monotonic()
    with RankClient("e", 0, world_size=1, memory=memory, run_dir=tmp_path) as rank:
        assert time.monotonic() - begin < 1
        assert not rank.attached
        for number in range(100):
            directive = Directive(number, loads=((number, (1,)),), stores=(1000 + number,), revokes=(5,), cancels=(3,))
            rank.revoke(directive)
            rank.begin_loads(directive)
            rank.begin_stores(directive)
            assert [end.ok for end in rank.poll().loads] == [False]


def test_that_a_worker_went_is_said_before_the_next_one_is_waited_for(
    dock: Dock, tmp_path: Path, memory: KVMemory
) -> None:
    notes: list[str] = []
    thread = threading.Thread(target=lambda: dock.worker().register())
    thread.start()
    with RankClient("e", 0, world_size=1, memory=memory, run_dir=tmp_path, on_note=notes.append):
        thread.join()
        dock.workers[0].sock.close()
        until(lambda: "the worker went away" in notes[-1])


def test_a_sidecar_that_comes_later_is_found(tmp_path: Path, memory: KVMemory) -> None:
    """Case 46: start the daemon later; the rank attaches by itself."""
    with RankClient("e", 0, world_size=1, memory=memory, run_dir=tmp_path) as rank:
        dock = Dock(tmp_path)
        try:
            dock.worker().register()
            until(lambda: rank.attached)
        finally:
            dock.close()
            until(lambda: not rank.attached)


def test_a_silent_worker_is_waited_for_no_longer_than_said(dock: Dock, tmp_path: Path, memory: KVMemory) -> None:
    begin = time.monotonic()
    with RankClient("e", 0, world_size=1, memory=memory, run_dir=tmp_path, attach_timeout_s=0.2) as rank:
        assert 0.15 < time.monotonic() - begin < 2
        assert not rank.attached


def test_a_process_without_a_free_descriptor_goes_on_without_a_worker(
    tmp_path: Path, memory: KVMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    notes: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(socket, "socket", full)
        rank = RankClient("e", 0, world_size=1, memory=memory, run_dir=tmp_path, on_note=notes.append, start=False)
    assert not rank.attached and "Too many open files" in notes[0]
    rank.close()


def test_a_refusal_is_one_line_with_its_fix(dock: Dock, tmp_path: Path, memory: KVMemory) -> None:
    """Case 71, 98: refused by name, and the engine runs without."""
    notes: list[str] = []

    def refuse() -> None:
        worker = dock.worker()
        worker.read(RankRegister)
        worker.say(Refused(code="layout.slot_bytes", text="65536 against 32768", fix="use one block size"))

    thread = threading.Thread(target=refuse)
    thread.start()
    with RankClient("e", 0, world_size=1, memory=memory, run_dir=tmp_path, on_note=notes.append) as rank:
        thread.join()
        assert not rank.attached
        (note,) = notes
        assert "layout.slot_bytes" in note and "65536 against 32768" in note and "use one block size" in note


@pytest.mark.parametrize(("code", "comes_again"), [("layout.probe", False), ("layout.slot_bytes", True)])
def test_memory_that_is_not_the_engines_own_is_shown_to_nobody_again(
    dock: Dock, tmp_path: Path, memory: KVMemory, monkeypatch: pytest.MonkeyPatch, code: str, comes_again: bool
) -> None:
    """Case 71: later attachments prove nothing, so a second one would be served with wrong bytes."""
    monkeypatch.setattr("kvferry.client.search.REFUSED_RETRY_S", 0.01)

    def refuse() -> None:
        worker = dock.worker()
        worker.read(RankRegister)
        worker.say(Refused(code=code, text="other bytes", fix="none"))
        worker.sock.close()

    thread = threading.Thread(target=refuse)
    thread.start()
    notes: list[str] = []
    with RankClient("e", 0, world_size=1, memory=memory, run_dir=tmp_path, on_note=notes.append):
        thread.join()
        assert bool(select.select([dock.listener], [], [], 10 if comes_again else 0.3)[0]) == comes_again
    assert ("not tried again" in notes[0]) != comes_again


def test_without_a_listener_a_refusal_is_a_warning(
    dock: Dock, tmp_path: Path, memory: KVMemory, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        worker = dock.worker()
        worker.read(RankRegister)
        worker.say(Refused(code="layout.slot_bytes", text="65536 against 32768", fix="use one block size"))

    thread = threading.Thread(target=refuse)
    thread.start()
    with RankClient("e", 0, world_size=1, memory=memory, run_dir=tmp_path):
        thread.join()
    (record,) = [one for one in caplog.records if one.name == "kvferry.client"]
    assert record.levelname == "WARNING" and "layout.slot_bytes" in record.getMessage()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rank": -1}, "rank = -1 is outside 0..1"),
        ({"rank": 2}, "rank = 2 is outside 0..1"),
        ({"world_size": 65}, "world_size = 65 is outside 1..64"),
        ({"engine_id": ""}, "engine_id is ''; it must be a text that is not empty"),
        ({"facts": {"dtype": "d" * 4097}}, "fact 'dtype' has 4097 characters; at most 4096 are allowed"),
    ],
)
def test_a_rank_that_no_worker_could_take_is_told_at_once(
    wrong: dict[str, Any], said: str, tmp_path: Path, memory: KVMemory
) -> None:
    sane: dict[str, Any] = {"engine_id": "e", "rank": 0, "world_size": 2}
    with pytest.raises(ArgumentError) as told:
        RankClient(**{**sane, **wrong}, memory=memory, run_dir=tmp_path)
    assert str(told.value) == said


def test_probes_are_written_for_the_first_attachment_only_and_restored(
    dock: Dock, tmp_path: Path, memory: KVMemory
) -> None:
    """Case 71: a stamped round trip before the first store; later the blocks belong to the running engine."""
    log: list[str] = []

    @contextmanager
    def probing() -> Iterator[tuple[Probe, ...]]:
        log.append("written")
        yield (Probe(handle=0, offset=0, expect=b"x" * 64),)
        log.append("restored")

    probed = KVMemory(memory.layout, memory.fds, probing)
    asked: list[RankRegister] = []

    def serve() -> None:
        asked.append(dock.worker().register())

    thread = threading.Thread(target=serve)
    thread.start()
    with RankClient("e", 0, world_size=1, memory=probed, run_dir=tmp_path) as rank:
        thread.join()
        assert rank.attached and log == ["written", "restored"]
        dock.workers[0].close()
        asked.append(dock.worker().register(8))
        assert [len(each.probes) for each in asked] == [1, 0]
        assert log == ["written", "restored"]
        until(lambda: rank.attached)
        dock.workers[1].sock.close()


def test_probes_are_written_before_the_rank_knocks_and_not_where_nothing_listens(
    dock: Dock, tmp_path: Path, memory: KVMemory
) -> None:
    """The first work of a GPU may take longer than a worker's door waits for who says nothing."""
    log: list[str] = []
    thread = threading.Thread(target=lambda: dock.worker().register())

    @contextmanager
    def probing() -> Iterator[tuple[Probe, ...]]:
        log.append("knocked" if select.select([dock.listener], [], [], 0)[0] else "written")
        thread.start()
        yield (Probe(handle=0, offset=0, expect=b"x" * 64),)

    probed = KVMemory(memory.layout, memory.fds, probing)
    with RankClient("e", 0, world_size=1, memory=probed, run_dir=tmp_path / "nobody", start=False) as rank:
        assert not rank.attached and log == []
    with RankClient("e", 0, world_size=1, memory=probed, run_dir=tmp_path, start=False) as rank:
        thread.join()
        assert rank.attached and log == ["written"] and len(dock.workers[0].asked.probes) == 1
        dock.workers[0].sock.close()
