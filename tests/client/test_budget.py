"""How long `hits` may wait: what is left of the step's budget, over all requests, and a request's patience."""

from typing import Any

from kvferry import Hits
from kvferry.proto.hot import Lookup, LookupAnswer
from kvferry.proto.outcome import Next
from tests.client.fakes import MS, chain
from tests.client.stage import daemon, generous, stage


def test_hits_waits_no_longer_than_the_steps_budget_over_all_requests() -> None:
    with stage() as s:
        s.attached()
        for name in ("a", "b", "c"):
            s.client.lookup(name, chain(1))
        begin_ns = s.clock.now_ns
        for name in ("a", "b", "c"):
            assert not s.client.hits(name).ready
        assert s.clock.now_ns - begin_ns == 2 * MS
        assert len(s.carrier.waits) == 1


def test_the_budget_is_whole_again_after_the_step() -> None:
    with stage() as s:
        s.attached()
        s.client.lookup("a", chain(1))
        for _ in range(3):
            s.client.hits("a")
            s.client.end_step()
        assert [round(each, 6) for each in s.carrier.waits] == [0.002] * 3


def test_an_engine_with_nothing_else_to_do_may_wait_longer() -> None:
    with stage() as s:
        s.attached()
        s.client.lookup("a", chain(1))
        begin_ns = s.clock.now_ns
        assert not s.client.hits("a", idle_s=0.005).ready
        assert s.clock.now_ns - begin_ns == 5 * MS
        assert not s.client.hits("a").ready, "it was of the same budget"
        assert s.clock.now_ns - begin_ns == 5 * MS
        s.client.end_step()
        assert not s.client.hits("a", idle_s=0.001).ready, "never less than the budget"
        assert s.clock.now_ns - begin_ns == 7 * MS
        assert s.client.hits("a", idle_s=1.0) == Hits(True), "never more than the patience"
        assert s.clock.now_ns - begin_ns == 27 * MS


def test_hits_returns_as_soon_as_its_answer_is_there() -> None:
    with stage(generous) as s:
        s.attached()
        s.carrier.answers_during_wait = True
        s.client.lookup("a", chain(1, 2))
        assert s.client.hits("a").count == 2
        assert len(s.carrier.waits) == 1


def test_a_daemon_that_never_answers_is_a_miss_after_the_patience() -> None:
    """Case 48: a request is not asked for ever."""
    with stage() as s:
        s.attached()
        s.client.lookup("a", chain(1))
        asked = 0
        while not (found := s.client.hits("a")).ready:
            asked += 1
            s.client.end_step()
        assert found == Hits(True) and 1 <= asked <= 11


def test_an_answered_pending_costs_no_budget() -> None:
    def pending(message: Any) -> list[Any]:
        if isinstance(message, Lookup):
            return [LookupAnswer(message.lookup, 0, int(Next.PENDING), 0, 0, 5, 0, 1)]
        return daemon(message)

    with stage(pending) as s:
        s.attached()
        s.client.lookup("a", chain(1))
        assert not s.client.hits("a").ready
        assert s.carrier.waits == []
