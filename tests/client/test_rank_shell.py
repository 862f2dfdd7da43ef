"""A rank with a worker played by the test over a real unix socket: attach, die, hang, come back, and never wait."""

import array
import errno
import gc
import mmap
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry import Directive, KVMemory, LoadEnd, Outcome, RankClient, from_arrays, shared_array
from kvferry.client.rank import _left_behind
from kvferry.client.types import ArgumentError
from kvferry.proto.codec import unpack
from kvferry.proto.columns import pack_u8, pack_u32, pack_u64
from kvferry.proto.control import Refused
from kvferry.proto.page import PageReader
from kvferry.proto.tether import (
    Begin,
    CancelTickets,
    Deframer,
    Detach,
    Probe,
    RankRegister,
    RankRegistered,
    Words,
    frame,
)
from tests.client.fakes import numbers_of

ONE_LOAD = Directive(1, loads=((1, (10, 11)),))


def until(question: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    end = time.monotonic() + timeout_s
    while not (answer := question()):
        assert time.monotonic() < end, f"not within {timeout_s} s"
        time.sleep(0.002)
    return answer


class Worker:
    """One accepted tether. Its process, for the rank's proof of death, is a sleeping child."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
        self.inbox: list[Any] = []
        self.fds: list[int] = []
        self._deframer = Deframer()

    def read(self, kind: type[Any], timeout_s: float = 5.0) -> Any:
        """The next message, which must be of this kind."""
        self.sock.settimeout(timeout_s)
        while not self.inbox:
            data, fds, _, _ = socket.recv_fds(self.sock, 1 << 16, 16)
            assert data, "the rank closed the tether"
            self.fds += fds
            self.inbox += [unpack(body) for body in self._deframer.feed(data)]
        message = self.inbox.pop(0)
        assert isinstance(message, kind), message
        return message

    def has_news(self) -> bool:
        """Whether the rank has said more."""
        return bool(self.inbox or select.select([self.sock], [], [], 0)[0])

    def say(self, message: Any) -> None:
        self.sock.sendall(frame(message))

    def register(self, number: int = 7, *, with_pidfd: bool = True) -> RankRegister:
        """Take the registration and serve the rank."""
        asked: RankRegister = self.read(RankRegister)
        self.asked = asked
        verdict = RankRegistered(worker=number, boot=1, pid=self.process.pid, mark_mode="word", slots=8)
        if with_pidfd:
            pidfd = os.pidfd_open(self.process.pid)
            socket.send_fds(self.sock, [frame(verdict)], [pidfd])
            os.close(pidfd)
        else:
            self.say(verdict)
        return asked

    def word(self, ticket: int, outcome: Outcome = Outcome.OK, failed: tuple[int, ...] = ()) -> None:
        zero = pack_u32([0])
        counts, blocks = pack_u32([len(failed)]), pack_u32(failed)
        self.say(Words(pack_u64([ticket]), pack_u8([1]), pack_u8([outcome]), zero, zero, counts, blocks))

    def page(self) -> PageReader:
        return PageReader(memoryview(mmap.mmap(self.fds[-1], 4096)))

    def die(self) -> None:
        """The process ends; its tether stays, as if a forked child held it."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.sock.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        while self.fds:
            os.close(self.fds.pop())


class Dock:
    """A rank's listener, and the workers it was given."""

    def __init__(self, run_dir: Path) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(run_dir / "rank-0.sock"))
        self.listener.listen(8)
        self.workers: list[Worker] = []

    def worker(self, timeout_s: float = 5.0) -> Worker:
        self.listener.settimeout(timeout_s)
        self.workers.append(Worker(self.listener.accept()[0]))
        return self.workers[-1]

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.listener.close()


@pytest.fixture
def dock(tmp_path: Path) -> Iterator[Dock]:
    made = Dock(tmp_path)
    yield made
    made.close()


@pytest.fixture
def memory() -> Iterator[KVMemory]:
    array_, fd = shared_array((16, 64), np.uint8)
    yield from_arrays({"l0": array_}, array_, fd, block_tokens=16)
    os.close(fd)


@contextmanager
def attached(dock: Dock, tmp_path: Path, memory: KVMemory, **options: Any) -> Iterator[tuple[RankClient, Worker]]:
    """A rank client served by one worker."""
    found: list[Worker] = []

    def serve() -> None:
        found.append(dock.worker())
        found[0].register()

    thread = threading.Thread(target=serve)
    thread.start()
    rank = RankClient("engine", 0, world_size=1, memory=memory, run_dir=tmp_path, on_note=lambda _: None, **options)
    thread.join()
    try:
        yield rank, found[0]
    finally:
        for worker in dock.workers:
            worker.sock.close()
        rank.close()


def test_the_first_attachment_is_waited_for(dock: Dock, tmp_path: Path, memory: KVMemory) -> None:
    with attached(dock, tmp_path, memory) as (rank, worker):
        assert rank.attached and rank.worker_pid == worker.process.pid
        assert len(worker.fds) == 2, "the memory's descriptor, then the page's"
        assert worker.page().is_sound()


def test_a_load_goes_there_and_its_word_comes_back(dock: Dock, tmp_path: Path, memory: KVMemory) -> None:
    with attached(dock, tmp_path, memory) as (rank, worker):
        page = worker.page()
        rank.begin_loads(ONE_LOAD)
        begin = worker.read(Begin)
        assert numbers_of(begin.tickets) == [1] and 0 < begin.mark <= page.mark()
        worker.word(1)
        assert until(lambda: rank.poll().loads) == (LoadEnd(1, True),)


def test_revokes_are_in_the_page_when_the_call_returns(dock: Dock, tmp_path: Path, memory: KVMemory) -> None:
    with attached(dock, tmp_path, memory) as (rank, worker):
        page = worker.page()
        rank.revoke(Directive(1, revokes=(5, 6)))
        assert page.revoked([4, 5, 6]) == {5, 6}


def test_marks_go_on_counting_over_workers(dock: Dock, tmp_path: Path, memory: KVMemory) -> None:
    with attached(dock, tmp_path, memory) as (rank, worker):
        rank.begin_loads(ONE_LOAD)
        first = worker.read(Begin).mark
        worker.close()
        second = dock.worker()
        second.register(8)
        until(lambda: rank.describe()["worker"] == 8)
        rank.begin_loads(Directive(2, loads=((2, (12,)),)))
        assert second.read(Begin).mark > first


def test_the_end_of_a_tether_fails_no_load_and_the_death_of_its_process_does(
    dock: Dock, tmp_path: Path, memory: KVMemory
) -> None:
    """Case 21: first the notice, then the proof."""
    with attached(dock, tmp_path, memory) as (rank, worker):
        rank.begin_loads(ONE_LOAD)
        worker.sock.close()
        until(lambda: not rank.attached)
        for _ in range(20):
            assert rank.poll().loads == ()
        worker.die()
        assert until(lambda: rank.poll().loads) == (LoadEnd(1, False, (10, 11), Outcome.WORKER_DIED),)


def test_a_death_is_seen_through_a_tether_that_a_child_keeps_open(dock: Dock, tmp_path: Path, memory: KVMemory) -> None:
    with attached(dock, tmp_path, memory) as (rank, worker):
        rank.begin_loads(ONE_LOAD)
        worker.die()
        assert until(lambda: rank.poll().loads)[0].outcome is Outcome.WORKER_DIED


def test_a_word_said_before_the_death_counts(dock: Dock, tmp_path: Path, memory: KVMemory) -> None:
    with attached(dock, tmp_path, memory, start=False) as (rank, worker):
        rank.begin_loads(ONE_LOAD)
        worker.word(1)
        worker.die()
        assert until(lambda: rank.poll().loads) == (LoadEnd(1, True),)


def test_a_worker_without_a_pidfd_is_watched_by_its_number(dock: Dock, tmp_path: Path, memory: KVMemory) -> None:
    rank = RankClient("e", 0, world_size=1, memory=memory, run_dir=tmp_path, attach_timeout_s=0.01)
    try:
        dock.worker().close()
        worker = dock.worker()
        worker.register(with_pidfd=False)
        until(lambda: rank.attached)
        rank.begin_loads(ONE_LOAD)
        worker.die()
        assert until(lambda: rank.poll().loads)[0].outcome is Outcome.WORKER_DIED
    finally:
        worker.sock.close()
        rank.close()


def test_a_deadline_cancels_and_waits_on(dock: Dock, tmp_path: Path, memory: KVMemory) -> None:
    """Case 10: a hanging worker keeps the load's blocks until it speaks or dies."""
    with attached(dock, tmp_path, memory, load_timeout_s=0.05) as (rank, worker):
        rank.begin_loads(ONE_LOAD)
        worker.read(Begin)
        assert numbers_of(worker.read(CancelTickets).tickets) == [1]
        assert rank.poll().loads == ()
        worker.word(1, Outcome.CANCELLED, (10, 11))
        assert until(lambda: rank.poll().loads)[0].outcome is Outcome.CANCELLED


def test_a_worker_that_speaks_another_language_is_dropped_and_the_loads_wait_for_its_death(
    dock: Dock, tmp_path: Path, memory: KVMemory
) -> None:
    """Case 131: nothing on the wire raises in the engine."""
    with attached(dock, tmp_path, memory) as (rank, worker):
        rank.begin_loads(ONE_LOAD)
        worker.sock.sendall(b"\xff" * 64)
        until(lambda: not rank.attached)
        assert rank.poll().loads == ()
        worker.die()
        assert until(lambda: rank.poll().loads)[0].failed_blocks == (10, 11)


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


def test_closing_detaches_and_waits_for_the_worker_at_most_a_second(
    dock: Dock, tmp_path: Path, memory: KVMemory
) -> None:
    with attached(dock, tmp_path, memory) as (rank, worker):
        closer = threading.Thread(target=rank.close)
        closer.start()
        worker.read(Detach)
        worker.sock.close()
        closer.join(0.9)
        assert not closer.is_alive()
        rank.close()
    assert not rank.attached


def test_closing_ends_an_attachment_on_its_way_and_says_nothing_of_it(
    dock: Dock, tmp_path: Path, memory: KVMemory
) -> None:
    notes: list[str] = []
    options: dict[str, Any] = {"attach_timeout_s": 0.01, "on_note": notes.append}
    with RankClient("e", 0, world_size=1, memory=memory, run_dir=tmp_path, **options) as rank:
        dock.worker().close()
        dock.worker().read(RankRegister)
        said, begin = list(notes), time.monotonic()
        rank.close()
        assert time.monotonic() - begin < 0.9 and notes == said


def test_closing_beside_a_silent_worker_ends_within_bounds(dock: Dock, tmp_path: Path, memory: KVMemory) -> None:
    with attached(dock, tmp_path, memory) as (rank, _):
        begin = time.monotonic()
        rank.close()
        assert time.monotonic() - begin < 2.5
        rank.begin_loads(ONE_LOAD)
        assert [end.ok for end in rank.poll().loads] == [False]


def test_closing_without_waiting_does_not_wait_for_the_own_thread_either(
    dock: Dock, tmp_path: Path, memory: KVMemory
) -> None:
    """A rank that failed itself closes within a step."""
    is_caught, may_go = threading.Event(), threading.Event()

    def hang(_: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            is_caught.set()
            may_go.wait(10)

    thread = threading.Thread(target=lambda: dock.worker().register())
    thread.start()
    with RankClient("e", 0, world_size=1, memory=memory, run_dir=tmp_path, on_note=hang) as rank:
        thread.join()
        dock.listener.close()
        dock.workers[0].sock.close()
        assert is_caught.wait(10), "it says that the worker went away"
        begin = time.monotonic()
        rank.close(wait_s=0)
        assert time.monotonic() - begin < 0.5
        may_go.set()


def test_a_load_open_at_close_ends_with_the_workers_death_and_not_before(
    dock: Dock, tmp_path: Path, memory: KVMemory
) -> None:
    """Cases 10, 21: a worker that hangs may write on, whoever has stopped listening to it."""
    with attached(dock, tmp_path, memory) as (rank, worker):
        rank.begin_loads(ONE_LOAD)
        rank.close(wait_s=0.05)
        for _ in range(20):
            assert rank.poll().loads == ()
        assert rank.open_loads == {1} and not rank.attached
        worker.die()
        assert until(lambda: rank.poll().loads) == (LoadEnd(1, False, (10, 11), Outcome.WORKER_DIED),)
        assert rank.open_loads == set() and rank.poll().loads == ()


def test_a_word_said_before_the_worker_left_counts_at_close(dock: Dock, tmp_path: Path, memory: KVMemory) -> None:
    with attached(dock, tmp_path, memory, start=False) as (rank, worker):
        rank.begin_loads(ONE_LOAD)
        worker.word(1)
        worker.sock.close()
        rank.close()
        assert rank.poll().loads == (LoadEnd(1, True),)


def test_a_store_open_at_close_is_revoked_and_one_that_has_ended_is_not(
    dock: Dock, tmp_path: Path, memory: KVMemory
) -> None:
    """Law 2: the memory of an engine that has closed may mean something else, and its worker may not know it yet."""
    with attached(dock, tmp_path, memory) as (rank, worker):
        page = worker.page()
        rank.begin_stores(Directive(1, stores=(5, 6)))
        worker.word(5)
        until(lambda: rank.poll().stores)
        rank.close(wait_s=0)
        assert page.revoked([5, 6]) == {6}


def test_memory_that_a_worker_may_still_touch_outlives_a_closed_client(
    dock: Dock, tmp_path: Path, memory: KVMemory
) -> None:
    """Law 1: what is freed is given to somebody else. An engine that has closed asks no more, and has it back."""
    with attached(dock, tmp_path, memory) as (rank, worker):
        rank.begin_loads(ONE_LOAD)
        rank.close(wait_s=0)
        assert rank in _left_behind, "which keeps the memory too"
        worker.die()
        until(lambda: rank not in _left_behind)
        assert rank.poll().loads == (LoadEnd(1, False, (10, 11), Outcome.WORKER_DIED),)


def test_waiting_ends_with_the_death_of_a_worker_whose_tether_is_gone(
    dock: Dock, tmp_path: Path, memory: KVMemory
) -> None:
    """An idle step would otherwise spin until the proof comes."""
    with attached(dock, tmp_path, memory) as (rank, worker):
        rank.begin_loads(ONE_LOAD)
        rank.close(wait_s=0)
        killer = threading.Timer(0.1, worker.process.kill)
        killer.start()
        begin = time.monotonic()
        rank.wait(20)
        assert time.monotonic() - begin < 10
        killer.join()
        assert until(lambda: rank.poll().loads)[0].outcome is Outcome.WORKER_DIED


def test_a_worker_hears_at_once_what_was_not_begun_before_its_verdict_came(
    dock: Dock, tmp_path: Path, memory: KVMemory
) -> None:
    with RankClient("e", 0, world_size=1, memory=memory, run_dir=tmp_path, attach_timeout_s=0.01, start=False) as rank:
        dock.worker().close()
        rank.begin_stores(Directive(1, stores=(5,)))
        thread = threading.Thread(target=lambda: dock.worker().register(8))
        thread.start()
        rank._attach(5.0)
        thread.join()
        assert numbers_of(dock.workers[1].read(CancelTickets).tickets) == [5]
        dock.workers[1].sock.close()


def test_nothing_is_left_open(tmp_path: Path, memory: KVMemory) -> None:
    """Case 30: descriptors, mappings and threads go with their owner."""

    def open_fds() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    until(lambda: not any(thread.name == "kvferry-left-behind" for thread in threading.enumerate()))
    gc.collect()  # what earlier tests left in cycles is not ours
    before, threads = open_fds(), threading.active_count()
    for number in range(3):
        run_dir = tmp_path / str(number)
        run_dir.mkdir()
        dock = Dock(run_dir)
        with attached(dock, run_dir, memory) as (rank, worker):
            rank.begin_loads(ONE_LOAD)
            dock.listener.close()
            worker.close()
            until(lambda rank=rank: rank.poll().loads)
        dock.close()
        del rank, worker  # the page's mapping goes with its last user
    gc.collect()
    assert (open_fds(), threading.active_count()) == (before, threads)


def test_a_flood_of_begins_is_kept_until_the_worker_reads(dock: Dock, tmp_path: Path, memory: KVMemory) -> None:
    """A stopped worker fills its socket; the engine's calls go on returning at once and nothing is lost."""
    with attached(dock, tmp_path, memory) as (rank, worker):
        begin = time.monotonic()
        for number in range(1500):
            rank.begin_stores(Directive(number, stores=tuple(range(number * 20 + 1, number * 20 + 21))))
        assert time.monotonic() - begin < 5
        seen = 0
        while seen < 30_000:
            rank.poll()
            if worker.inbox or select.select([worker.sock], [], [], 0.01)[0]:
                seen += len(array.array("Q", worker.read(Begin).tickets))
        assert seen == 30_000
