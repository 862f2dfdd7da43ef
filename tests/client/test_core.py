"""A step's message and directive, and how tickets end, as the client's core decides them."""

import pytest

from kvferry.client.types import Directive, Hits, JobEnd
from kvferry.proto.columns import pack_u8, pack_u32, pack_u64
from kvferry.proto.hot import StepAnswer
from kvferry.proto.outcome import Kind, Outcome, Reason
from tests.client.fakes import Scene, chain, numbers_of

CANCELLED = Outcome.CANCELLED


# ---- a step ------------------------------------------------------------------------------------------


def test_nothing_to_say_is_no_message() -> None:
    scene = Scene()
    directive, step = scene.end_step()
    assert step is None and not directive


def test_a_step_carries_stores_and_loads_as_columns_and_the_directive_carries_their_tickets() -> None:
    scene = Scene()
    scene.leased("b", [4], lease=5)
    store = scene.store("a", [1, 2], [10, 11])
    load = scene.load("b", [4], [12])
    directive, step = scene.end_step()
    assert directive == Directive(1, loads=((load, (12,)),), stores=(store,))
    assert step is not None and step.step == 1 and step.epoch == 1
    assert numbers_of(step.store_blocks, 4) == [10, 11] and step.store_keys == b"".join(chain(1, 2))
    assert numbers_of(step.load_blocks, 4) == [12] and numbers_of(step.load_leases) == [5]


def test_steps_are_numbered_within_a_registration_and_empty_ones_take_no_number() -> None:
    scene = Scene()
    scene.end_step()
    scene.store("a", [1], [10])
    _, first = scene.end_step()
    scene.end_step()
    scene.store("a", [2], [11])
    _, second = scene.end_step()
    assert first is not None and second is not None
    assert (first.step, second.step) == (1, 2)


def test_tickets_never_repeat_across_registrations() -> None:
    """Case 23: a number of an earlier life means nothing in a later one."""
    scene = Scene()
    first = scene.store("a", [1], [10])
    scene.core.lost(scene.now_ns)
    scene.attach()
    assert scene.store("a", [1], [10]) > first


def test_only_the_common_part_of_keys_and_blocks_is_stored() -> None:
    """Case 18: 115 keys and no blocks are data, not a reason to die."""
    scene = Scene()
    assert scene.store("a", range(115), []) == 0
    assert scene.store("a", range(115), [7, 8]) > 0
    _, step = scene.end_step()
    assert step is not None and numbers_of(step.store_counts, 4) == [2]


def test_a_load_of_nothing_is_failed_by_the_ranks() -> None:
    """Case 18: an empty load still gets its one word."""
    scene = Scene()
    ticket = scene.load("a", [1], [])
    directive, step = scene.end_step()
    assert directive.failed_loads == ((ticket, ()),) and step is None


def test_ends_of_requests_never_seen_are_harmless() -> None:
    """Case 18: abort and finish of a queued request that was never scheduled."""
    scene = Scene()
    for end in (scene.core.abort, scene.core.finish, scene.core.preempt, scene.core.forget):
        end("ghost", scene.now_ns)
    assert scene.end_step()[1] is None


@pytest.mark.parametrize("keys", [[b"short"], b"123456789", [b"12345678", b"1234567"]])
def test_keys_of_another_width_are_the_callers_mistake(keys: list[bytes] | bytes) -> None:
    scene = Scene()
    with pytest.raises(ValueError, match="key"):
        scene.core.store("a", keys, [1, 2], scene.now_ns)
    with pytest.raises(ValueError, match="key"):
        scene.core.lookup("a", keys, scene.now_ns)


@pytest.mark.parametrize("block", [-1, 100])
def test_blocks_outside_the_engine_are_the_callers_mistake(block: int) -> None:
    scene = Scene()
    with pytest.raises(ValueError, match=r"outside 0\.\.99"):
        scene.store("a", [1], [block])
    with pytest.raises(ValueError, match=r"outside 0\.\.99"):
        scene.load("a", [1], [block])


# ---- how tickets end ---------------------------------------------------------------------------------


def test_a_store_ends_once_with_the_jobs_end() -> None:
    scene = Scene()
    ticket = scene.running_store("a", [1, 2], [10, 11])
    assert scene.core.poll() == []
    scene.ended(ticket)
    assert scene.core.poll() == [JobEnd(ticket, "a", Kind.STORE, Outcome.OK, accepted=2)]
    scene.ended(ticket)
    assert scene.core.poll() == [] and scene.core.counters.stale == 1


def test_a_store_ends_while_its_request_goes_on_and_others_of_it_are_untouched() -> None:
    """Case 16: everything hangs on the ticket; a request is only a set of them."""
    scene = Scene()
    one, two, three = (scene.running_store("a", [n], [n]) for n in (1, 2, 3))
    scene.ended(two)
    assert [end.ticket for end in scene.core.poll()] == [two]
    assert scene.core.storing([1, 2, 3]) == {one, three}


def test_a_refused_store_ends_with_its_reason_and_is_counted_by_key() -> None:
    """Case 121: each refusal has a reason and a number."""
    scene = Scene()
    ticket = scene.store("a", [1, 2, 3], [10, 11, 12])
    _, step = scene.end_step()
    assert step is not None
    scene.accept(step, reason=Reason.POOL_FULL, accepted=0)
    assert scene.core.poll() == [JobEnd(ticket, "a", Kind.STORE, CANCELLED, Reason.POOL_FULL, 0)]
    assert scene.core.counters.refused == {"POOL_FULL": 3}
    assert scene.core.storing([10, 11, 12]) == frozenset()


def test_a_store_of_keys_that_are_all_held_ends_at_once_and_well() -> None:
    """Case 37: nothing to do leaves no record."""
    scene = Scene()
    ticket = scene.store("a", [1, 2], [10, 11])
    _, step = scene.end_step()
    assert step is not None
    scene.say(StepAnswer(step.step, 1, pack_u64([ticket]), pack_u64([0]), pack_u32([2]), pack_u8([0])))
    assert scene.core.poll() == [JobEnd(ticket, "a", Kind.STORE, Outcome.OK, accepted=2)]
    assert scene.core.describe()["stores_open"] == 0


def test_blocks_behind_the_first_refused_key_are_not_read_and_so_not_fenced() -> None:
    """Case 60: the leading keys are kept, the others refused by number."""
    scene = Scene()
    ticket = scene.store("a", [1, 2, 3], [10, 11, 12])
    _, step = scene.end_step()
    assert step is not None
    scene.accept(step, reason=Reason.POOL_FULL, accepted=1)
    assert scene.core.written([11, 12]) == frozenset()
    assert scene.core.written([10]) == {ticket}
    scene.ended(ticket, outcome=Outcome.REVOKED)
    assert scene.core.poll() == [JobEnd(ticket, "a", Kind.STORE, Outcome.REVOKED, Reason.POOL_FULL, 1)]


def test_a_load_has_one_end_whoever_speaks_first() -> None:
    for order in (("daemon", "ranks"), ("ranks", "daemon")):
        scene = Scene()
        scene.leased("a", [1])
        ticket = scene.load("a", [1], [10])
        _, step = scene.end_step()
        assert step is not None
        scene.accept(step)
        for who in order:
            if who == "daemon":
                scene.ended(ticket)
            else:
                scene.core.load_ended(ticket, True)
        assert scene.core.poll() == [JobEnd(ticket, "a", Kind.LOAD, Outcome.OK, accepted=1)]
        assert scene.core.counters.stale == 0
        assert scene.core.describe()["loads_open"] == 0


def test_a_refused_load_ends_with_its_reason_and_stays_open_until_the_ranks_have_spoken() -> None:
    """Case 24: a key that is gone refuses the load whole; the ranks then say which blocks are not filled."""
    scene = Scene()
    ticket = scene.load("a", [1, 2], [10, 11])
    _, step = scene.end_step()
    assert step is not None
    scene.accept(step, reason=Reason.MISSING, accepted=0)
    assert scene.core.poll() == [JobEnd(ticket, "a", Kind.LOAD, CANCELLED, Reason.MISSING, 0)]
    assert scene.core.describe()["loads_open"] == 1
    scene.core.load_ended(ticket, False)
    assert scene.core.poll() == [] and scene.core.describe()["loads_open"] == 0


def test_a_request_whose_load_failed_is_offered_no_hits_again_until_it_ends() -> None:
    """Case 5: a failed load is recomputed, not tried for ever."""
    scene = Scene()
    scene.leased("a", [1])
    ticket = scene.load("a", [1], [10])
    scene.end_step()
    scene.core.load_ended(ticket, False)
    scene.core.lookup("a", chain(1), scene.now_ns)
    assert scene.outgoing() == []
    assert scene.core.hits("a", scene.now_ns) == Hits(True)
    scene.core.finish("a", scene.now_ns)
    scene.leased("a", [1])
    assert scene.core.hits("a", scene.now_ns).count == 1


def test_words_on_unknown_tickets_are_counted_and_change_nothing() -> None:
    """Case 21: a late 'ended' names a request that is already gone."""
    scene = Scene()
    scene.core.load_ended(99, False)
    scene.ended(98)
    assert scene.core.counters.stale == 2 and scene.core.poll() == []
