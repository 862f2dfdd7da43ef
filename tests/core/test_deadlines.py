"""How long a job may take: a fixed part, and its bytes over what its workers have lately managed."""

from kvferry.proto.columns import pack_u8, pack_u32, pack_u64
from kvferry.proto.hot import Done
from kvferry.proto.outcome import Next, Outcome
from kvferry.scheduler_daemon.core import ending
from kvferry.scheduler_daemon.core.pace import MIN_BYTES, NUM_SAMPLES, Pace

from .dummy import MS, Job, S

MIB = 1 << 20


def words(engine, rank: int, job: int, copy_us: int) -> None:
    done = Done(jobs=pack_u64([job]), outcomes=pack_u8([0]), copy_us=pack_u32([copy_us]))
    engine.world.send(engine.worker_link[rank], done)


def test_what_has_not_been_measured_is_reckoned_at_the_floor(worlds):
    world = worlds(tp=1, job_ns=1 * S, floor_bytes_per_s=100 * MIB)
    engine = world.engine(payload=50 * MIB)
    engine.store(1, 1, [1, 2], [1, 2])  # 100 MiB: one second at the floor
    world.wait(2 * S - 1)
    assert engine.ended() == {}
    world.wait(1)
    assert engine.ended() == {1: Outcome.DEADLINE}


def test_a_measured_worker_gets_a_nearer_deadline(worlds):
    world = worlds(tp=1, job_ns=1 * S, floor_bytes_per_s=10 * MIB)
    engine = world.engine(payload=50 * MIB)
    words(engine, 0, engine.store(1, 1, [1], [1]), 50_000)  # 1000 MiB/s
    engine.store(2, 2, [2, 3], [2, 3])
    world.wait(1 * S + 99 * MS)
    assert engine.ended() == {1: Outcome.OK}
    world.wait(2 * MS)
    assert engine.ended() == {2: Outcome.DEADLINE}


def test_the_slowest_rank_sets_the_deadline(worlds):
    world = worlds(tp=2, job_ns=1 * S, floor_bytes_per_s=10 * MIB)
    engine = world.engine(payload=50 * MIB)
    job = engine.store(1, 1, [1], [1])
    words(engine, 0, job, 5_000)
    words(engine, 1, job, 500_000)  # 100 MiB/s
    engine.store(2, 2, [2], [2])
    world.wait(1 * S + 499 * MS)
    assert engine.ended() == {1: Outcome.OK}
    world.wait(2 * MS)
    assert engine.ended() == {2: Outcome.DEADLINE}


def test_what_is_in_flight_before_a_job_counts_as_its_time_too(worlds):
    """Copies queue: the last of many may take what all of them take."""
    world = worlds(tp=1, job_ns=1 * S, floor_bytes_per_s=100 * MIB)
    engine = world.engine(payload=50 * MIB)
    engine.step(stores=[Job(1, 1, [1], [1]), Job(2, 2, [2], [2]), Job(3, 3, [3], [3])])
    for _, ticket in zip(range(3), (1, 2, 3), strict=True):
        world.wait(1500 * MS if ticket == 1 else 500 * MS)
        assert engine.ended() == {ticket: Outcome.DEADLINE}


def test_one_engine_that_is_slow_delays_no_other_ones_deadline(worlds):
    """A slow rank slows its own jobs; deadlines come in the order of their times, not of acceptance."""
    world = worlds(tp=1, slots=64, job_ns=1 * S, floor_bytes_per_s=MIB)
    slow, fast = world.engine("slow", payload=MIB), world.engine("fast", payload=MIB)
    words(fast, 0, fast.store(1, 1, [1], [1]), 1_000)  # 1000 MiB/s
    fast.ended()
    slow.store(1, 1, range(10, 20), range(10))  # ten seconds at the floor
    fast.store(2, 2, [2], [2])
    world.wait(1 * S + 2 * MS)
    assert fast.ended() == {2: Outcome.DEADLINE} and slow.ended() == {}
    world.wait(10 * S)
    assert slow.ended() == {1: Outcome.DEADLINE}


def test_pending_has_an_end(worlds):
    """Case 48: a store that never ends is a miss once its deadline is over; until then: when to ask again."""
    world = worlds(job_ns=2 * S)
    engine = world.engine()
    engine.store(1, 1, [1], [1])
    answer = engine.lookup(2, [1])
    assert (answer.next, answer.retry_ms > 0) == (Next.PENDING, True)
    world.wait(2 * S)
    assert engine.lookup(2, [1]).next == Next.MISS


def test_small_copies_say_nothing_of_bandwidth():
    pace = Pace()
    pace.add(MIN_BYTES - 1, 10**6)
    pace.add(MIN_BYTES, 0)
    assert pace.bytes_per_s(7) == 7


def test_the_slowest_of_the_last_copies_counts_and_is_forgotten_in_time():
    pace = Pace()
    pace.add(MIN_BYTES, 1_000)
    pace.add(MIN_BYTES, 10_000)
    slow, quick = MIN_BYTES * 100, MIN_BYTES * 1000
    assert pace.bytes_per_s(1) == slow
    for _ in range(NUM_SAMPLES):
        pace.add(MIN_BYTES, 1_000)
    assert pace.bytes_per_s(1) == quick
    assert pace.bytes_per_s(2 * quick) == 2 * quick


def test_deadlines_of_jobs_that_are_over_are_swept_out(worlds, monkeypatch):
    monkeypatch.setattr(ending, "DEADLINES_KEPT", 50)
    world = worlds(tp=1)
    engine = world.engine()
    world.core.check = lambda: None
    for ticket in range(1, 501):
        engine.finish(engine.store(ticket, ticket, [ticket % 7], [1]) or 0)
        if ticket % 5 == 0:
            engine.step(ends=range(ticket - 4, ticket + 1))
            engine.rotate(b"%d" % ticket)
        world.said.clear()
    assert len(world.core._desk.deadlines) < 60


def test_placement_that_fails_leaves_nothing_locked(worlds):
    """Case 52: a store that finds no room is refused as a whole, and the next operations work."""
    world = worlds(slots=4)
    engine = world.engine()
    engine.hold([1, 2, 3, 4], ticket=1)
    load = engine.load(2, 2, [1, 2, 3, 4], [10, 11, 12, 13])
    before = world.sums()
    for ticket in range(3, 20):
        assert engine.step(stores=[Job(ticket, ticket, [5, 6], [5, 6])]).accepted(ticket) == 0
    assert world.sums() == before and world.core.status()["fences"] == 0
    engine.finish(load)
    engine.finish(engine.store(30, 30, [5, 6], [5, 6]))
    assert engine.lookup(31, [5, 6]).hits == 2


def test_a_refused_registration_is_told_to_the_log_once(world):
    """A client tries again for ever; the log hears of it when it begins and when something changes."""
    from .dummy import Engine

    engine = Engine(world, "e")
    for _ in range(50):
        engine.register(world_size=4)
        world.lose(engine.link)
    for _ in range(50):
        engine.attach(0, world_size=3)
    assert len([note for note in world.notes() if "refused" in note]) == 2
    assert world.count("refused.register.world_size") == 100
    engine.register()
    world.lose(engine.link)
    engine.register(world_size=4)
    assert len([note for note in world.notes() if "refused" in note]) == 3


def test_a_load_is_given_up_sooner_than_a_store_whose_forward_may_take_long(worlds):
    """A request stands still for its load, and nobody for a store that waits for its forward."""
    world = worlds(tp=1, job_ns=30 * S, load_ns=5 * S, grace_ns=2 * S)
    engine = world.engine()
    engine.hold([1], ticket=1)
    load = engine.load(2, 2, [1], [3])
    store = engine.store(3, 3, [2], [4])
    world.wait(5 * S - 1)
    assert engine.cancels() == []
    world.wait(5 * MS)  # what its bytes take
    assert engine.cancels() == [load]
    world.wait(2 * S)
    assert world.kills() == [engine.worker[0]]
    assert store and 3 not in engine.ended()
