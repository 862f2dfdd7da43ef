"""Pins with an owner and an end (cases of kinds C and D)."""

from kvferry.proto.outcome import Next, Reason

from .dummy import MS, S


def test_a_hit_that_is_leased_can_be_loaded_whatever_is_stored_meanwhile(worlds):
    """Case 24: between lookup and load the pool was filled; without a lease the load is refused by name."""
    world = worlds(slots=8, lease_share=0.5)
    engine = world.engine()
    engine.hold([1, 2, 3, 4], ticket=1)
    engine.hold([5, 6, 7, 8], ticket=2)
    leased = engine.lookup(3, [1, 2, 3, 4])
    assert leased.lease and leased.lease_ms == 10_000
    for n in range(4):
        engine.hold([f"{n}x{m}" for m in range(4)], ticket=10 + n)
    load = engine.load(20, 3, [1, 2, 3, 4], [30, 31, 32, 33], leased.lease)
    assert load
    engine.finish(load)
    from .dummy import Job

    refused = engine.step(loads=[Job(21, 4, [5, 6, 7, 8], [40, 41, 42, 43])])
    assert refused.reason(21) == Reason.MISSING


def test_leases_hold_at_most_their_share_and_further_hits_come_unleased(worlds):
    world = worlds(slots=8, lease_share=0.5)
    engine = world.engine()
    engine.hold([1, 2, 3, 4], ticket=1)
    engine.hold([5], ticket=2)
    assert engine.lookup(3, [1, 2, 3, 4]).lease
    beyond = engine.lookup(4, [5])
    assert (beyond.hits, beyond.lease) == (1, 0)
    # Slots leased already cost the share nothing: many requests may share a prefix.
    assert engine.lookup(5, [1, 2]).lease
    assert world.sums()["leased"] == 4


def test_leases_end_by_load_release_end_of_request_and_time(world):
    """Case 34: a third loaded, a third aborted, a third left alone; after the lease time nothing is pinned."""
    engine = world.engine()
    engine.hold([1, 2], ticket=1)
    for n in range(10, 100, 3):
        engine.lookup(n, [1, 2])
        engine.step(ends=[n])
        lease = engine.lookup(n + 1, [1, 2]).lease
        engine.step(released=[lease])
        engine.lookup(n + 2, [1, 2])
    assert world.sums()["pinned"] == 2 and world.core.status()["leases"] == 30
    world.wait(10 * S)
    assert world.sums()["pinned"] == 0 and world.core.status()["leases"] == 0
    assert world.core.status()["requests"] == 0
    assert world.count("leases_expired") == 30


def test_a_release_names_a_lease_and_an_unknown_one_is_harmless(world):
    """Case 35."""
    engine = world.engine(salt=b"tenant")
    engine.hold([1], ticket=1)
    lease = engine.lookup(2, [1]).lease
    engine.step(released=[lease])
    assert world.sums()["pinned"] == 0
    engine.step(released=[lease, 12345])
    engine.renew(lease)
    assert world.count("leases_unknown") == 3


def test_nobody_can_release_or_renew_what_another_holds(world):
    """Case 39: readers A and B hold one key; A releases twice, C once; B's pin stands."""
    a, b, c = (world.engine(name) for name in "abc")
    a.hold([1], ticket=1)
    lease_a, lease_b = a.lookup(2, [1]).lease, b.lookup(2, [1]).lease
    a.step(released=[lease_a])
    a.step(released=[lease_a])
    c.step(released=[lease_b])
    c.renew(lease_b)
    assert world.sums()["leased"] == 1
    assert (world.count("leases_unknown"), world.count("leases_foreign")) == (1, 2)
    load = b.load(3, 2, [1], [5], lease_b)
    b.finish(load)


def test_a_load_cannot_use_another_engines_lease(world):
    a, b = world.engine("a"), world.engine("b")
    a.hold([1], ticket=1)
    lease = a.lookup(2, [1]).lease
    load = b.load(1, 1, [1], [5], lease)  # the key is there for both, so b may load it; a's lease stands
    assert world.count("leases_foreign") == 1 and world.core.status()["leases"] == 1
    b.finish(load)
    assert world.sums()["leased"] == 1


def test_looking_up_again_starts_afresh(world):
    """Case 25: what the first lookup held is gone as a whole."""
    engine = world.engine()
    engine.hold([1, 2], ticket=1)
    first = engine.lookup(2, [1, 2])
    second = engine.lookup(2, [1])
    assert first.lease != second.lease and world.core.status()["leases"] == 1
    assert world.sums()["leased"] == 1
    engine.renew(first.lease)
    assert world.count("leases_unknown") == 1


def test_a_pending_key_says_when_to_ask_again_and_ends_with_its_job(worlds):
    """Case 48: pending has a deadline; after it the key is a miss."""
    world = worlds(job_ns=2 * S)
    engine = world.engine()
    engine.store(1, 1, [1], [1])
    answer = engine.lookup(2, [1])
    assert (answer.next, answer.retry_ms) == (Next.PENDING, 5)
    world.wait(1999 * MS)
    assert engine.lookup(2, [1]).next == Next.PENDING
    world.wait(1 * MS)
    assert engine.lookup(2, [1]).next == Next.MISS


def test_what_was_asked_is_hit_pending_missed_or_refused(world):
    """Case 120: the counters add up, key by key."""
    engine = world.engine()
    engine.hold([1, 2], ticket=1)
    job = engine.store(2, 2, [3], [3])
    engine.lookup(3, [1, 2, 3, 4])
    engine.lookup(4, [9])
    engine.lookup(5, [1, 2])
    engine.lookup(6, [1], epoch=5)
    counters = world.core.status()["counters"]
    assert {name: n for name, n in counters.items() if name.startswith("lookup_keys")} == {
        "lookup_keys": 8,
        "lookup_keys_hit": 4,
        "lookup_keys_pending": 2,
        "lookup_keys_missed": 1,
        "lookup_keys_refused.STALE_EPOCH": 1,
    }
    engine.finish(job)


def test_due_times_follow_what_is_held(worlds):
    world = worlds(lease_ns=3 * S, job_ns=2 * S, grace_ns=1 * S)
    engine = world.engine()
    assert world.core.next_due_ns() is None
    engine.hold([1], ticket=1)
    start = world.now
    engine.lookup(2, [1])
    assert world.core.next_due_ns() == start + 3 * S
    world.now += S // 2
    job = engine.store(3, 3, [2], [2])
    assert world.core.next_due_ns() == start + S // 2 + 2 * S
    engine.finish(job)
    assert world.core.next_due_ns() == start + 3 * S
