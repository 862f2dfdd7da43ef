"""Stores, loads, fences, requests and the loss of the daemon, as the client's core decides them."""

import pytest

from kvferry.client.core import MAX_UNANSWERED_STEPS, State
from kvferry.client.types import Directive, Hits, JobEnd
from kvferry.proto.columns import pack_u8, pack_u32, pack_u64
from kvferry.proto.control import Hello, RanksChanged, Register, Rotate
from kvferry.proto.hot import Lookup, Renew, StepAnswer
from kvferry.proto.outcome import Ended, Kind, Outcome, Reason
from tests.client.fakes import Scene, chain, numbers_of, refused

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


# ---- fences ------------------------------------------------------------------------------------------


def test_writing_a_block_that_an_unended_store_reads_revokes_the_store_in_the_next_directive() -> None:
    """Case 4: a store that loses its block is never published, and nobody waits for it."""
    scene = Scene()
    ticket = scene.running_store("a", [1], [7])
    assert scene.core.written([7, 8]) == {ticket}
    directive, step = scene.end_step()
    assert directive.revokes == (ticket,)
    assert step is not None
    assert (numbers_of(step.revoked), numbers_of(step.written, 4)) == ([ticket], [7, 8])


def test_a_store_is_revoked_once() -> None:
    scene = Scene()
    scene.running_store("a", [1], [7])
    scene.core.written([7])
    scene.end_step()
    assert scene.core.written([7]) == frozenset()
    directive, step = scene.end_step()
    assert directive.revokes == () and step is not None and numbers_of(step.revoked) == []


def test_a_store_whose_step_was_not_sent_is_withdrawn_and_nobody_hears_of_it() -> None:
    """Case 11: the block is given away in the step that would have begun the store."""
    scene = Scene()
    lost, kept = scene.store("a", [1], [7]), scene.store("a", [2], [8])
    assert scene.core.written([7]) == {lost}
    directive, step = scene.end_step()
    assert (directive.stores, directive.revokes) == ((kept,), ())
    assert step is not None and numbers_of(step.store_tickets) == [kept]
    assert scene.core.poll() == [JobEnd(lost, "a", Kind.STORE, CANCELLED)]
    assert scene.core.counters.withdrawn == 1


def test_a_store_said_after_the_write_that_fills_its_block_does_not_meet_it() -> None:
    scene = Scene()
    old = scene.running_store("a", [1], [6])
    scene.core.written([7])
    ticket = scene.store("b", [2], [7])
    directive, step = scene.end_step()
    assert directive.stores == (ticket,)
    assert step is not None and numbers_of(step.written, 4) == []
    assert scene.core.storing([6, 7]) == {old, ticket}


def test_the_blocks_of_a_load_are_written_too() -> None:
    """Case 4: all ways of losing a block go through the fence."""
    scene = Scene()
    running = scene.running_store("a", [1], [7])
    unsent = scene.store("a", [2], [8])
    load = scene.load("b", [3, 4], [7, 8])
    directive, _ = scene.end_step()
    assert directive == Directive(2, loads=((load, (7, 8)),), revokes=(running,))
    assert [end.ticket for end in scene.core.poll()] == [unsent]


def test_a_store_that_names_a_block_twice_leaves_its_fence_once() -> None:
    """Case 13: an entry is a set per block; the end is one deed per job."""
    scene = Scene()
    ticket = scene.running_store("a", [1, 2, 3], [7, 7, 8])
    assert scene.core.storing([7]) == {ticket}
    scene.ended(ticket)
    assert scene.core.storing([7, 8]) == frozenset() and scene.core.written([7, 8]) == frozenset()


def test_loads_never_enter_the_fence() -> None:
    scene = Scene()
    scene.load("a", [1], [7])
    scene.end_step()
    assert scene.core.storing([7]) == frozenset() and scene.core.written([7]) == frozenset()


def test_storing_is_only_a_question() -> None:
    scene = Scene()
    ticket = scene.running_store("a", [1], [7])
    assert scene.core.storing([7]) == scene.core.storing([7]) == {ticket}
    assert scene.end_step()[1] is None


def test_writes_are_told_only_while_there_is_a_store_to_meet() -> None:
    scene = Scene()
    scene.core.written([1, 2, 3])
    assert scene.end_step()[1] is None


def test_stores_that_the_daemons_fence_met_and_ours_had_not_are_counted() -> None:
    scene = Scene()
    scene.store("a", [1], [7])
    _, step = scene.end_step()
    assert step is not None
    scene.say(StepAnswer(step.step, 1, wait_for=pack_u64([1])))
    assert scene.core.counters.wait_for == 1


# ---- requests ----------------------------------------------------------------------------------------


def test_stores_after_a_load_belong_to_another_incarnation() -> None:
    """One incarnation carries one load or any stores, never both, and an engine need not know."""
    scene = Scene()
    scene.leased("a", [1])
    scene.load("a", [1], [10])
    scene.store("a", [2], [11])
    scene.store("a", [3], [12])
    _, step = scene.end_step()
    assert step is not None
    loads, stores = numbers_of(step.load_requests), numbers_of(step.store_requests)
    assert len(set(stores)) == 1 and not set(loads) & set(stores)


def test_a_second_load_is_another_incarnation() -> None:
    scene = Scene()
    scene.load("a", [1], [10])
    scene.load("a", [2], [11])
    _, step = scene.end_step()
    assert step is not None and len(set(numbers_of(step.load_requests))) == 2


def test_a_preempted_request_comes_back_as_a_new_incarnation_and_its_stores_stay_with_the_old() -> None:
    """Case 23: the old job's end is not booked on the new life."""
    scene = Scene()
    old = scene.running_store("a", [1], [7])
    scene.core.preempt("a", scene.now_ns)
    new = scene.store("a", [1], [8])
    _, step = scene.end_step()
    assert step is not None
    assert numbers_of(step.end_requests) == [1] and numbers_of(step.end_reasons, 1) == [Ended.PREEMPTED]
    assert numbers_of(step.store_requests) == [2]
    scene.ended(old)
    assert [end.ticket for end in scene.core.poll()] == [old]
    assert scene.core.storing([8]) == {new}


def test_finish_ends_every_incarnation_of_the_request_and_its_stores_go_on() -> None:
    """Case 28: finished closes the request for new work; what runs ends by itself."""
    scene = Scene()
    scene.leased("a", [1])
    load = scene.load("a", [1], [10])
    scene.end_step()
    scene.core.load_ended(load, True)
    store = scene.running_store("a", [2], [11])
    scene.core.finish("a", scene.now_ns)
    _, step = scene.end_step()
    assert step is not None
    assert sorted(numbers_of(step.end_requests)) == [1, 2]
    scene.ended(store)
    assert [end.ticket for end in scene.core.poll()] == [load, store]
    assert scene.core.describe()["requests"] == 0


def test_an_aborted_request_cancels_its_load_and_still_waits_for_the_word() -> None:
    scene = Scene()
    scene.leased("a", [1])
    load = scene.load("a", [1], [10])
    scene.end_step()
    scene.core.abort("a", scene.now_ns)
    directive, step = scene.end_step()
    assert directive.cancels == (load,)
    assert step is not None and numbers_of(step.cancelled) == [load]
    assert scene.core.describe()["loads_open"] == 1
    scene.core.load_ended(load, False)
    assert scene.core.describe()["loads_open"] == 0


def test_a_late_failure_of_an_ended_request_says_nothing_about_its_namesake() -> None:
    """Case 23: the same name, another life."""
    scene = Scene()
    scene.leased("a", [1])
    load = scene.load("a", [1], [10])
    scene.end_step()
    scene.core.abort("a", scene.now_ns)
    scene.leased("a", [1])
    scene.core.load_ended(load, False)
    assert scene.core.hits("a", scene.now_ns).count == 1


def test_cancel_withdraws_what_was_not_sent_and_cancels_what_was() -> None:
    scene = Scene()
    running = scene.running_store("a", [1], [7])
    unsent_store, unsent_load = scene.store("a", [2], [8]), scene.load("b", [3], [9])
    for ticket in (running, unsent_store, unsent_load, 999):
        scene.core.cancel(ticket, scene.now_ns)
    directive, step = scene.end_step()
    assert directive == Directive(2, failed_loads=((unsent_load, (9,)),))
    assert step is not None
    assert (numbers_of(step.cancelled), numbers_of(step.load_tickets)) == ([running], [])


# ---- without, and with another daemon ----------------------------------------------------------------


def test_without_a_daemon_everything_is_a_miss_and_loads_are_failed_by_the_ranks() -> None:
    """Case 46: no sidecar = all misses, nothing else."""
    scene = Scene(attach=False)
    for number in range(100):
        name = f"r{number}"
        scene.core.lookup(name, chain(number), scene.now_ns)
        assert scene.core.hits(name, scene.now_ns) == Hits(True, reason=Reason.OFF)
        assert scene.store(name, [number], [number % 50]) == 0
        assert scene.core.written([number % 50]) == frozenset()
        scene.core.finish(name, scene.now_ns)
    ticket = scene.load("r", [1], [5])
    directive, step = scene.end_step()
    assert ticket > 0 and directive == Directive(1, failed_loads=((ticket, (5,)),)) and step is None
    assert scene.core.counters.stores_off == 100
    assert scene.core.describe()["requests"] == 1
    scene.core.load_ended(ticket, False)
    assert scene.core.poll() == [JobEnd(ticket, "r", Kind.LOAD, Outcome.COPY_FAILED)]


def test_a_request_known_before_the_daemon_came_hits_afterwards() -> None:
    """Case 46: the daemon starts later; hits follow by themselves."""
    scene = Scene(attach=False)
    scene.core.lookup("r", chain(1), scene.now_ns)
    assert scene.core.hits("r", scene.now_ns).reason is Reason.OFF
    scene.attach()
    assert not scene.core.hits("r", scene.now_ns).ready
    scene.answer(scene.take(Lookup), 1, lease=3)
    assert scene.core.hits("r", scene.now_ns).count == 1


def test_a_lost_daemon_ends_stores_and_lookups_and_leaves_loads_to_the_ranks() -> None:
    scene = Scene()
    scene.leased("a", [1])
    load = scene.load("a", [1], [10])
    store = scene.running_store("b", [2], [11])
    scene.ask("c", [3])
    scene.core.lost(scene.now_ns)
    assert scene.core.poll() == [JobEnd(store, "b", Kind.STORE, CANCELLED, Reason.OFF)]
    assert scene.core.hits("c", scene.now_ns) == Hits(True, reason=Reason.OFF)
    assert scene.core.describe()["loads_open"] == 1
    scene.core.load_ended(load, True)
    assert scene.core.poll() == [JobEnd(load, "a", Kind.LOAD, Outcome.OK, accepted=1)]
    assert scene.core.counters.lost_stores == 1


def test_stores_of_a_lost_daemon_are_revoked_at_the_ranks_and_not_named_to_the_next_daemon() -> None:
    """Nobody guards their blocks any more, and a daemon that lives on without us could publish them."""
    scene = Scene()
    ticket = scene.running_store("a", [1], [7])
    scene.core.lost(scene.now_ns)
    scene.attach()
    directive, step = scene.end_step()
    assert directive.revokes == (ticket,) and step is None
    assert scene.end_step()[0].revokes == ()


def test_work_of_an_unsent_step_is_taken_back_when_the_daemon_is_lost() -> None:
    scene = Scene()
    store, load = scene.store("a", [1], [7]), scene.load("b", [2], [8])
    scene.core.lost(scene.now_ns)
    directive, step = scene.end_step()
    assert directive == Directive(1, failed_loads=((load, (8,)),)) and step is None
    assert [end.ticket for end in scene.core.poll()] == [store]


def test_registering_again_is_the_same_path_and_the_step_count_begins_anew() -> None:
    """Case 45: recovery is the start path; ten restarts are ten registrations."""
    scene = Scene()
    for _ in range(10):
        scene.running_store("a", [1], [7])
        scene.core.lost(scene.now_ns)
        scene.attach()
        scene.store("b", [1], [8])
        _, step = scene.end_step()
        assert step is not None and step.step == 1
        scene.core.lost(scene.now_ns)
        scene.attach()
    assert scene.core.counters.attaches == 21


def test_messages_of_an_earlier_daemon_are_counted_and_dropped() -> None:
    """Case 21: old completion frames, replayed after a restart."""
    scene = Scene()
    scene.running_store("a", [1], [7])
    scene.core.lost(scene.now_ns)
    scene.core.poll()
    scene.attach()
    before = scene.core.counters.stale
    scene.ended(1)
    scene.say(StepAnswer(1, 1, pack_u64([1]), pack_u64([5]), pack_u32([1]), pack_u8([0])))
    assert scene.core.counters.stale == before + 2 and scene.core.poll() == []


def test_a_refusal_stands_with_its_reason() -> None:
    scene = Scene(attach=False)
    scene.core.attach(scene.now_ns)
    scene.take(Hello)
    scene.say(refused())
    assert scene.core.state is State.REFUSED and not scene.core.attached
    assert scene.core.refusal is not None and scene.core.refusal.code == "register.world_size"
    assert scene.load("a", [1], [2]) > 0
    assert scene.end_step()[0].failed_loads


def test_a_daemon_that_answers_no_step_gets_no_more_stores() -> None:
    """Case 15: what piles up is bounded, and the engine does not wait for it."""
    scene = Scene()
    for number in range(MAX_UNANSWERED_STEPS):
        assert scene.store("a", [number], [number % 100])
        scene.end_step()
    assert scene.store("a", [1], [1]) == 0
    ticket = scene.load("b", [1], [1])
    assert scene.end_step()[0].failed_loads == ((ticket, (1,)),)
    assert scene.core.counters.stores_off == 1


def test_five_hundred_running_stores_hold_nothing_up_and_their_ends_need_no_call() -> None:
    """Case 15: idle completions are collected; a new request is served at once."""
    scene = Scene()
    tickets = [scene.running_store("a", [n], [n % 100]) for n in range(500)]
    scene.core.finish("a", scene.now_ns)
    scene.end_step()
    scene.leased("b", [1])
    assert scene.core.hits("b", scene.now_ns).count == 1
    scene.ended(*tickets)
    assert [end.ticket for end in scene.core.poll()] == tickets


def test_an_idle_registration_stands_and_asks_for_nothing() -> None:
    """Case 43: liveness is the link's; silence is no death, and nobody pings."""
    scene = Scene()
    for _ in range(100):
        scene.core.tick(scene.later(60_000).now_ns)
    assert scene.outgoing() == [] and scene.core.attached
    scene.leased("a", [1])
    assert scene.core.hits("a", scene.now_ns).count == 1


# ---- namespaces --------------------------------------------------------------------------------------


def test_rotate_revokes_forgets_and_moves_in_that_order_on_the_wire() -> None:
    """Case 70: after a weight update nothing old is found, and what is being stored is not published."""
    scene = Scene()
    running = scene.running_store("a", [1], [7])
    unsent = scene.store("a", [2], [8])
    scene.leased("b", [3])
    scene.core.rotate(b"salt-2", scene.now_ns)
    assert scene.take(Rotate).salt == b"salt-2"
    assert scene.core.hits("b", scene.now_ns) == Hits(True)
    fresh = scene.store("a", [4], [9])
    directive, step = scene.end_step()
    assert (directive.revokes, directive.stores) == ((running,), (fresh,))
    assert step is not None
    assert (numbers_of(step.revoked), numbers_of(step.released)) == ([running], [77])
    assert [end.ticket for end in scene.core.poll()] == [unsent]
    scene.say(RanksChanged(attached=1, namespace="space-2", epoch=1, slots=64))
    assert scene.core.registration.namespace == "space-2"


def test_a_rotated_salt_is_registered_with_the_next_daemon() -> None:
    scene = Scene()
    scene.core.rotate(b"salt-2", scene.now_ns)
    scene.core.lost(scene.now_ns)
    scene.core.attach(scene.now_ns)
    scene.outgoing()
    from kvferry.proto.control import Welcome

    scene.say(Welcome(major=1, minor=0, boot=8, tp_size=1))
    assert scene.take(Register).salt == b"salt-2"


def test_back_to_zero_when_all_requests_are_over() -> None:
    """Case 36: every exit of a ticket passes one place; at rest nothing is held."""
    scene = Scene()
    for round_ in range(20):
        name = f"r{round_}"
        scene.leased(name, [round_], lease=round_ + 1)
        load = scene.load(name, [round_], [round_])
        store = scene.store(name, [100 + round_], [50 + round_])
        _, step = scene.end_step()
        assert step is not None
        scene.accept(step)
        scene.core.load_ended(load, True)
        scene.ended(load, store, outcome=Outcome.OK if round_ % 2 else Outcome.WORKER_DIED)
        scene.core.finish(name, scene.now_ns)
        _, step = scene.end_step()
        assert step is not None
        scene.accept(step)
    assert len(scene.core.poll()) == 40
    gauges = scene.core.describe()
    names = ("requests", "lookups", "leases", "stores_open", "loads_open", "steps_unanswered")
    assert {name: gauges[name] for name in names} == dict.fromkeys(names, 0)
    assert scene.core.counters.stale == 0
    assert not [message for message in scene.outgoing() if isinstance(message, Renew)]
