"""A rank with a worker played by the test over a real unix socket: served, left, hung, and never a wait."""

import array
import gc
import select
import threading
import time
from pathlib import Path

from kvferry import Directive, KVMemory, LoadEnd, Outcome, RankClient
from kvferry.proto.tether import Begin, CancelTickets
from tests.client.dock import ONE_LOAD, Dock, attached, until
from tests.client.fakes import numbers_of


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
