"""Who dies or stalls, and what that frees: nothing but a word or a reap ends a copy."""

import pytest

from kvferry.proto.columns import pack_u8, pack_u32, pack_u64
from kvferry.proto.hot import Done
from kvferry.proto.outcome import Next, Outcome

from .dummy import Engine, Job, S


def test_a_worker_that_dies_mid_load_fails_it_at_the_reap_and_not_before(world):
    engine = world.engine()
    engine.hold([1], ticket=1)
    engine.ended()
    load = engine.load(2, 2, [1], [20])
    engine.done(0, load)
    world.lose(engine.worker_link[1])
    assert engine.ended() == {} and world.sums()["pinned"] == 1
    world.reap(engine.worker[1])
    assert engine.ended() == {2: Outcome.WORKER_DIED} and world.sums()["pinned"] == 0
    engine.attach(1)
    assert engine.lookup(3, [1]).hits == 1


def test_a_worker_that_dies_mid_store_fails_it_and_its_slots_wait_for_the_others(world):
    """Case 36: every exit of a job passes one point: fence gone, slot back."""
    engine = world.engine()
    job = engine.store(1, 1, [1], [1])
    engine.die(1)
    assert engine.ended() == {1: Outcome.WORKER_DIED}
    assert world.sums()["quarantined"] == 1 and world.core.status()["fences"] == 1
    engine.done(0, job)
    assert world.sums()["free"] == 16 and world.core.status()["fences"] == 0


def test_a_store_past_its_deadline_is_answered_at_once_and_its_places_wait(worlds):
    world = worlds(job_ns=2 * S, grace_ns=1 * S)
    engine = world.engine()
    job = engine.store(1, 1, [1], [7])
    engine.done(0, job)
    world.wait(2 * S)
    assert engine.ended() == {1: Outcome.DEADLINE} and engine.cancels(1) == [job]
    assert world.sums()["quarantined"] == 1
    assert engine.step(written=[7]).wait_for == []  # never to be published
    world.wait(1 * S)
    assert world.kills() == [engine.worker[1]]
    assert world.sums()["quarantined"] == 1, "asking for a death is no proof of it"
    world.reap(engine.worker[1])
    assert world.sums()["quarantined"] == 0


def test_a_load_past_its_deadline_is_cancelled_then_its_silent_worker_killed(worlds):
    world = worlds(job_ns=2 * S, grace_ns=1 * S)
    engine = world.engine()
    engine.hold([1], ticket=1)
    engine.ended()
    load = engine.load(2, 2, [1], [20])
    world.wait(2 * S)
    assert engine.ended() == {} and engine.cancels(0) == [load] and engine.cancels(1) == [load]
    engine.done(0, load, outcome=Outcome.CANCELLED)
    world.wait(1 * S)
    assert world.kills() == [engine.worker[1]]
    world.wait(60 * S)
    assert engine.ended() == {} and world.kills() == [engine.worker[1]]
    engine.die(1)
    assert engine.ended() == {2: Outcome.DEADLINE}


def test_what_is_due_is_done_before_anything_new_is_looked_at(worlds):
    """Whether the shell woke for the deadline or not, the same happens."""
    world = worlds(job_ns=2 * S)
    engine = world.engine()
    job = engine.store(1, 1, [1], [1])
    world.now += 5 * S
    engine.done(0, job)
    engine.done(1, job)
    assert engine.ended() == {1: Outcome.DEADLINE}
    assert engine.lookup(2, [1]).next == Next.MISS


def test_a_worker_whose_link_broke_is_killed_if_it_does_not_die(worlds):
    """It cannot be heard any more: without its death its blocks and its seat would be held for ever."""
    world = worlds(grace_ns=1 * S)
    engine = world.engine()
    world.lose(engine.worker_link[1])
    world.wait(1 * S - 1)
    assert world.kills() == []
    world.wait(1)
    assert world.kills() == [engine.worker[1]]
    world.reap(engine.worker[1])
    assert world.core.next_due_ns() is None


def test_a_rank_that_leaves_politely_drains_first(world):
    """RankGone is a notice: what its worker still says counts."""
    engine = world.engine()
    job = engine.store(1, 1, [1], [1])
    engine.rank_gone(1)
    engine.done(1, job)
    engine.done(0, job)
    assert engine.ended() == {1: Outcome.OK}
    world.lose(engine.worker_link[1])
    world.reap(engine.worker[1])
    assert world.kills() == []


def test_late_unknown_and_foreign_words_change_nothing(world):
    """Case 20 and 21: words on jobs that are over, of another boot, or of somebody else's are counted."""
    a, b = world.engine("a"), world.engine("b")
    over = a.store(1, 1, [1], [1])
    a.finish(over)
    running = a.store(2, 2, [2], [2])
    before = world.core.status()
    a.done(0, over)
    a.done(0, (0xDEAD << 40) | 5)
    b.done(0, running)
    after = world.core.status()
    before.pop("counters"), after.pop("counters")
    assert after == before
    assert [world.count(f"words_{how}") for how in ("unknown", "of_another_boot", "foreign")] == [1, 1, 1]
    a.finish(running)


def test_words_of_a_worker_that_never_attached_are_counted(world):
    engine = world.engine()
    job = engine.store(1, 1, [1], [1])
    stranger = world.open("worker")
    world.send(stranger, Done(jobs=pack_u64([job]), outcomes=pack_u8([0]), copy_us=pack_u32([0])))
    assert world.count("words_of_strangers") == 1 and world.jobs == 1
    engine.finish(job)


def test_an_outcome_that_this_build_does_not_know_is_no_success(world):
    engine = world.engine()
    job = engine.store(1, 1, [1], [1])
    engine.done(0, job)
    words = Done(jobs=pack_u64([job]), outcomes=pack_u8([200]), copy_us=pack_u32([0]))
    world.send(engine.worker_link[1], words)
    assert engine.ended() == {1: Outcome.COPY_FAILED}


@pytest.mark.parametrize("outcome", [o for o in Outcome if o is not Outcome.OK])
@pytest.mark.parametrize("rank", [0, 1])
def test_no_failed_word_of_any_rank_is_ever_published(world, outcome, rank):
    engine = world.engine()
    job = engine.store(1, 1, [1], [1])
    engine.done(rank, job, outcome=outcome)
    engine.done(1 - rank, job)
    assert engine.ended() == {1: outcome}
    assert engine.lookup(2, [1]).next == Next.MISS and world.sums()["free"] == 16


def test_all_ranks_of_one_engine_die_and_the_cache_stays_for_the_next(world):
    """Case 30: everything the engine held is given back; what was stored hits at once."""
    engine = world.engine("e", pid=5)
    engine.hold([1, 2], ticket=1)
    engine.lookup(2, [1, 2])
    engine.step(stores=[Job(3, 3, [3], [3])], loads=[Job(4, 4, [1], [9])])
    for rank in (0, 1):
        world.lose(engine.worker_link[rank])
    world.lose(engine.link)
    for rank in (0, 1):
        world.reap(engine.worker[rank])
    assert not any(world.core.at_rest().values())
    again = Engine(world, "e", pid=6)
    again.register()
    again.attach(0)
    again.attach(1)
    assert again.lookup(1, [1, 2, 3]).hits == 2


def test_a_clock_that_goes_back_counts_as_no_time(world):
    engine = world.engine()
    engine.hold([1], ticket=1)
    engine.lookup(2, [1])
    world.now -= 1 * S
    engine.lookup(3, [1])
    assert world.core.status()["leases"] == 2


def test_the_same_events_give_the_same_actions(worlds):
    def play():
        world = worlds()
        engine = world.engine()
        engine.hold([1, 2, 3], ticket=1)
        engine.lookup(2, [1, 2])
        job = engine.store(3, 3, [4], [4])
        engine.step(ends=[2, 3], written=[4])
        engine.die(1)
        engine.done(0, job)
        world.wait(60 * S)
        return world.said

    assert repr(play()) == repr(play())
