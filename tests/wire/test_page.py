"""The shared page: a revoke is never lost, not even to a ring that was overrun."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.proto import page
from kvferry.proto.limits import PAGE_BYTES
from kvferry.proto.page import PageReader, PageWriter


def pair() -> tuple[PageWriter, PageReader]:
    memory = memoryview(bytearray(PAGE_BYTES))
    return PageWriter(memory), PageReader(memory)


def test_a_page_that_no_writer_set_up_is_not_sound() -> None:
    memory = memoryview(bytearray(PAGE_BYTES))
    assert not PageReader(memory).is_sound()
    PageWriter(memory)
    assert PageReader(memory).is_sound()


def test_a_view_that_is_no_whole_page_is_an_error() -> None:
    with pytest.raises(ValueError, match="buffer"):
        PageReader(memoryview(bytearray(PAGE_BYTES - 1)))


def test_each_signal_moves_the_mark_on() -> None:
    writer, reader = pair()
    assert reader.mark() == 0
    assert [writer.signal(), writer.signal()] == [1, 2]
    assert reader.mark() == writer.mark() == 2


def test_a_revoked_ticket_is_seen_and_no_other() -> None:
    writer, reader = pair()
    writer.revoke([5, 7])
    assert reader.revoked([4, 5, 6]) == {5}
    assert reader.revoked([7, 8]) == {7}
    assert reader.revoked([5]) == {5}, "asked again before it is reported"


def test_a_reported_ticket_is_forgotten() -> None:
    writer, reader = pair()
    writer.revoke([5])
    assert reader.revoked([5]) == {5}
    reader.forget([5, 6])
    assert reader.revoked([5]) == set()


def test_a_full_ring_loses_nothing() -> None:
    writer, reader = pair()
    tickets = range(1, page.REVOKE_SLOTS + 1)
    writer.revoke(tickets)
    assert reader.revoked(range(1, 1000)) == set(tickets)
    assert reader.overflows == 0


def test_an_overrun_revokes_every_store_that_was_missed_even_one_asked_for_later() -> None:
    writer, reader = pair()
    writer.revoke(range(1, page.REVOKE_SLOTS + 45))  # 44 left the ring unseen
    assert 250 in reader.revoked([250])
    assert reader.revoked([3]) == {3}, "its revoke was never read, and it may hold mixed bytes"
    assert reader.overflows == 1


def test_an_overrun_costs_no_store_younger_than_what_was_missed() -> None:
    writer, reader = pair()
    writer.revoke(range(1, page.REVOKE_SLOTS + 45))
    reader.revoked([1])
    assert reader.revoked([1000]) == set()


def test_an_overrun_is_counted_once_and_later_revokes_are_read_as_ever() -> None:
    writer, reader = pair()
    writer.revoke(range(1, 1000))
    reader.revoked([1])
    writer.revoke([2000])
    assert reader.revoked([2000, 2001]) == {2000}
    assert reader.overflows == 1


def test_ticket_0_comes_back_from_the_call_that_met_an_overrun_and_from_no_other() -> None:
    writer, reader = pair()
    writer.revoke([1])
    assert reader.revoked([0, 1]) == {1}
    writer.revoke(range(2, 1000))
    assert reader.revoked([0, 2]) == {0, 2}
    assert reader.revoked([0, 3]) == {3}


def test_a_reader_that_comes_late_starts_at_the_present() -> None:
    memory = memoryview(bytearray(PAGE_BYTES))
    writer = PageWriter(memory)
    writer.revoke(range(1, 1000))
    reader = PageReader(memory)
    assert reader.revoked([2000]) == set()
    assert reader.overflows == 0


def test_revokes_of_stores_long_over_do_not_pile_up_and_none_is_lost() -> None:
    writer, reader = pair()
    for first in range(1, 20_000, 100):
        writer.revoke(range(first, first + 100))
        assert first + 50 in reader.revoked([first + 50, first + 100])
    assert reader.revoked([1, 19_999, 20_001]) == {1, 19_999}
    assert reader.overflows == 0


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from(["revoke", "ask", "forget"]), st.integers(1, 400), st.integers(1, 400)), max_size=40
    )
)
def test_no_revoke_is_ever_missed(steps: list[tuple[str, int, int]]) -> None:
    """Against a plain set: what was revoked and not forgotten is always answered as revoked."""
    writer, reader = pair()
    twin: set[int] = set()
    highest = 0
    for verb, start, count in steps:
        tickets = range(start, start + count)
        if verb == "revoke":
            writer.revoke(tickets)
            twin |= set(tickets)
            highest = max(highest, tickets[-1])
        elif verb == "ask":
            said = reader.revoked(tickets)
            assert said >= twin & set(tickets)
            assert not said - set(tickets)
            assert highest + 1 not in reader.revoked([highest + 1])
        else:
            reader.revoked(tickets)
            reader.forget(tickets)
            twin -= set(tickets)


def test_ended_copies_are_told_to_the_engines_side() -> None:
    writer, reader = pair()
    for ticket in (3, 4):
        reader.copy_ended(ticket)
    assert writer.copies_ended([2, 3, 4]) == {3, 4}


def test_the_ended_ring_keeps_the_latest() -> None:
    writer, reader = pair()
    for ticket in range(1, page.ENDED_SLOTS + 11):
        reader.copy_ended(ticket)
    assert writer.copies_ended(range(1, 1000)) == set(range(11, page.ENDED_SLOTS + 11))


def test_no_word_of_the_page_lies_on_another() -> None:
    spans = [
        (0, 1),
        (page.MARK, 1),
        (page.REVOKE_COUNT, 1),
        (page.ENDED_COUNT, 1),
        (page.REVOKE_FLOOR, 1),
        (page.REVOKE_RING, page.REVOKE_SLOTS),
        (page.ENDED_RING, page.ENDED_SLOTS),
    ]
    words = [word for start, count in spans for word in range(start, start + count)]
    assert len(words) == len(set(words))
    assert max(words) < page.WORDS
