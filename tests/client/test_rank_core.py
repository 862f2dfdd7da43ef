"""Loads and stores of one rank: who may say that a load failed, and that each is reported once."""

from typing import Any

import pytest

from kvferry.client.rank_core import REMEMBERED_UNBEGUN, RankCore
from kvferry.client.types import Directive, LoadEnd
from kvferry.proto.codec import pack, unpack
from kvferry.proto.columns import pack_u8, pack_u32, pack_u64
from kvferry.proto.hot import Done
from kvferry.proto.outcome import Kind, Outcome
from kvferry.proto.tether import Begin, CancelTickets, Detach, Words
from tests.client.fakes import numbers_of

S = 1_000_000_000
ONE_LOAD = Directive(1, loads=((1, (10, 11)),))


def words(*said: tuple[int, Outcome, tuple[int, ...]], kind: Kind = Kind.LOAD) -> Any:
    """Words as they travel: (ticket, outcome, failed blocks)."""
    zeros = pack_u32([0] * len(said))
    message = Words(
        tickets=pack_u64([ticket for ticket, _, _ in said]),
        kinds=pack_u8([kind] * len(said)),
        outcomes=pack_u8([outcome for _, outcome, _ in said]),
        wait_us=zeros,
        copy_us=zeros,
        failed_counts=pack_u32([len(failed) for _, _, failed in said]),
        failed_blocks=pack_u32([block for _, _, failed in said for block in failed]),
    )
    return unpack(pack(message))


def cancelled(core: RankCore) -> list[int]:
    """Tickets that the worker is told not to wait for, and nothing else is said."""
    messages = core.outgoing()
    assert all(isinstance(message, CancelTickets) for message in messages), messages
    return [ticket for message in messages for ticket in numbers_of(message.tickets)]


def attached(worker: int = 7) -> RankCore:
    core = RankCore(5 * S)
    core.attach(worker)
    return core


def test_a_load_is_begun_with_its_mark_and_ends_with_the_word() -> None:
    core = attached()
    core.begin_loads(ONE_LOAD, 3, 0)
    (begin,) = core.outgoing()
    assert isinstance(begin, Begin) and begin.mark == 3 and numbers_of(begin.tickets) == [1]
    assert core.poll().loads == ()
    core.on_message(words((1, Outcome.OK, ())), 7)
    assert core.poll().loads == (LoadEnd(1, True),)
    assert core.poll().loads == () and core.open_loads == set()


def test_a_failed_load_names_its_failed_blocks() -> None:
    """Case 5: a load that did not fill every block is failed and says which."""
    core = attached()
    core.begin_loads(ONE_LOAD, 1, 0)
    core.on_message(words((1, Outcome.TORN, (11,))), 7)
    assert core.poll().loads == (LoadEnd(1, False, (11,), Outcome.TORN),)
    assert core.counters.loads_failed == 1


@pytest.mark.parametrize("failed", [(), (11, 99)])
def test_a_failure_that_names_no_block_or_a_foreign_one_fails_the_whole_load(failed: tuple[int, ...]) -> None:
    """Case 5: success is never the default, and no innocent block is named."""
    core = attached()
    core.begin_loads(ONE_LOAD, 1, 0)
    core.on_message(words((1, Outcome.COPY_FAILED, failed)), 7)
    assert core.poll().loads == (LoadEnd(1, False, (10, 11), Outcome.COPY_FAILED),)


def test_an_ok_that_names_failed_blocks_is_a_failure() -> None:
    core = attached()
    core.begin_loads(ONE_LOAD, 1, 0)
    core.on_message(words((1, Outcome.OK, (10,))), 7)
    assert core.poll().loads == (LoadEnd(1, False, (10,), Outcome.COPY_FAILED),)


def test_a_load_without_a_worker_fails_at_once() -> None:
    """Case 46: nothing was sent, so nothing can write there."""
    core = RankCore()
    core.begin_loads(ONE_LOAD, 1, 0)
    assert core.poll().loads == (LoadEnd(1, False, (10, 11), Outcome.NOT_BEGUN),)
    assert core.outgoing() == []


def test_loads_that_were_never_sent_fail_at_every_rank_attached_or_not() -> None:
    for core in (RankCore(), attached()):
        core.begin_loads(Directive(1, failed_loads=((4, (2, 3)),)), 0, 0)
        assert core.poll().loads == (LoadEnd(4, False, (2, 3), Outcome.NOT_PLANNED),)
        assert core.outgoing() == []


def test_the_end_of_the_tether_is_no_proof_and_the_workers_death_is() -> None:
    """Case 21: a crashed sidecar fails its loads only when it cannot write any more."""
    core = attached()
    core.begin_loads(ONE_LOAD, 1, 0)
    core.lost()
    assert not core.attached and core.poll().loads == () and core.awaited_workers() == {7}
    core.dead(7)
    assert core.poll().loads == (LoadEnd(1, False, (10, 11), Outcome.WORKER_DIED),)
    core.dead(7)
    assert core.poll().loads == () and core.awaited_workers() == set()


def test_a_deadline_cancels_once_and_goes_on_waiting() -> None:
    """Case 10: a time limit gives no block back while somebody may still write it."""
    core = attached()
    core.begin_loads(ONE_LOAD, 1, 0)
    core.outgoing()
    core.tick(5 * S - 1)
    assert core.outgoing() == [] and core.next_due_ns() == 5 * S
    core.tick(5 * S)
    (cancel,) = core.outgoing()
    assert isinstance(cancel, CancelTickets) and numbers_of(cancel.tickets) == [1]
    core.tick(500 * S)
    assert core.outgoing() == [] and core.poll().loads == () and core.open_loads == {1}
    assert core.next_due_ns() is None
    core.on_message(words((1, Outcome.CANCELLED, (10, 11))), 7)
    assert core.poll().loads == (LoadEnd(1, False, (10, 11), Outcome.CANCELLED),)


def test_a_load_nobody_wants_is_cancelled_and_still_gets_its_word() -> None:
    core = attached()
    core.begin_loads(ONE_LOAD, 1, 0)
    core.outgoing()
    core.begin_loads(Directive(2, cancels=(1, 99)), 0, 0)
    (cancel,) = core.outgoing()
    assert numbers_of(cancel.tickets) == [1]
    core.on_message(words((1, Outcome.OK, ())), 7)
    assert core.poll().loads == (LoadEnd(1, True),)


def test_a_word_of_another_worker_ends_nothing() -> None:
    """Case 23: a late word of an earlier life is counted, not booked on the new one."""
    core = attached(7)
    core.begin_loads(ONE_LOAD, 1, 0)
    core.attach(8)
    core.on_message(words((1, Outcome.OK, ())), 8)
    assert core.poll().loads == () and core.counters.stale == 1
    core.on_message(words((1, Outcome.OK, ())), 7)
    assert core.poll().loads == (LoadEnd(1, True),)


def test_each_load_is_reported_once_even_if_its_directive_or_its_word_comes_twice() -> None:
    core = attached()
    core.begin_loads(ONE_LOAD, 1, 0)
    core.begin_loads(ONE_LOAD, 2, 0)
    assert len(core.outgoing()) == 1
    core.on_message(words((1, Outcome.OK, ()), (1, Outcome.OK, ())), 7)
    core.on_message(words((1, Outcome.COPY_FAILED, (10,))), 7)
    core.dead(7)
    assert core.poll().loads == (LoadEnd(1, True),)
    assert core.counters.stale == 3


def test_stores_are_begun_after_the_forward_and_their_words_tell_that_the_blocks_are_free() -> None:
    core = attached()
    core.begin_stores(Directive(1, stores=(2, 3)), 9)
    (begin,) = core.outgoing()
    assert isinstance(begin, Begin) and begin.mark == 9 and numbers_of(begin.tickets) == [2, 3]
    core.on_message(words((3, Outcome.OK, ()), kind=Kind.STORE), 7)
    assert core.poll().stores == (3,)
    core.dead(7)
    assert core.poll().stores == (2,)


def test_stores_without_a_worker_are_dropped_and_counted() -> None:
    core = RankCore()
    core.begin_stores(Directive(1, stores=(2, 3)), 9)
    assert core.poll().stores == (2, 3) and core.counters.stores_dropped == 2
    assert core.outgoing() == []


def test_loads_of_several_workers_end_each_by_its_own() -> None:
    core = attached(7)
    core.begin_loads(ONE_LOAD, 1, 0)
    core.lost()
    core.attach(8)
    core.begin_loads(Directive(2, loads=((2, (12,)),)), 2, 0)
    assert core.awaited_workers() == {7, 8}
    core.dead(7)
    assert [end.ticket for end in core.poll().loads] == [1]
    core.on_message(words((2, Outcome.OK, ())), 8)
    assert core.poll().loads == (LoadEnd(2, True),)


def test_what_was_not_sent_to_a_lost_worker_is_not_sent_to_the_next() -> None:
    core = attached(7)
    core.begin_loads(ONE_LOAD, 1, 0)
    core.lost()
    core.attach(8)
    assert core.outgoing() == []


def test_messages_that_do_not_belong_here_are_counted() -> None:
    core = attached()
    core.on_message(Done(), 7)
    core.on_message("nonsense", 7)
    core.on_message(words((77, Outcome.OK, ())), 7)
    assert core.counters.stale == 3 and not core.poll()


def test_detach_is_said_to_a_worker_only() -> None:
    core = RankCore()
    core.detach()
    assert core.outgoing() == []
    core.attach(7)
    core.detach()
    assert isinstance(core.outgoing()[0], Detach)


# ---- begins that wait for the device ----------------------------------------------------------------------


def test_a_held_begin_is_sent_when_the_device_is_past_it_and_not_before() -> None:
    """Case 1: no copy may read before the engine's last write, whoever orders it."""
    core = attached()
    core.begin_loads(ONE_LOAD, 0, 0, hold=1)
    core.begin_stores(Directive(1, stores=(5,)), 0, hold=2)
    assert core.outgoing() == [] and core.has_held
    core.release(1)
    (begin,) = core.outgoing()
    assert isinstance(begin, Begin) and numbers_of(begin.tickets) == [1] and begin.mark == 0
    core.release(2)
    (begin,) = core.outgoing()
    assert isinstance(begin, Begin) and numbers_of(begin.tickets) == [5]
    assert not core.has_held and core.counters.stores == 1


def test_a_held_store_is_withdrawn_when_its_blocks_go_and_nobody_is_told() -> None:
    """Case 4: a store that was never begun reads nothing."""
    core = attached()
    core.begin_stores(Directive(1, stores=(5, 6)), 0, hold=1)
    core.withdraw([5, 99])
    assert core.poll().stores == (5,)
    core.release(1)
    (begin,) = core.outgoing()
    assert isinstance(begin, Begin) and numbers_of(begin.tickets) == [6]
    assert (core.counters.stores, core.counters.stores_dropped) == (1, 1)
    core.withdraw([6])
    assert core.poll().stores == (), "a worker may read it: only its word ends it"


def test_held_begins_end_at_once_when_their_worker_goes() -> None:
    """Nothing was sent, so nothing can write: no proof of death is needed."""
    core = attached()
    core.begin_loads(ONE_LOAD, 0, 0, hold=1)
    core.begin_stores(Directive(1, stores=(5,)), 0, hold=2)
    core.lost()
    report = core.poll()
    assert report.loads == (LoadEnd(1, False, (10, 11), Outcome.NOT_BEGUN),) and report.stores == (5,)
    core.attach(8)
    core.release(2)
    assert core.outgoing() == [] and core.awaited_workers() == set()


def test_a_held_load_past_its_deadline_is_cancelled_and_not_begun_later() -> None:
    core = attached()
    core.begin_loads(ONE_LOAD, 0, 0, hold=1)
    core.tick(5 * S)
    (cancel,) = core.outgoing()
    assert isinstance(cancel, CancelTickets) and core.poll().loads == ()
    core.on_message(words((1, Outcome.CANCELLED, ())), 7)
    assert core.poll().loads == (LoadEnd(1, False, (10, 11), Outcome.CANCELLED),)
    core.release(1)
    assert core.outgoing() == []


def test_without_a_mark_loads_fail_at_once_and_stores_are_dropped() -> None:
    """A device in trouble: what cannot be ordered is not copied."""
    core = attached()
    core.begin_loads(ONE_LOAD, None, 0)
    core.begin_stores(Directive(1, stores=(5,)), None)
    report = core.poll()
    assert report.loads == (LoadEnd(1, False, (10, 11), Outcome.NOT_BEGUN),) and report.stores == (5,)
    assert cancelled(core) == [1, 5] and core.counters.stores_dropped == 1


# ---- what is not begun --------------------------------------------------------------------------------------


def test_what_was_asked_for_before_the_rank_knew_its_worker_is_given_up_there_with_the_attachment() -> None:
    """The worker may have been planned for it already, and would keep its slots and fences waiting for a begin."""
    core = RankCore(5 * S)
    core.begin_loads(ONE_LOAD, 1, 0)
    core.begin_stores(Directive(1, stores=(5, 6)), 2)
    core.poll()
    core.attach(7)
    assert cancelled(core) == [1, 5, 6]
    core.on_message(words((1, Outcome.CANCELLED, ()), (5, Outcome.CANCELLED, ()), (6, Outcome.CANCELLED, ())), 7)
    assert not core.poll() and core.counters.stale == 0, "its word is due and changes nothing"
    core.attach(8)
    assert cancelled(core) == [], "said once"


def test_loads_that_the_daemon_never_heard_of_are_given_up_nowhere() -> None:
    core = RankCore()
    core.begin_loads(Directive(1, failed_loads=((4, (2, 3)),)), 0, 0)
    core.attach(7)
    assert cancelled(core) == []


def test_of_a_long_time_without_a_worker_only_the_latest_is_told_to_the_next() -> None:
    core = RankCore()
    for ticket in range(1, REMEMBERED_UNBEGUN + 11):
        core.begin_stores(Directive(ticket, stores=(ticket,)), 1)
    core.attach(7)
    assert cancelled(core) == list(range(11, REMEMBERED_UNBEGUN + 11))
