"""Many ranks, one verdict (kind I): decided once, in the daemon, counted per job."""

import random
from dataclasses import replace

import numpy as np
import pytest

from kvferry.proto.columns import pack_u32
from kvferry.proto.control import Refused
from kvferry.proto.hot import Plan
from kvferry.proto.outcome import Next, Outcome
from kvferry.scheduler_daemon.core.index import KeyIndex
from kvferry.scheduler_daemon.core.pool import HostPool

from .dummy import Engine, Job


def test_nothing_is_loadable_before_the_last_of_four_ranks_has_reported(worlds):
    """Case 80: many jobs, ranks in any order, the slow one last; jobs may end in another order than they came."""
    world = worlds(tp=4, slots=60)
    engine = world.engine()
    answer = engine.step(stores=[Job(n, n, [n], [n]) for n in range(1, 51)])
    jobs = {n: answer.job(n) for n in range(1, 51)}
    dice = random.Random(80)
    for rank in (0, 1, 2):
        order = list(jobs.values())
        dice.shuffle(order)
        engine.done(rank, *order)
    assert engine.ended() == {}
    late = list(jobs)
    dice.shuffle(late)
    for asked, n in enumerate(late):
        assert engine.lookup(1000 + asked, [n]).next == Next.PENDING
        engine.done(3, jobs[n])
        assert engine.lookup(2000 + asked, [n]).hits == 1
    assert list(engine.ended()) == late


def test_the_expected_ranks_of_a_job_are_fixed_when_it_is_accepted(world):
    """Case 82: a rank that comes, goes or comes back changes no job that runs."""
    engine = world.engine()
    job = engine.store(1, 1, [1], [1])
    engine.done(0, job)
    engine.rank_gone(0)
    engine.attach(0)
    assert world.jobs == 1
    engine.done(1, job)
    assert engine.ended() == {1: Outcome.OK}


def test_the_death_of_one_stage_fails_its_own_engines_jobs_only(worlds):
    """Case 83: stages with different bytes a block, four reports a job; another engine does not notice."""
    world = worlds(tp=4)
    staged = world.engine("staged", payload=[4096, 4096, 12288, 12288])
    other = world.engine("other", payload=[4096, 4096, 12288, 12288])
    one, two = staged.store(1, 1, [1], [1]), other.store(1, 1, [2], [1])
    for rank in (0, 1, 2):
        staged.done(rank, one)
        other.done(rank, two)
    staged.die(3)
    other.done(3, two)
    assert staged.ended() == {1: Outcome.WORKER_DIED} and other.ended() == {1: Outcome.OK}


def test_a_second_claim_of_a_rank_leaves_the_first_undisturbed(world):
    """Case 84."""
    engine = world.engine()
    before = world.core.status()["engines"]
    rival = Engine(world, "e")
    rival.attach(0)
    [refused] = world.heard(rival.worker_link[0], Refused)
    assert refused.code == "register.rank_taken"
    assert world.core.status()["engines"] == before
    engine.hold([1], ticket=1)


def test_two_engines_of_one_process_number_are_two_engines(world):
    """Case 85: two containers, both pid 1."""
    a, b = world.engine("a", pid=1), world.engine("b", pid=1, salt=b"b")
    a.hold([1], ticket=1)
    world.lose(b.link)
    b.register()
    assert a.lookup(2, [1]).hits == 1 and b.lookup(1, [1]).next == Next.MISS


def test_all_ranks_get_one_plan_and_one_ranks_failure_is_every_ranks(worlds):
    """Case 89: placement is decided once; a rank that cannot copy fails the job for all."""
    world = worlds(tp=3)
    engine = world.engine()
    job = engine.store(1, 1, [1, 2], [1, 2])
    assert engine.plans(0) == engine.plans(1) == engine.plans(2)
    engine.done(0, job)
    engine.done(2, job, outcome=Outcome.BAD_PLAN)
    engine.done(1, job)
    assert engine.ended() == {1: Outcome.BAD_PLAN}
    assert engine.lookup(2, [1, 2]).hits == 0 and world.sums()["free"] == 16


@pytest.mark.parametrize("tp", [1, 2, 8, 64])
def test_any_number_of_ranks_up_to_the_limit_serves(worlds, tp):
    world = worlds(tp=tp)
    engine = world.engine()
    engine.hold([1, 2], ticket=1)
    load = engine.load(2, 2, [1, 2], [5, 6])
    for rank in range(tp):
        assert world.jobs == 1
        engine.done(rank, load)
    assert world.jobs == 0


def test_refusing_a_store_costs_its_first_missing_key_only():
    """Case 56: with everything pinned, nothing is walked: not the pool, and not the rest of the chain."""
    walked = 0

    class Watched(bytes):
        def __getitem__(self, at):  # the shard of a key is asked by its first byte
            nonlocal walked
            walked += 1
            return bytes.__getitem__(self, at)

    pool, index = HostPool(8), KeyIndex()
    held = [bytes([n]) for n in range(8)]
    entries = pool.reserve(index, held, [], 1)
    slots = np.array([entry.slot for entry in entries], dtype=np.uint32)
    pool.slots.write(slots, held, key_bytes=1, groups=0, namespace=b"", epoch=0, payload_bytes=1)
    pool.publish(entries, slots)
    pool.pin(entries)
    survey = pool.survey(index, [Watched(bytes([n])) for n in range(3, 200)], 1 << 30)
    assert (survey.accepted, survey.full, walked) == (5, True, 6)


def test_a_step_larger_than_one_plan_is_refused_by_name(world):
    engine = world.engine()
    many = (1 << 20) // 2 + 1
    blocks, keys = pack_u32(np.zeros(many, dtype=np.uint32)), bytes(8 * many)
    step = engine.message()
    one = pack_u32([many])
    huge = replace(
        step,
        store_tickets=(1).to_bytes(8, "little"),
        store_requests=bytes(8),
        store_groups=b"\0",
        store_counts=one,
        store_keys=keys,
        store_blocks=blocks,
        load_tickets=(2).to_bytes(8, "little"),
        load_requests=bytes(8),
        load_leases=bytes(8),
        load_groups=b"\0",
        load_counts=one,
        load_keys=keys,
        load_blocks=blocks,
    )
    huge.check()
    world.send(engine.link, huge)
    [refused] = world.heard(engine.link, Refused)
    assert refused.code == "message.limit"
    assert world.jobs == 0 and engine.plans() == [] and world.heard(engine.worker_link[1], Plan) == []
