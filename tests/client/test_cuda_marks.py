"""Marks of an engine on a GPU, over a stub of the driver whose streams are threads that can be made to stand still."""

import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvferry import Directive, RankClient
from kvferry.client import cuda_marks
from kvferry.client.cuda_marks import CudaMarks
from kvferry.client.cuda_memory import export_cuda
from kvferry.client.marks import Mark
from kvferry.cuda.driver import CudaError
from kvferry.proto.page import PageWriter
from kvferry.proto.tether import Begin, CancelTickets, MarkMode
from tests.client.dock import ONE_LOAD, Dock, attached, until
from tests.client.fake_gpu import FakeEngine, GpuTensor
from tests.client.fakes import numbers_of
from tests.cuda.stubs import Stub

STANDS_STILL = "copy hang"  # the GPU's work, until the stub is told otherwise


class Page:
    """A shared page, and marks on it."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.fd = os.memfd_create("page")
        os.ftruncate(self.fd, 4096)
        self.memory = mmap.mmap(self.fd, 4096)
        self.writer = PageWriter(memoryview(self.memory))

    def marks(self, wanted: MarkMode | None = None, probe_s: float = 2.0) -> CudaMarks:
        engine = self.engine
        context = engine.driver.current_context()
        return CudaMarks(
            *(engine.driver, engine.device, context, self.writer, self.memory),
            current_stream=engine.stream,
            wanted=wanted,
            probe_s=probe_s,
        )


@pytest.fixture
def page(engine: FakeEngine) -> Iterator[Page]:
    made = Page(engine)
    yield made
    os.close(made.fd)


@contextmanager
def closing(marks: CudaMarks, engine: FakeEngine) -> Iterator[CudaMarks]:
    try:
        yield marks
    finally:
        engine.finish()
        marks.close()


def test_the_word_is_chosen_when_a_write_of_the_stream_is_seen(page: Page, engine: FakeEngine) -> None:
    with closing(page.marks(), engine) as marks:
        assert marks.mode == "word" and "was seen" in marks.why
        assert page.writer.mark() == 1


def test_the_word_moves_when_the_stream_gets_there_and_not_before(page: Page, engine: FakeEngine, stub: Stub) -> None:
    """Case 1: a copy begins after the engine's last write, or not at all."""
    with closing(page.marks(), engine) as marks:
        stub.control(STANDS_STILL)
        engine.launch()
        mark = marks.signal()
        assert mark == Mark(word=2) and marks.passed() == 0
        engine.launch()
        assert marks.signal() == Mark(word=3)
        assert page.writer.mark() == 1, "what was launched before has not run"
        stub.control("")
        until(lambda: page.writer.mark() == 3)


def test_one_mark_is_one_call(page: Page, engine: FakeEngine, stub: Stub) -> None:
    """Nothing else is put into the engine's stream, and nothing waits."""
    with closing(page.marks(), engine) as marks:
        before = len(stub.calls())
        marks.signal()
        (call,) = stub.calls()[before:]
        assert "cuStreamWriteValue64_v2" in call


@pytest.mark.parametrize(
    ("control", "why"),
    [
        ("attr 122 0", "cannot write 64-bit words"),
        ("cuMemHostRegister_v2 fail 801", "cuMemHostRegister_v2 failed"),
        ("cuStreamWriteValue64_v2 fail 801", "cuStreamWriteValue64_v2 failed"),
    ],
)
def test_events_order_begins_where_the_device_or_the_driver_cannot_write_words(
    page: Page, engine: FakeEngine, stub: Stub, control: str, why: str
) -> None:
    """Case 98: the fallback is stated, with its reason."""
    stub.control(control)
    with closing(page.marks(), engine) as marks:
        assert marks.mode == "host" and why in marks.why
        assert marks.signal() == Mark(word=0, hold=1)


def test_a_write_that_nobody_sees_within_the_bound_is_none(page: Page, engine: FakeEngine, stub: Stub) -> None:
    stub.control(STANDS_STILL)
    engine.launch()
    marks = page.marks(probe_s=0.02)
    assert marks.mode == "host" and "not seen within 0.02 s" in marks.why
    stub.control("")
    with closing(marks, engine):
        engine.finish()
        assert page.writer.mark() == 1, "it came late; no begin of this mode names a word"


def test_a_hold_passes_when_its_event_has_happened_and_in_order(page: Page, engine: FakeEngine, stub: Stub) -> None:
    with closing(page.marks("host"), engine) as marks:
        stub.control(STANDS_STILL)
        engine.launch()
        assert [marks.signal().hold, marks.signal().hold] == [1, 2]
        engine.now = 1  # idle: its event happens at once, and waits for its turn
        assert marks.signal().hold == 3
        assert marks.passed() == 0
        stub.control("")
        until(lambda: marks.passed() == 3)


def test_events_are_used_again(page: Page, engine: FakeEngine, stub: Stub) -> None:
    """Case 9: an event lives as long as somebody may ask it; few of them serve for ever."""
    with closing(page.marks("host"), engine) as marks:
        for number in range(1, 50):
            assert marks.signal().hold == number
            until(lambda number=number: marks.passed() == number)
        assert sum("cuEventCreate" in call for call in stub.calls()) == 1


def test_a_mark_on_another_stream_never_overtakes_one_of_the_home_stream(
    page: Page, engine: FakeEngine, stub: Stub
) -> None:
    """Two streams that write one word would let the earlier copies begin too soon."""
    with closing(page.marks(), engine) as marks:
        stub.control(STANDS_STILL)
        engine.launch()
        assert marks.signal() == Mark(word=2)
        engine.now = 1
        assert marks.signal() == Mark(word=0, hold=1), "held back on the host instead"
        until(lambda: marks.passed() == 1)
        assert page.writer.mark() == 1
        stub.control("")
        until(lambda: page.writer.mark() == 2)
        assert marks.signal() == Mark(word=3), "all of the old home's are through: this is the home now"
        until(lambda: page.writer.mark() == 3)


def test_a_failed_call_gives_no_mark_and_its_number_is_not_given_again(
    page: Page, engine: FakeEngine, stub: Stub
) -> None:
    with closing(page.marks(), engine) as marks:
        stub.control("cuStreamWriteValue64_v2 fail 700 times 1")
        with pytest.raises(CudaError, match="700"):
            marks.signal()
        assert marks.signal() == Mark(word=3)


def test_another_thread_of_the_engine_is_given_the_context(page: Page, engine: FakeEngine) -> None:
    """Case 98: driver calls of a thread without a context fail with 201."""
    with closing(page.marks(), engine) as marks:
        found: list[Mark] = []
        thread = threading.Thread(target=lambda: found.append(marks.signal()))
        thread.start()
        thread.join()
        assert found == [Mark(word=2)]


@pytest.mark.parametrize("wanted", [None, "host"])
def test_what_the_device_has_not_come_to_stays_where_it_is(
    page: Page, engine: FakeEngine, stub: Stub, wanted: MarkMode | None
) -> None:
    """An engine that ends waits for no device: a page that is written to and an event to come end with its process."""
    marks = page.marks(wanted)
    stub.control(STANDS_STILL)
    engine.launch()
    marks.signal()
    start = time.monotonic()
    marks.close()
    assert time.monotonic() - start < 1
    assert marks in cuda_marks._left_behind
    # This process goes on, and so gives back what another one's end would.
    stub.control("")
    engine.finish()
    cuda_marks._left_behind.remove(marks)
    if wanted is None:
        engine.driver.host_unregister(marks._address)
    else:
        assert marks.passed() == 1
        engine.driver.event_destroy(marks._free.pop())


# ---- with a rank client ------------------------------------------------------------------------------------


@pytest.fixture
def dock(tmp_path: Path) -> Iterator[Dock]:
    made = Dock(tmp_path)
    yield made
    made.close()


def lent(engine: FakeEngine, marks: MarkMode | None = None) -> object:
    base = engine.allocate(1 << 20)
    return export_cuda(
        {"l0": GpuTensor(base + 512, (16, 64), (64, 1))},
        block_tokens=16,
        driver=engine.driver,
        current_stream=engine.stream,
        marks=marks,
    )


def test_a_begin_is_sent_at_once_with_the_word_that_the_stream_will_write(
    dock: Dock, tmp_path: Path, engine: FakeEngine, stub: Stub
) -> None:
    with attached(dock, tmp_path, lent(engine)) as (rank, worker):  # type: ignore[arg-type]
        assert worker.asked.mark_mode == "word" and len(worker.fds) == 1, "the page's descriptor and no other"
        assert len(worker.asked.probes) == 1
        page = worker.page()
        stub.control(STANDS_STILL)
        engine.launch()
        rank.begin_loads(ONE_LOAD)
        begin = worker.read(Begin)
        assert begin.mark == 2 and page.mark() == 1
        stub.control("")
        until(lambda: page.mark() == 2)


def test_with_host_order_a_begin_is_sent_by_the_poll_that_finds_the_device_past_it(
    dock: Dock, tmp_path: Path, engine: FakeEngine, stub: Stub
) -> None:
    with attached(dock, tmp_path, lent(engine, "host")) as (rank, worker):  # type: ignore[arg-type]
        assert worker.asked.mark_mode == "host"
        stub.control(STANDS_STILL)
        engine.launch()
        rank.begin_stores(Directive(1, stores=(5,)))
        rank.poll()
        assert rank.holding and not worker.has_news()
        stub.control("")
        until(lambda: rank.poll() or not rank.holding)
        begin = worker.read(Begin)
        assert numbers_of(begin.tickets) == [5] and begin.mark == 0


def test_a_later_worker_is_shown_the_memory_without_a_call_of_the_driver(
    dock: Dock, tmp_path: Path, engine: FakeEngine, stub: Stub
) -> None:
    """Case 98: the thread that attaches has no context, and a call of it could end a graph's capture."""
    with attached(dock, tmp_path, lent(engine)) as (rank, worker):  # type: ignore[arg-type]
        first = worker.asked
        before = len(stub.calls())
        worker.close()
        second = dock.worker()
        second.register(8)
        until(lambda: rank.describe()["worker"] == 8)
        assert second.asked.layout == first.layout
        assert len(stub.calls()) == before


def test_a_driver_that_fails_in_the_middle_costs_misses_and_no_exception(
    dock: Dock, tmp_path: Path, engine: FakeEngine, stub: Stub
) -> None:
    with attached(dock, tmp_path, lent(engine)) as (rank, worker):  # type: ignore[arg-type]
        stub.control("cuStreamWriteValue64_v2 fail 700 times 2")
        rank.begin_loads(ONE_LOAD)
        rank.begin_stores(Directive(1, stores=(5,)))
        report = rank.poll()
        assert not report.loads[0].ok and report.stores == (5,)
        assert [worker.read(CancelTickets) for _ in range(2)], "nothing is begun, and its plans need not wait"


def test_without_a_sidecar_the_page_is_given_back_too(tmp_path: Path, engine: FakeEngine) -> None:
    memory = lent(engine)
    with RankClient("e", 0, world_size=1, memory=memory, run_dir=tmp_path, on_note=lambda _: None) as rank:  # type: ignore[arg-type]
        assert rank.describe()["mark_mode"] == "word"
