"""What a step may be refused, and how much of it is taken (kinds C, D and F)."""

import pytest

from kvferry.proto.columns import u64
from kvferry.proto.hot import Plan, StepAnswer
from kvferry.proto.outcome import Next, Outcome, Reason

from .dummy import PAYLOAD, Job, S

# ---- what is to be copied ------------------------------------------------------------------------------


def test_only_missing_keys_are_copied_and_the_index_is_asked_each_time(worlds):
    """Case 57: an early key that was evicted is stored again, alone."""
    world = worlds(slots=4)
    engine = world.engine()
    engine.hold([1, 2, 3], ticket=1)
    assert engine.lookup(2, [1, 2, 3]).hits == 3
    engine.step(ends=[2])
    engine.hold(["x", "y"], ticket=3)  # pushes out the tail: key 3
    assert engine.lookup(4, [1, 2, 3]).hits == 2
    engine.step(ends=[4])
    answer = engine.step(stores=[Job(5, 5, [1, 2, 3], [10, 11, 12])])
    assert (answer.accepted(5), answer.reason(5)) == (3, Reason.NONE)
    plan = engine.plans()[-1]
    assert len(plan.slots) == 4 and plan.blocks == (12).to_bytes(4, "little")
    engine.finish(answer.job(5))
    assert engine.lookup(6, [1, 2, 3]).hits == 3


def test_keys_on_their_way_under_another_job_are_not_copied_again(world):
    engine = world.engine()
    one = engine.store(1, 1, [1, 2], [1, 2])
    answer = engine.step(stores=[Job(2, 2, [1, 2, 3], [11, 12, 13]), Job(3, 3, [1, 2], [21, 22])])
    assert (answer.accepted(2), answer.accepted(3), answer.job(3)) == (3, 2, 0)
    assert world.sums()["writing"] == 3
    engine.finish(one, answer.job(2))
    assert engine.lookup(4, [1, 2, 3]).hits == 3


def test_a_key_twice_in_one_chain_is_copied_once(world):
    engine = world.engine()
    answer = engine.step(stores=[Job(1, 1, [1, 2, 1, 3, 2], [1, 2, 3, 4, 5])])
    assert answer.accepted(1) == 5 and world.sums()["writing"] == 3
    engine.finish(answer.job(1))
    assert engine.lookup(2, [1, 2, 1, 3, 2]).hits == 5


def test_a_store_of_what_is_held_leaves_no_record(world):
    """Case 37: zero work means no record, however often."""
    engine = world.engine()
    engine.hold([1, 2], ticket=1)
    for n in range(200):
        answer = engine.step(stores=[Job(10 + n, 10 + n, [1, 2], [1, 2])])
        assert (answer.job(10 + n), answer.accepted(10 + n)) == (0, 2)
    assert not any(world.core.at_rest().values())
    assert world.count("store_keys_held") == 400


def test_every_offered_key_is_held_stored_refused_failed_or_in_flight(worlds):
    """Case 121: the sum is part of the core's own check, here with every term in it."""
    world = worlds(slots=4)
    engine = world.engine()
    engine.hold([1, 2], ticket=1)
    flying = engine.store(2, 2, [1, 2, 3], [1, 2, 3])
    failing = engine.store(3, 3, [4], [4])
    engine.step(stores=[Job(4, 4, [1, 2, 5, 6, 7], [1, 2, 5, 6, 7]), Job(5, 5, [8], [999])])
    engine.done(0, failing, outcome=Outcome.COPY_FAILED)
    counters = world.core.status()["counters"]
    names = {name for name in counters if name.startswith("store_keys")}
    assert names == {
        "store_keys",
        "store_keys_held",
        "store_keys_stored",
        "store_keys_refused.POOL_FULL",
        "store_keys_refused.BAD_BLOCKS",
        "store_keys_failed.COPY_FAILED",
    }
    engine.finish(flying)
    engine.done(1, failing)


# ---- a full pool ---------------------------------------------------------------------------------------


def test_the_prefix_that_fits_is_stored_and_the_rest_never_fits(worlds):
    """Case 58: a pool of 3 slots and a request of 10 blocks."""
    world = worlds(slots=3)
    engine = world.engine()
    answer = engine.step(stores=[Job(1, 1, range(10), range(10))])
    assert (answer.accepted(1), answer.reason(1)) == (3, Reason.NEVER_FITS)
    engine.finish(answer.job(1))
    assert engine.lookup(2, range(10)).hits == 3
    engine.step(ends=[2])
    # Again: its own prefix is never evicted to make room for its tail.
    again = engine.step(stores=[Job(3, 3, range(10), range(10))])
    assert (again.job(3), again.accepted(3), again.reason(3)) == (0, 3, Reason.NEVER_FITS)
    assert engine.lookup(4, range(10)).hits == 3


def test_first_keys_come_first_when_the_pool_is_nearly_full(worlds):
    """Case 60: room for 4 of 10: the first 4 are stored, the other 6 refused; later they are taken."""
    world = worlds(slots=10, lease_share=1.0)
    engine = world.engine()
    engine.hold([f"x{n}" for n in range(6)], ticket=1)
    lease = engine.lookup(2, [f"x{n}" for n in range(6)]).lease
    answer = engine.step(stores=[Job(3, 3, range(10), range(10))])
    assert (answer.accepted(3), answer.reason(3)) == (4, Reason.POOL_FULL)
    engine.finish(answer.job(3))
    assert engine.lookup(4, range(10)).hits == 4
    engine.step(released=[lease], ends=[4])
    later = engine.step(stores=[Job(5, 5, range(10), range(10))])
    assert (later.accepted(5), later.reason(5)) == (10, Reason.NONE)
    engine.finish(later.job(5))
    assert engine.lookup(6, range(10)).hits == 10


def test_a_pool_pinned_by_leases_says_so_until_they_end(worlds):
    """Case 54."""
    world = worlds(slots=4, lease_share=1.0)
    engine = world.engine()
    engine.hold([1, 2, 3, 4], ticket=1)
    assert engine.lookup(2, [1, 2, 3, 4]).lease
    answer = engine.step(stores=[Job(3, 3, [9], [9])])
    assert (answer.accepted(3), answer.reason(3)) == (0, Reason.POOL_FULL)
    assert world.sums()["leased"] == world.sums()["pinned"] == 4
    world.wait(10 * S)
    job = engine.store(4, 4, [9], [9])
    assert job
    engine.finish(job)


def test_eviction_takes_the_tail_of_the_oldest_chain_first(worlds):
    world = worlds(slots=6)
    engine = world.engine()
    engine.hold(["a1", "a2", "a3"], ticket=1)
    engine.hold(["b1", "b2", "b3"], ticket=2)
    engine.hold(["c1"], ticket=3)
    assert engine.lookup(4, ["a1", "a2", "a3"]).hits == 2
    engine.step(ends=[4])  # touched: now b is the oldest
    engine.hold(["c2", "c3"], ticket=5)
    assert engine.lookup(6, ["b1", "b2", "b3"]).hits == 1
    assert engine.lookup(7, ["a1", "a2"]).hits == 2


def test_a_chain_that_was_stored_piece_by_piece_is_evicted_tail_first(worlds):
    """Its head became READY first; when its request has ended, its tail goes before its head."""
    world = worlds(slots=6)
    engine = world.engine()
    for n in (1, 2, 3, 4):
        engine.finish(engine.store(n, 1, [f"k{n}"], [n]))
    engine.step(ends=[1])
    engine.hold(["x1", "x2", "x3", "x4"], ticket=10)
    assert engine.lookup(2, ["k1", "k2", "k3", "k4"]).hits == 2


def test_the_head_that_a_request_loaded_outlives_the_tail_that_it_stored(worlds):
    """The load is one attempt, the stores after it another; both end together."""
    world = worlds(slots=6)
    engine = world.engine()
    engine.hold(["k1", "k2"], ticket=1)
    load = engine.load(2, 1, ["k1", "k2"], [1, 2], engine.lookup(1, ["k1", "k2", "k3"]).lease)
    engine.finish(load)
    for n in (3, 4):
        engine.finish(engine.store(n, 2, [f"k{n}"], [n]))
    engine.step(ends=[1, 2])
    engine.hold(["x1", "x2", "x3"], ticket=10)
    assert engine.lookup(3, ["k1", "k2", "k3", "k4"]).hits == 3


@pytest.mark.parametrize("newcomers", range(3, 9))
def test_what_is_stored_after_its_requests_end_goes_in_behind_its_parent(worlds, newcomers):
    """The usual case: the last blocks are still being copied when their request ends."""
    world = worlds(slots=8, lease_share=1.0)
    engine = world.engine()
    engine.hold(["k1", "k2"], ticket=1)
    load = engine.load(2, 1, ["k1", "k2"], [1, 2], engine.lookup(1, ["k1", "k2"]).lease)
    engine.finish(load)
    engine.finish(engine.store(3, 2, ["k3"], [3]))
    last = engine.store(4, 2, ["k4", "k5"], [4, 5])
    engine.step(ends=[1, 2])
    engine.finish(last)
    engine.hold([f"x{n}" for n in range(newcomers)], ticket=10)
    # Three slots were free; each newcomer beyond them takes the tail that was left.
    assert engine.lookup(3, ["k1", "k2", "k3", "k4", "k5"]).hits == 5 - (newcomers - 3)


def test_a_chain_takes_the_places_of_its_own_later_keys_never_of_its_earlier_ones(worlds):
    """The head was evicted, the tail stayed: storing the chain again keeps the leading keys."""
    world = worlds(slots=4)
    engine = world.engine()
    engine.hold(["k3", "k4", "k5", "k6"], ticket=1)
    answer = engine.step(stores=[Job(2, 2, ["k1", "k2", "k3", "k4", "k5", "k6"], range(6))])
    assert (answer.accepted(2), answer.reason(2)) == (4, Reason.NEVER_FITS)
    engine.finish(answer.job(2))
    assert engine.lookup(3, ["k1", "k2", "k3", "k4", "k5"]).hits == 4


def test_entries_that_are_being_written_are_never_evicted(worlds):
    world = worlds(slots=3)
    engine = world.engine()
    one = engine.store(1, 1, [1, 2], [1, 2])
    answer = engine.step(stores=[Job(2, 2, [5, 6], [5, 6])])
    assert (answer.accepted(2), answer.reason(2)) == (1, Reason.POOL_FULL)
    engine.finish(one, answer.job(2))


# ---- refusals ------------------------------------------------------------------------------------------


def test_nothing_is_accepted_while_a_rank_is_away(world):
    engine = world.engine()
    engine.hold([1], ticket=1)
    engine.rank_gone(1)
    answer = engine.step(stores=[Job(2, 2, [2], [2])], loads=[Job(3, 3, [1], [3])])
    assert [answer.reason(t) for t in (2, 3)] == [Reason.RANKS_AWAY] * 2
    assert engine.lookup(4, [1]).reason == Reason.RANKS_AWAY
    assert world.core.status()["requests"] == 0
    # The attached rank is told that both tickets are decided, so that a begin of theirs ends at once.
    assert engine.plans(0)[-1] == Plan(planned_to=3)


def test_a_stale_epoch_is_refused_by_name(world):
    engine = world.engine()
    engine.hold([1], ticket=1)
    answer = engine.step(stores=[Job(2, 2, [2], [2])], loads=[Job(3, 3, [1], [3])], epoch=7)
    assert [answer.reason(t) for t in (2, 3)] == [Reason.STALE_EPOCH] * 2
    assert answer.message.epoch == 0
    stale = engine.lookup(4, [1], epoch=7)
    assert (stale.hits, stale.reason, stale.epoch) == (0, Reason.STALE_EPOCH, 0)


def test_a_group_that_nobody_registered_is_refused(world):
    engine = world.engine()
    answer = engine.step(stores=[Job(1, 1, [1], [1], group=3)], loads=[Job(2, 2, [1], [2], group=1)])
    assert [answer.reason(t) for t in (1, 2)] == [Reason.GROUP] * 2
    assert engine.lookup(3, [1], group=2).reason == Reason.GROUP


def test_keys_of_another_width_are_refused(world):
    engine = world.engine(key_bytes=16)
    answer = engine.step(stores=[Job(1, 1, [1, 2], [1, 2])])
    assert answer.reason(1) == Reason.KEY_WIDTH
    assert engine.lookup(2, [1]).reason == Reason.KEY_WIDTH


def test_a_ticket_is_taken_once(world):
    engine = world.engine()
    job = engine.store(5, 1, [1], [1])
    answer = engine.step(stores=[Job(5, 2, [2], [2]), Job(4, 2, [3], [3]), Job(7, 2, [4], [4]), Job(7, 2, [5], [5])])
    assert answer.message.reasons == bytes([Reason.REPEATED, Reason.REPEATED, Reason.NONE, Reason.REPEATED])
    engine.finish(job, *[j for j in u64(answer.message.jobs).tolist() if j])


def test_one_block_cannot_be_loaded_twice_in_one_load(world):
    engine = world.engine()
    engine.hold([1, 2], ticket=1)
    answer = engine.step(loads=[Job(2, 2, [1, 2], [7, 7])])
    assert answer.reason(2) == Reason.BAD_BLOCKS
    assert world.sums()["pinned"] == 0


def test_an_ended_request_admits_nothing_while_its_record_stands(world):
    """Case 28: finished only closes the request for new work; its record goes with its last job."""
    engine = world.engine()
    job = engine.store(1, 1, [1], [1])
    engine.step(ends=[1])
    assert engine.step(stores=[Job(2, 1, [2], [2])]).reason(2) == Reason.REQUEST_CLOSED
    assert world.core.status()["requests"] == 1
    engine.finish(job)
    assert world.core.status()["requests"] == 0


def test_a_store_that_ends_its_request_in_the_same_step_is_taken(world):
    """Case 28: stores come before ends."""
    engine = world.engine()
    answer = engine.step(stores=[Job(1, 1, [1], [1])], ends=[1])
    assert answer.reason(1) == Reason.NONE
    engine.finish(answer.job(1))


def test_ends_of_unknown_requests_and_empty_jobs_are_data(world):
    """Case 18: nothing to act on is no reason to die."""
    engine = world.engine()
    answer = engine.step(ends=[77, 78], stores=[Job(1, 1, [], [])], loads=[Job(2, 2, [], [])])
    assert answer.message.jobs == bytes(16) and answer.message.reasons == bytes(2)
    assert not any(world.core.at_rest().values())


def test_too_many_bytes_in_flight_refuse_the_keys_past_the_bound(worlds):
    world = worlds(max_in_flight_bytes=3 * 2 * PAYLOAD)
    engine = world.engine()
    answer = engine.step(stores=[Job(1, 1, [1, 2], [1, 2]), Job(2, 2, [3, 4, 5], [3, 4, 5])])
    assert (answer.accepted(2), answer.reason(2)) == (1, Reason.BUSY)
    engine.finish(answer.job(1), answer.job(2))
    # Loads are taken all the same: a request waits for each, and leases bound them.
    loads = engine.step(loads=[Job(3, 3, [1, 2], [10, 11]), Job(4, 4, [1, 2], [12, 13])])
    assert [loads.reason(t) for t in (3, 4)] == [Reason.NONE, Reason.NONE]
    engine.finish(loads.job(3))
    loads = engine.step(loads=[Job(5, 5, [1, 2], [12, 13])])
    assert loads.reason(5) == Reason.NONE
    engine.finish(loads.job(5))


def test_a_bound_below_one_block_lets_one_after_the_other_move_and_does_not_shut_all_out(worlds):
    world = worlds(max_in_flight_bytes=1)
    engine = world.engine()
    for n in (1, 2):
        answer = engine.step(stores=[Job(n, n, [n, n + 10], [n, n + 10])])
        assert (answer.accepted(n), answer.reason(n)) == (1, Reason.BUSY)
        engine.finish(answer.job(n))
    assert engine.lookup(3, [1]).hits == 1
    loads = engine.step(loads=[Job(4, 4, [1], [5]), Job(5, 5, [2], [6])])
    assert [loads.reason(t) for t in (4, 5)] == [Reason.NONE, Reason.NONE]
    engine.finish(loads.job(4), loads.job(5))


# ---- steps ---------------------------------------------------------------------------------------------


def test_a_repeated_step_gets_the_same_answer_and_changes_nothing(world):
    engine = world.engine()
    message = engine.message(stores=[Job(1, 1, [1], [1])])
    world.send(engine.link, message)
    [first] = world.heard(engine.link, StepAnswer)
    before = world.core.status()
    world.send(engine.link, message)
    [again] = world.heard(engine.link, StepAnswer)
    assert again == first and len(engine.plans()) == 1
    after = world.core.status()
    assert after.pop("counters")["steps_repeated"] == 1
    before.pop("counters")
    assert after == before
    engine.finish(*u64(first.jobs).tolist())


def test_a_gap_in_the_steps_is_counted_and_taken(world):
    engine = world.engine()
    engine.step(number=1)
    engine.step(number=5, stores=[])
    assert world.count("step_gaps") == 1 and world.count("steps") == 2


def test_plans_go_to_every_rank_alike_in_ticket_order(world):
    engine = world.engine()
    engine.hold([1], ticket=1)
    engine.plans(0), engine.plans(1)
    answer = engine.step(stores=[Job(5, 5, [5], [5]), Job(3, 3, [3], [3])], loads=[Job(4, 4, [1], [9])])
    [plan], [other] = engine.plans(0), engine.plans(1)
    assert plan == other
    assert u64(plan.tickets).tolist() == [3, 4, 5] and plan.planned_to == 5
    engine.finish(*(answer.job(t) for t in (3, 4, 5)))


def test_each_filling_of_a_slot_has_a_generation_of_its_own(worlds):
    """What a worker writes into a slot's header names this filling and no other."""
    world = worlds(slots=2)
    engine = world.engine()
    seen = []
    for n in range(6):
        engine.hold([f"{n}a", f"{n}b"], ticket=n + 1)
        [plan] = engine.plans()
        seen += u64(plan.generations).tolist()
    assert seen == sorted(set(seen)) and len(seen) == 12
    load = engine.load(20, 20, ["5a", "5b"], [1, 2])
    [plan] = engine.plans()
    assert set(u64(plan.generations).tolist()) == set(seen[-2:])
    engine.finish(load)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_old_jobs_end_is_not_booked_on_the_requests_new_life(world, order):
    """Case 23: a preempted request comes back under another number; its old store ends for the old one."""
    engine = world.engine()
    jobs = [engine.store(1, 1, [1], [1])]
    engine.step(ends=[1])
    jobs.append(engine.store(2, 2, [2], [2]))
    engine.finish(jobs[order[0]])
    assert set(engine.ended()) == {order[0] + 1} and world.jobs == 1
    engine.finish(jobs[order[1]])
    assert engine.lookup(9, [1]).next == Next.END
