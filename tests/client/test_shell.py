"""The scheduler side as an engine meets it: whatever its sidecar does, every call answers and none raises."""

from typing import Any

import pytest

from kvferry import Reason
from kvferry.proto.control import Goodbye, Hello
from kvferry.proto.hot import Lookup, Step
from tests.client.fakes import chain
from tests.client.stage import every_call, stage


@pytest.mark.parametrize("deed", ["send", "flush", "receive", "tick", "wait"])
def test_a_link_that_breaks_in_any_deed_never_reaches_the_engine(deed: str) -> None:
    with stage() as s:
        s.attached()
        s.carrier.broken = {deed}
        every_call(s.client)
        s.turn()
        every_call(s.client)


def test_no_sidecar_answers_every_call() -> None:
    """Case 46: a hundred requests without a daemon are a hundred misses."""
    with stage() as s:
        s.is_there = False
        s.carrier.alive = False
        s.turn()
        for _ in range(100):
            every_call(s.client)
        assert not s.client.attached


@pytest.mark.parametrize(
    "message",
    [None, "text", 17, object(), Goodbye(), Hello(role="client"), Step(1, 1, 8), Lookup(1, 1, 1, 0, 8, b"")],
)
def test_messages_that_do_not_belong_here_are_counted(message: Any) -> None:
    """Case 21: a sidecar can never raise in the engine."""
    with stage() as s:
        s.attached()
        s.carrier.inbox = [message]
        every_call(s.client)
        assert s.client.counters.stale >= 1


def test_malformed_columns_drop_the_link_and_never_reach_the_engine() -> None:
    """The codec refuses these; should one get through, the client is off, not broken."""
    from kvferry.proto.hot import StepAnswer

    with stage() as s:
        s.attached()
        s.client.store("a", chain(1), [1])
        s.client.end_step()
        s.carrier.inbox = [StepAnswer(1, 1, tickets=b"odd", jobs=b"", accepted=b"", reasons=b"")]
        every_call(s.client)
        assert not s.client.attached
        assert any("internal error" in note for note in s.notes)


def test_a_second_client_of_an_engine_says_no_ticket_of_the_first() -> None:
    seen: list[int] = []
    for _ in range(2):
        with stage() as s:
            s.attached()
            seen += [s.client.store("r", chain(n), [n]) for n in range(3)]
            seen.append(s.client.load("l", chain(1), [9]))
    assert len(set(seen)) == 8 and seen == sorted(seen)


def test_a_listener_that_raises_is_not_the_engines_trouble() -> None:
    with stage() as s:
        s.client._on_note = lambda text: 1 / 0  # type: ignore[assignment, return-value]
        s.attached()
        every_call(s.client)


def test_after_close_every_call_answers_as_without_a_sidecar() -> None:
    with stage() as s:
        s.attached()
        s.client.close()
        s.client.close()
        assert isinstance(s.carrier.sent[-1], Goodbye)
        every_call(s.client)
        assert s.client.hits("r").reason in (Reason.OFF, Reason.NONE)
        assert not s.client.wait_attached(0.01)
