"""Marks in the rank client: what an engine's device writes or says decides when a begin is sent. A device of lists."""

import mmap
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvferry import Directive, KVMemory, RankClient, from_arrays, shared_array
from kvferry.client.marks import Mark
from kvferry.proto.page import PageWriter
from kvferry.proto.tether import Begin, CancelTickets, MarkMode
from tests.client.dock import ONE_LOAD, Dock, attached, until
from tests.client.fakes import numbers_of

STORES = Directive(1, stores=(5,))


class Device:
    """Marks that come to pass when the test says so; a call from a thread that is not the engine's is a fault."""

    mode: MarkMode = "host"
    why = "for a test"

    def __init__(self) -> None:
        self.launched = self.done = 0
        self.broken = False
        self.closed = 0
        self.thread = threading.get_ident()

    def __call__(self, page: PageWriter, memory: mmap.mmap) -> "Device":
        return self

    def signal(self) -> Mark:
        self._look_at_thread()
        if self.broken:
            raise RuntimeError("the device is gone")
        self.launched += 1
        return Mark(0, self.launched)

    def passed(self) -> int:
        self._look_at_thread()
        return self.done

    def close(self) -> None:
        self.closed += 1

    def _look_at_thread(self) -> None:
        assert threading.get_ident() == self.thread, "a second thread called into the driver"


@pytest.fixture
def dock(tmp_path: Path) -> Iterator[Dock]:
    made = Dock(tmp_path)
    yield made
    made.close()


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def memory(device: Device) -> Iterator[KVMemory]:
    array, fd = shared_array((16, 64), np.uint8)
    yield replace(from_arrays({"l0": array}, array, fd, block_tokens=16), marking=device)
    os.close(fd)


def test_the_worker_is_told_how_marks_come(dock: Dock, tmp_path: Path, memory: KVMemory) -> None:
    with attached(dock, tmp_path, memory) as (rank, worker):
        assert rank.describe()["mark_mode"] == "host" and not rank.holding
        assert worker.asked.mark_mode == "host"
        assert worker.asked.pid_ns == os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116


def test_a_begin_waits_in_the_rank_until_a_later_call_finds_the_device_past_it(
    dock: Dock, tmp_path: Path, memory: KVMemory, device: Device
) -> None:
    with attached(dock, tmp_path, memory) as (rank, worker):
        rank.begin_stores(STORES)
        rank.poll()
        assert rank.holding and not worker.has_news()
        device.done = 1
        rank.poll()
        begin = worker.read(Begin)
        assert numbers_of(begin.tickets) == [5] and begin.mark == 0
        assert not rank.holding


def test_a_later_steps_begin_sends_what_was_held_before_it(
    dock: Dock, tmp_path: Path, memory: KVMemory, device: Device
) -> None:
    with attached(dock, tmp_path, memory) as (rank, worker):
        rank.begin_stores(STORES)
        device.done = 1
        rank.begin_loads(ONE_LOAD)
        assert numbers_of(worker.read(Begin).tickets) == [5]
        assert rank.holding, "the load's own mark is not passed"


def test_an_idle_step_waits_for_the_device_too(dock: Dock, tmp_path: Path, memory: KVMemory, device: Device) -> None:
    with attached(dock, tmp_path, memory) as (rank, worker):
        rank.begin_loads(ONE_LOAD)
        threading.Timer(0.02, setattr, (device, "done", 1)).start()
        until(lambda: rank.wait(0.005) or not rank.holding)
        assert numbers_of(worker.read(Begin).tickets) == [1]


def test_a_revoke_withdraws_what_is_held(dock: Dock, tmp_path: Path, memory: KVMemory, device: Device) -> None:
    with attached(dock, tmp_path, memory) as (rank, worker):
        page = worker.page()
        rank.begin_stores(STORES)
        rank.revoke(Directive(2, revokes=(5,)))
        device.done = 1
        assert rank.poll().stores == (5,)
        assert not worker.has_news() and page.revoked([5]) == {5}


def test_a_device_that_gives_no_mark_fails_loads_and_drops_stores_and_nothing_is_raised(
    dock: Dock, tmp_path: Path, memory: KVMemory, device: Device
) -> None:
    with attached(dock, tmp_path, memory) as (rank, worker):
        device.broken = True
        rank.begin_loads(ONE_LOAD)
        rank.begin_stores(STORES)
        report = rank.poll()
        assert not report.loads[0].ok and report.loads[0].failed_blocks == (10, 11) and report.stores == (5,)
        assert rank.attached and [worker.read(CancelTickets) for _ in range(2)], "of plans that it may have"


def test_only_the_engines_thread_asks_the_device(dock: Dock, tmp_path: Path, memory: KVMemory, device: Device) -> None:
    """A call from a second thread could end a CUDA graph that the engine is capturing."""
    with attached(dock, tmp_path, memory) as (rank, worker):
        rank.begin_stores(STORES)
        worker.close()
        until(lambda: not rank.attached)  # found out by the rank's own thread, which holds no begin any more
        assert rank.poll().stores == (5,)
        dock.worker().register(8)
        until(lambda: rank.attached)
    assert device.closed == 1


def test_memory_that_cannot_be_marked_leaves_nothing_open(tmp_path: Path, memory: KVMemory) -> None:
    def refuses(page: PageWriter, mapping: mmap.mmap) -> Device:
        raise RuntimeError("no")

    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(RuntimeError, match="no"):
        RankClient("e", 0, world_size=1, memory=replace(memory, marking=refuses), run_dir=tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
