"""The connector's rank half without vLLM: the rank client is a fake whose words the test gives. Runs everywhere."""

import pytest
from fake_sidecar import FakeRankClient, FakeSidecar

from kvferry.client.types import Directive, LoadEnd, RankReport
from kvferry.proto.outcome import Outcome
from kvferry.vllm.rank import IDLE_MOST_S, IDLE_WAIT_S, LAST_WORD_NS, RankHalf
from kvferry.vllm.work import LoadTimes, RankWords, StepWork


class Ranks(FakeRankClient):
    """A rank client whose words the test gives: its worker says nothing by itself."""

    def __init__(self) -> None:
        super().__init__(FakeSidecar(0), 0)
        self.report = RankReport()
        self.begun: list[Directive] = []
        self._open: set[int] = set()

    def begin_loads(self, directive: Directive) -> None:
        self._open.update(ticket for ticket, _ in directive.loads)

    def begin_stores(self, directive: Directive) -> None:
        self.begun.append(directive)

    @property
    def open_loads(self) -> frozenset[int]:
        return frozenset(self._open)

    def poll(self) -> RankReport:
        report, self.report = self.report, RankReport()
        self._open.difference_update(end.ticket for end in report.loads)
        return report


def work(*loads: tuple[int, str, tuple[int, ...]]) -> StepWork:
    return StepWork(Directive(1, tuple((t, blocks) for t, _, blocks in loads)), {t: name for t, name, _ in loads})


def test_a_rank_names_each_load_once_with_its_bad_blocks_in_the_same_breath() -> None:
    """Case 5: a load that filled not all of its blocks is never taken for a good one."""
    client = Ranks()
    half = RankHalf(client)
    half.begin_loads(work((1, "a", (5, 6)), (2, "b", (7, 8))))
    assert half.finished() == set()
    client.report = RankReport(loads=(LoadEnd(1, True), LoadEnd(2, False, (8,)), LoadEnd(9, False, (3,))))
    assert half.finished() == {"a", "b"}
    assert half.failed_blocks() == {8}
    assert (half.finished(), half.failed_blocks()) == (set(), set())


def test_a_rank_without_a_client_fails_all_loads_at_once() -> None:
    half = RankHalf(None)
    half.begin_loads(work((1, "a", (5, 6))))
    half.begin_loads(StepWork(Directive(0), {}, {"b": (9,)}))
    assert half.finished() == {"a", "b"}
    assert half.failed_blocks() == {5, 6, 9}


def test_a_rank_that_failed_itself_asks_its_worker_to_go_and_fails_no_load_that_it_may_still_write() -> None:
    """Cases 10, 21: neither a failure of ours nor a time limit proves that a hanging worker writes no more."""
    client, clock = Ranks(), [0]
    half = RankHalf(client, now_ns=lambda: clock[0])
    half.begin_loads(work((1, "a", (5, 6))))
    half.switch_off()
    assert half.finished() == set() and not client.closed
    clock[0] = LAST_WORD_NS + 1
    for _ in range(3):
        assert half.finished() == set() and client.closed
        clock[0] += LAST_WORD_NS
    client.report = RankReport(loads=(LoadEnd(1, False, (5, 6), Outcome.WORKER_DIED),))
    assert half.finished() == {"a"} and half.failed_blocks() == {5, 6}
    assert half.finished() == set()


def test_a_rank_that_failed_itself_goes_at_once_if_no_load_is_open_and_after_the_last_one_else() -> None:
    """Detached it is away for the sidecar too, and nothing more is offered to its engine."""
    idle, busy = Ranks(), Ranks()
    half = RankHalf(idle)
    half.switch_off()
    assert half.finished() == set() and idle.closed
    half = RankHalf(busy)
    half.begin_loads(work((1, "a", (5, 6))))
    half.switch_off()
    assert half.finished() == set() and not busy.closed
    busy.report = RankReport(loads=(LoadEnd(1, True),))
    assert half.finished() == {"a"} and busy.closed and half.failed_blocks() == set()


def test_loads_that_a_failure_kept_from_the_client_fail_at_once() -> None:
    """No worker was told to write them, so none does; and none of them is left without a word."""

    class Breaks(Ranks):
        is_broken = False

        def begin_loads(self, directive: Directive) -> None:
            if self.is_broken:
                raise RuntimeError("boom")
            super().begin_loads(directive)

    client = Breaks()
    half = RankHalf(client)
    half.begin_loads(work((1, "older", (3,))))
    client.is_broken = True
    with pytest.raises(RuntimeError):
        half.begin_loads(work((2, "a", (5, 6))))
    half.switch_off()
    assert half.finished() == {"a"} and half.failed_blocks() == {5, 6}
    assert not client.closed, "the older one is still to end"


def test_an_end_that_comes_while_the_rank_looks_is_heard_and_not_taken_for_a_lost_load() -> None:
    class Quick(Ranks):
        @property
        def open_loads(self) -> frozenset[int]:
            seen, self._open = frozenset(self._open), set()
            self.report = RankReport(loads=(LoadEnd(1, True),))
            return seen

    half = RankHalf(Quick())
    half.begin_loads(work((1, "a", (5, 6))))
    half.switch_off()
    assert half.finished() == {"a"} and half.failed_blocks() == set()


def test_the_times_of_two_ranks_are_the_slower_ones() -> None:
    one, two = RankWords({"a": LoadTimes(1, 9, 10)}), RankWords({"a": LoadTimes(5, 2, 11), "b": LoadTimes(1, 1, 1)})
    assert one.aggregate(two).times == {"a": LoadTimes(5, 9, 11), "b": LoadTimes(1, 1, 1)}


def test_a_rank_says_while_it_holds_begins_back_and_once_that_it_does_no_more() -> None:
    client = Ranks()
    half = RankHalf(client)
    assert half.words() is None
    client.holding = True
    for _ in range(2):
        said = half.words()
        assert said is not None and said.is_holding
    client.holding = False
    said = half.words()
    assert said is not None and not said.is_holding
    assert half.words() is None
    assert RankWords(is_holding=True).aggregate(RankWords()).is_holding, "one rank of many is enough"


STORES = StepWork(Directive(1, stores=(7, 8)))


def test_stores_that_begin_after_the_words_of_their_step_count_as_held_back() -> None:
    """An engine that speculates launches its draft after the words; if it then goes idle, nobody would send them."""
    client = Ranks()
    half = RankHalf(client)
    half.begin_loads(STORES)
    half.finished()
    said = half.words()
    assert said is not None and said.is_holding, "so that one more step comes"
    half.begin_stores(STORES)
    client.holding = True  # its device is not past them
    half.begin_loads(StepWork(Directive(2), is_idle=True))
    half.finished()
    said = half.words()
    assert said is not None and said.is_holding
    client.holding = False
    half.begin_loads(StepWork(Directive(3), is_idle=True))
    half.finished()
    said = half.words()
    assert said is not None and not said.is_holding
    assert [directive.stores for directive in client.begun] == [(7, 8)]


def test_stores_that_begin_before_the_words_ask_for_no_step() -> None:
    half = RankHalf(Ranks())
    half.begin_loads(STORES)
    half.begin_stores(STORES)
    half.finished()
    assert half.words() is None


def test_stores_that_the_engine_never_came_to_begin_with_the_next_step_but_for_those_that_it_revokes() -> None:
    """Stages of a pipeline before the last one, where the engine speculates."""
    client = Ranks()
    half = RankHalf(client)
    half.begin_loads(STORES)
    half.finished()
    half.words()
    half.begin_loads(StepWork(Directive(2, stores=(9,), revokes=(8,))))
    assert client.begun == [Directive(2, stores=(7, 8), revokes=(8,))], "the client leaves revoked ones out"
    half.begin_loads(StepWork(Directive(3)))
    assert client.begun[1:] == [Directive(3, stores=(9,))]
    half.begin_loads(StepWork(Directive(4)))
    assert len(client.begun) == 2


def test_a_rank_sleeps_only_in_steps_that_compute_nothing() -> None:
    """Steps that only wait for loads would otherwise take the processor from the copies they wait for."""
    client = Ranks()
    waits: list[float] = []
    client.wait = waits.append  # type: ignore[method-assign]
    half = RankHalf(client)
    half.begin_loads(work((1, "a", (5,))))
    assert half.finished() == set()
    assert waits == []
    half.begin_loads(StepWork(Directive(2), is_idle=True))
    half.finished()
    assert waits == [IDLE_WAIT_S]
    client.report = RankReport(loads=(LoadEnd(1, True),))
    half.begin_loads(StepWork(Directive(3), is_idle=True))
    assert half.finished() == {"a"}
    assert len(waits) == 1


def test_a_word_on_a_store_ends_no_wait_for_a_load() -> None:
    """The next look would come after an empty step, and vLLM's pause between two of them."""
    client = Ranks()
    now, waits = [0], list[float]()
    said = [RankReport(stores=(7,)), RankReport(stores=(8,)), RankReport(loads=(LoadEnd(1, True),))]

    def wait(timeout_s: float) -> None:
        waits.append(round(timeout_s, 6))
        now[0] += 10**6
        client.report = said.pop(0)

    client.wait = wait  # type: ignore[method-assign]
    half = RankHalf(client, lambda: now[0])
    half.begin_loads(work((1, "a", (5,))))
    half.begin_loads(StepWork(Directive(2), is_idle=True))
    assert half.finished() == {"a"}
    assert waits == [round(IDLE_WAIT_S - ms / 1000, 6) for ms in range(3)]


def test_words_on_stores_make_no_wait_longer() -> None:
    client = Ranks()
    now = [0]

    def wait(timeout_s: float) -> None:
        now[0] += 10**6
        client.report = RankReport(stores=(7,))

    client.wait = wait  # type: ignore[method-assign]
    half = RankHalf(client, lambda: now[0])
    half.begin_loads(work((1, "a", (5,))))
    half.begin_loads(StepWork(Directive(2), is_idle=True))
    assert half.finished() == set()
    assert now[0] == IDLE_WAIT_S * 1e9


def test_the_longer_it_takes_the_longer_a_rank_sleeps_and_never_longer_than_a_frame() -> None:
    client = Ranks()
    waits: list[float] = []
    client.wait = waits.append  # type: ignore[method-assign]
    clock = iter(range(0, 10**12, 16 * 10**6))  # each look at the clock comes 16 ms after the one before
    half = RankHalf(client, lambda: next(clock))
    half.begin_loads(work((1, "a", (5,))))
    for step in range(2, 12):
        half.begin_loads(StepWork(Directive(step), is_idle=True))
        half.finished()
    assert waits[0] == IDLE_WAIT_S
    assert waits == sorted(waits)
    assert waits[-1] == IDLE_MOST_S
    half.begin_loads(work((2, "b", (6,))))
    half.begin_loads(StepWork(Directive(12), is_idle=True))
    half.finished()
    assert waits[-1] == IDLE_WAIT_S, "a step that computes begins a new row"


def test_a_quiet_time_between_two_idle_steps_is_no_waiting() -> None:
    """The first step after minutes without a request would sleep its longest otherwise."""
    client = Ranks()
    waits: list[float] = []
    client.wait = waits.append  # type: ignore[method-assign]
    now = [0]
    half = RankHalf(client, lambda: now[0])
    half.begin_loads(work((1, "a", (5,))))
    half.begin_loads(StepWork(Directive(2), is_idle=True))
    half.finished()
    now[0] += 600 * 10**9
    half.begin_loads(StepWork(Directive(3), is_idle=True))
    half.finished()
    assert waits == [IDLE_WAIT_S, IDLE_WAIT_S]
