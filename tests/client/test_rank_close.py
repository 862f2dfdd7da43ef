"""A rank that is closed: it waits within bounds, and what a worker may still write stays its own until the proof."""

import threading
import time
from pathlib import Path
from typing import Any

from kvferry import Directive, KVMemory, LoadEnd, Outcome, RankClient
from kvferry.client.rank import _left_behind
from kvferry.proto.tether import Detach, RankRegister
from tests.client.dock import ONE_LOAD, Dock, attached, until


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
