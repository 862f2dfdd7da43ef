"""What kvferry was begun for: completion per job, loadable at once, and the fence that this costs."""

from kvferry.proto.columns import u64
from kvferry.proto.outcome import Kind, Next, Outcome, Reason

from .dummy import Job, World


def test_a_job_ends_when_the_reports_of_its_ranks_add_up(worlds):
    """Disjoint jobs over three ranks, reported in any order and in one message or many."""
    world = worlds(tp=3)
    engine = world.engine()
    answer = engine.step(stores=[Job(1, 1, [1, 2], [1, 2]), Job(2, 2, [3], [3]), Job(3, 2, [4], [4])])
    one, two, three = (answer.job(ticket) for ticket in (1, 2, 3))
    engine.done(0, one, two)
    engine.done(2, two)
    engine.done(1, three, two)
    assert engine.ended() == {2: Outcome.OK}
    engine.done(1, one)
    engine.done(0, three)
    assert engine.ended() == {}
    engine.done(2, one, three)
    assert engine.ended() == {1: Outcome.OK, 3: Outcome.OK}


def test_a_repeated_report_of_one_rank_does_not_count_twice(world):
    engine = world.engine()
    job = engine.store(1, 1, [1], [1])
    engine.done(0, job)
    engine.done(0, job, job)
    assert engine.ended() == {}
    assert world.count("words_repeated") == 2
    engine.done(1, job)
    assert engine.ended() == {1: Outcome.OK}
    engine.done(1, job)
    assert engine.ended() == {}
    assert world.count("words_unknown") == 1


def test_blocks_are_loadable_at_the_last_ranks_report_while_their_request_still_runs(world):
    """Completion and loadability are one step, and another request loads before the first one ends."""
    engine = world.engine()
    first = engine.step(stores=[Job(1, 1, [1, 2], [1, 2]), Job(2, 1, [3, 4], [3, 4])])
    engine.done(0, first.job(1), first.job(2))
    answer = engine.lookup(2, [1, 2, 3])
    assert (answer.hits, answer.next) == (0, Next.PENDING)
    engine.done(1, first.job(1))
    answer = engine.lookup(2, [1, 2, 3])
    assert (answer.hits, answer.next) == (2, Next.PENDING)
    load = engine.load(3, 2, [1, 2], [10, 11], answer.lease)
    engine.finish(load)
    assert engine.ended() == {1: Outcome.OK, 3: Outcome.OK}
    engine.done(1, first.job(2))
    engine.step(ends=[1])
    assert engine.ended() == {2: Outcome.OK}


def test_a_load_into_blocks_that_a_store_still_reads_hits_its_fence(world):
    engine = world.engine()
    engine.hold([1], ticket=1)
    store = engine.store(2, 2, [5], [7])
    answer = engine.step(loads=[Job(3, 3, [1], [7])], ends=[2])
    assert answer.wait_for == [2]
    assert answer.job(3)
    assert engine.ended()[2] == Outcome.REVOKED
    engine.finish(answer.job(3), store)
    assert engine.lookup(4, [5]).next == Next.MISS


def test_a_store_plan_that_meets_reallocated_blocks_is_never_published(world):
    """Stored and given away within one step: the store comes first, so its fence is there to be hit."""
    engine = world.engine()
    answer = engine.step(stores=[Job(1, 1, [1, 2], [7, 8]), Job(2, 2, [3], [9])], ends=[1], written=[8, 30])
    assert answer.wait_for == [1]
    engine.finish(answer.job(1), answer.job(2))
    assert engine.ended() == {1: Outcome.REVOKED, 2: Outcome.OK}
    assert engine.lookup(3, [1]).hits == 0
    assert engine.lookup(3, [3]).hits == 1


def test_loads_never_enter_the_fence_index(world):
    engine = world.engine()
    engine.hold([1, 2], ticket=1)
    load = engine.load(2, 2, [1, 2], [20, 21])
    assert world.core.status()["fences"] == 0
    assert engine.step(written=[20, 21]).wait_for == []
    engine.finish(load)


def test_ending_a_request_leaves_its_running_store_alone(world):
    engine = world.engine()
    job = engine.store(1, 1, [1], [1])
    engine.step(ends=[1])
    assert world.jobs == 1 and world.core.status()["fences"] == 1
    engine.finish(job)
    assert engine.ended() == {1: Outcome.OK}
    assert engine.lookup(2, [1]).hits == 1
    assert world.core.status()["requests"] == 1  # that of the lookup's lease


def test_ending_a_request_costs_its_own_jobs_only(world):
    """Of many jobs only those of the ended request are looked at: the others' records do not change."""
    engine = world.engine()
    jobs = [engine.store(n, n, [n], [n]) for n in range(1, 11)]
    engine.step(ends=[3], written=[3])
    assert engine.ended() == {3: Outcome.REVOKED}
    engine.finish(*jobs)
    assert engine.ended() == {n: Outcome.OK for n in range(1, 11) if n != 3}


def test_stores_and_loads_share_one_id_space(world):
    engine = world.engine()
    engine.hold([1], ticket=1)
    answer = engine.step(stores=[Job(2, 2, [2], [2])], loads=[Job(3, 3, [1], [3])])
    later = engine.store(4, 4, [4], [4])
    ids = [answer.job(2), answer.job(3), later]
    assert len(set(ids)) == 3 and ids == sorted(ids)
    [_, plan, _] = engine.plans()
    assert u64(plan.jobs).tolist() == ids[:2] and list(plan.kinds) == [Kind.STORE, Kind.LOAD]
    engine.finish(*ids)


def test_a_request_has_one_load_or_any_number_of_stores(world):
    engine = world.engine()
    engine.hold([1, 2], ticket=1)
    stores = engine.step(stores=[Job(2, 2, [3], [3]), Job(3, 2, [4], [4])], loads=[Job(4, 2, [1], [5])])
    assert [stores.reason(t) for t in (2, 3, 4)] == [Reason.NONE, Reason.NONE, Reason.LOAD_OR_STORE]
    loads = engine.step(loads=[Job(5, 3, [1], [6]), Job(6, 3, [2], [7])])
    assert [loads.reason(t) for t in (5, 6)] == [Reason.NONE, Reason.LOAD_OR_STORE]
    assert engine.step(stores=[Job(7, 3, [8], [8])]).reason(7) == Reason.LOAD_OR_STORE
    engine.finish(stores.job(2), stores.job(3), loads.job(5))
    # Only unended jobs count: the same request may now go the other way.
    again = engine.step(loads=[Job(8, 2, [1], [5])], stores=[Job(9, 3, [8], [8])])
    assert [again.reason(t) for t in (8, 9)] == [Reason.NONE, Reason.NONE]


def test_a_failed_rank_fails_the_job_and_its_slots_wait_for_the_other_ranks(world: World):
    engine = world.engine()
    job = engine.store(1, 1, [1, 2], [1, 2])
    engine.done(0, job, outcome=Outcome.COPY_FAILED)
    assert engine.ended() == {1: Outcome.COPY_FAILED}
    assert engine.lookup(2, [1]).next == Next.MISS
    assert world.sums()["quarantined"] == 2 and engine.cancels(1) == [job]
    engine.done(1, job)
    assert world.sums()["quarantined"] == 0 and world.sums()["free"] == 16
    assert engine.ended() == {}
