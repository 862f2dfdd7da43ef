"""Blocks that change owner while stores read them (kinds A and B)."""

from kvferry.proto.columns import u64
from kvferry.proto.hot import Cancel, JobsEnded, Plan, StepAnswer
from kvferry.proto.outcome import Next, Outcome, Reason
from kvferry.scheduler_daemon.core.api import Send

from .dummy import Job


def test_an_aborted_requests_block_is_named_or_its_store_is_never_published(world):
    """Case 4: all ways of losing a block go through the store's fence, not through the request's finish path."""
    engine = world.engine()
    slow = engine.store(1, 1, [1], [7])
    engine.step(ends=[1])
    answer = engine.step(written=[7])
    assert answer.wait_for == [1]
    assert engine.cancels(0) == [slow] and engine.cancels(1) == [slow]
    engine.finish(slow)
    assert engine.ended() == {1: Outcome.REVOKED}
    assert engine.lookup(2, [1]).hits == 0
    # Once the store has ended, its block is free of fences.
    done = engine.store(2, 2, [2], [7])
    engine.finish(done)
    assert engine.step(written=[7]).wait_for == []
    assert engine.lookup(2, [2]).hits == 1


def test_a_fence_stands_from_acceptance_not_from_the_workers_first_byte(world):
    """Case 11: the workers have not even taken the plan; the answer lists the job."""
    engine = world.engine()
    engine.store(1, 1, [1], [7])
    assert engine.step(ends=[1], written=[7]).wait_for == [1]


def test_a_job_that_names_a_block_twice_is_fenced_and_released_once(world):
    """Case 13."""
    engine = world.engine()
    job = engine.store(1, 1, [1, 2], [7, 7])
    assert world.core.status()["fences"] == 1
    assert engine.step(written=[7, 7]).wait_for == [1]
    engine.finish(job)
    assert world.core.status()["fences"] == 0
    assert engine.step(written=[7]).wait_for == []


def test_of_two_stores_on_one_block_each_holds_its_own_fence(world):
    """Case 13: one job's release leaves the other's fence."""
    engine = world.engine()
    one, two = engine.store(1, 1, [1], [7]), engine.store(2, 2, [2], [7])
    engine.finish(one)
    assert engine.step(written=[7]).wait_for == [2]
    engine.finish(two)
    assert world.core.status()["fences"] == 0


def test_all_running_stores_of_a_request_are_met_not_only_the_newest(world):
    """Case 16: three stores of one request; giving up its blocks meets all three."""
    engine = world.engine()
    jobs = [engine.store(n, 1, [n], [n]) for n in (1, 2, 3)]
    assert engine.step(ends=[1], written=[1, 2, 3]).wait_for == [1, 2, 3]
    engine.finish(*jobs)


def test_the_answer_names_only_the_jobs_that_read_the_blocks(world):
    """The minimal set: neighbours and other requests' stores go on."""
    engine = world.engine()
    jobs = [engine.store(n, n, [n], [n * 2]) for n in (1, 2, 3)]
    assert engine.step(written=[4, 5]).wait_for == [2]
    engine.finish(*jobs)
    assert engine.ended() == {1: Outcome.OK, 2: Outcome.REVOKED, 3: Outcome.OK}


def test_a_revoke_that_the_client_sends_itself_needs_no_waiting(world):
    engine = world.engine()
    job = engine.store(1, 1, [1], [7])
    assert engine.step(written=[7], revoked=[1]).wait_for == []
    assert engine.ended() == {1: Outcome.REVOKED}
    assert engine.step(written=[7]).wait_for == []  # never to be published: nothing to wait for
    engine.finish(job)
    assert world.count("fence_hits") == 1


def test_a_late_revoke_is_counted_and_changes_nothing(world):
    engine = world.engine()
    engine.hold([1], ticket=1)
    engine.step(revoked=[1, 99], cancelled=[98])
    assert (world.count("revokes_late"), world.count("cancels_late")) == (2, 1)
    assert engine.lookup(2, [1]).hits == 1


def test_a_revoked_stores_slots_and_fence_stay_until_the_last_words(world):
    """Its answer is given at once; its places are nobody's while a rank may still write them."""
    engine = world.engine()
    job = engine.store(1, 1, [1, 2], [7, 8])
    engine.step(revoked=[1])
    assert engine.ended() == {1: Outcome.REVOKED}
    for rank in (0, 1):
        assert world.sums()["quarantined"] == 2 and world.core.status()["fences"] == 2
        engine.done(rank, job)
    assert world.sums()["quarantined"] == 0 and world.core.status()["fences"] == 0
    assert engine.lookup(2, [1]).next == Next.MISS


def test_a_store_cancelled_by_its_client_is_never_published(world):
    engine = world.engine()
    job = engine.store(1, 1, [1], [7])
    engine.step(cancelled=[1])
    engine.finish(job)
    assert engine.ended() == {1: Outcome.CANCELLED}
    assert engine.lookup(2, [1]).hits == 0


def test_a_cancelled_load_is_answered_by_its_ranks_only(world):
    """A load's blocks may still be written after a cancel: no word of its end before the last rank's."""
    engine = world.engine()
    engine.hold([1], ticket=1)
    engine.ended()
    job = engine.load(2, 2, [1], [7])
    engine.step(cancelled=[2])
    assert engine.ended() == {} and engine.cancels(0) == [job]
    engine.done(0, job, outcome=Outcome.CANCELLED)
    assert engine.ended() == {} and world.sums()["pinned"] == 1
    engine.done(1, job)
    assert engine.ended() == {2: Outcome.CANCELLED}


def test_blocks_outside_the_engine_are_counted_not_believed(world):
    engine = world.engine(num_blocks=64)
    answer = engine.step(stores=[Job(1, 1, [1], [64])], written=[64, 4_000_000_000])
    assert answer.reason(1) == Reason.BAD_BLOCKS
    assert world.count("written_blocks_bad") == 2


def test_the_answer_of_a_step_comes_before_the_ends_it_causes_and_plans_before_cancels(world):
    """A client must know the job of a ticket before that job ends; a worker the plan before its cancel."""
    engine = world.engine()
    actions = world.send(engine.link, engine.message(stores=[Job(1, 1, [1], [7])], written=[7]))
    to_client = [a.message for a in actions if isinstance(a, Send) and a.link == engine.link]
    assert [type(m) for m in to_client] == [StepAnswer, JobsEnded]
    to_worker = [a.message for a in actions if isinstance(a, Send) and a.link == engine.worker_link[0]]
    assert [type(m) for m in to_worker] == [Plan, Cancel]
    engine.finish(*u64(to_worker[0].jobs).tolist())


def test_a_new_request_does_not_wait_for_the_stores_of_the_last_one(world):
    """Case 15: stores in flight on slow ranks delay no lookup and no acceptance; all of them end by themselves."""
    engine = world.engine()
    jobs = [engine.store(n, 1, [n], [n]) for n in range(1, 9)]
    engine.step(ends=[1])
    assert engine.lookup(2, [50]).next == Next.MISS
    assert engine.store(20, 2, [50], [50])
    engine.finish(*jobs, max(jobs) + 1)
    assert len(engine.ended()) == 9


def test_a_source_slot_stays_pinned_until_the_last_rank_has_loaded(worlds):
    """Case 7: eviction under a full pool never takes a slot that a slow rank still reads."""
    world = worlds(slots=4)
    engine = world.engine()
    engine.hold([1], ticket=1)
    load = engine.load(2, 2, [1], [20])
    engine.done(0, load)
    engine.hold([2, 3, 4], ticket=3)
    engine.hold([5, 6, 7], ticket=4)
    answer = engine.step(stores=[Job(5, 5, [11, 12, 13, 14], [1, 2, 3, 4])])
    assert (answer.accepted(5), answer.reason(5)) == (3, Reason.POOL_FULL)
    assert engine.lookup(6, [1]).hits == 1
    engine.done(1, load)
    engine.finish(answer.job(5))


def test_a_load_whose_key_went_after_its_lease_is_refused_whole(worlds):
    """Case 5 and 10: the lease ended and the key was evicted; nothing is loaded, never other bytes."""
    world = worlds(slots=4)
    engine = world.engine()
    engine.hold([1, 2], ticket=1)
    lease = engine.lookup(2, [1, 2]).lease
    world.wait(11_000_000_000)
    engine.hold([5, 6, 7], ticket=3)
    answer = engine.step(loads=[Job(4, 2, [1, 2], [20, 21], lease)])
    assert (answer.job(4), answer.accepted(4), answer.reason(4)) == (0, 0, Reason.MISSING)


def test_a_lease_that_is_renewed_holds_its_hits(worlds):
    """Case 10: three lease times, renewed by its reader; under pressure the hits stay."""
    world = worlds(slots=4, lease_share=1.0)
    engine = world.engine()
    engine.hold([1, 2], ticket=1)
    lease = engine.lookup(2, [1, 2]).lease
    for n in range(3):
        world.wait(9_000_000_000)
        engine.renew(lease)
        engine.hold([f"f{n}", f"g{n}"], ticket=10 + n)
    load = engine.load(20, 2, [1, 2], [20, 21], lease)
    assert load
    engine.finish(load)


def test_a_torn_slot_is_a_miss_from_then_on(world):
    """Case 26: a load that finds wrong bytes fails as a result, and the key is not offered again."""
    engine = world.engine()
    engine.hold([1, 2], ticket=1)
    job = engine.load(2, 2, [1, 2], [20, 21])
    engine.done(0, job, outcome=Outcome.TORN)
    engine.done(1, job)
    assert engine.ended()[2] == Outcome.TORN
    assert engine.lookup(3, [1, 2]).hits == 0
    assert world.sums()["free"] == 16


def test_a_torn_slot_that_another_load_still_reads_is_not_reused(world):
    engine = world.engine()
    engine.hold([1], ticket=1)
    bad, other = engine.load(2, 2, [1], [20]), engine.load(3, 3, [1], [21])
    lease = engine.lookup(4, [1]).lease
    engine.done(0, bad, outcome=Outcome.TORN)
    engine.done(1, bad)
    assert world.sums()["quarantined"] == 1
    engine.finish(other)
    assert world.sums()["quarantined"] == 1
    engine.step(released=[lease])
    assert world.sums()["quarantined"] == 0
