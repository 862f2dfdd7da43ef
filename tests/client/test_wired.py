"""The client's cores against the real daemon core and the real worker core."""

from collections.abc import Iterator

import pytest

from kvferry.proto.outcome import Kind, Outcome, Reason
from tests.client.wired import WORKER_ID, Wired


@pytest.fixture
def wired() -> Iterator[Wired]:
    """Comes to rest when its test is over: nothing may be left anywhere."""
    made = Wired()
    yield made
    made.finish_copies()
    for number in range(2000):
        made.client.finish(f"r{number}", made.now_ns)
    for name in ("a", "b", "c", "d"):
        made.client.finish(name, made.now_ns)
    made.step().later(60_000).run()
    assert not any(made.daemon.at_rest().values()), made.daemon.at_rest()
    assert made.worker.at_rest() and not made.rank.open_loads
    gauges = made.client.describe()
    assert not any(gauges[name] for name in ("requests", "lookups", "leases", "stores_open", "loads_open"))


def test_stored_bytes_come_back_in_other_blocks(wired: Wired) -> None:
    ticket = wired.store("a", [1, 2, 3], [10, 11, 12])
    wired.step()
    assert wired.end_of(ticket).outcome is Outcome.OK
    wired.memory[:] = 0
    assert wired.hits("b", [1, 2, 3, 4]) == 3
    load = wired.load("b", [1, 2, 3], [20, 21, 22])
    wired.step()
    assert [(end.ticket, end.ok) for end in wired.load_ends] == [(load, True)]
    assert wired.memory[20:23].tolist() == [1, 2, 3]
    assert wired.end_of(load).kind is Kind.LOAD


def test_a_store_is_loadable_while_its_request_still_runs(wired: Wired) -> None:
    wired.store("a", [1], [10])
    wired.step()
    assert wired.hits("b", [1]) == 1
    wired.load("b", [1], [20])
    wired.store("a", [2], [11])
    wired.step()
    assert wired.memory[20] == 1 and wired.hits("c", [1, 2]) == 2


def test_a_store_that_lost_its_block_is_never_found(wired: Wired) -> None:
    """Case 4: the engine goes on without waiting, and no key ever holds the new owner's bytes."""
    wired.copies_run = False
    ticket = wired.store("a", [1], [7])
    wired.step()
    wired.client.abort("a", wired.now_ns)
    assert wired.client.written([7]) == {ticket}
    wired.step()
    wired.memory[7] = 999
    wired.finish_copies()
    assert wired.end_of(ticket).outcome is Outcome.REVOKED
    assert wired.hits("b", [1]) == 0


def test_the_daemons_fence_meets_nothing_that_the_mirror_had_not(wired: Wired) -> None:
    wired.copies_run = False
    for number in range(4):
        wired.store("a", [number + 1], [number])
        wired.step()
    wired.store("b", [10, 11], [0, 1])
    wired.step()
    wired.load("c", [1], [2])
    wired.step()
    assert wired.client.counters.wait_for == 0
    assert wired.client.counters.revokes == 3


def test_a_pending_key_becomes_a_hit_when_its_store_ends(wired: Wired) -> None:
    """Case 48: pending is told with when to ask again, and ends."""
    wired.copies_run = False
    wired.store("a", [1], [7])
    wired.step()
    assert wired.hits("b", [1]) == 0
    assert not wired.client.hits("b", wired.now_ns).ready
    wired.finish_copies()
    wired.later(6).run()
    assert wired.client.hits("b", wired.now_ns).count == 1


def test_a_lease_keeps_its_hits_while_the_pool_is_filled_around_it(wired: Wired) -> None:
    """Case 24: lookup, fill, load: the promised tokens are there."""
    wired.store("a", [1, 2, 3], [0, 1, 2])
    wired.step()
    assert wired.hits("b", [1, 2, 3]) == 3
    for number in range(100, 120):
        wired.store("c", [number], [30])
        wired.step()
    wired.load("b", [1, 2, 3], [40, 41, 42])
    wired.step()
    assert wired.load_ends[-1].ok and wired.memory[40:43].tolist() == [1, 2, 3]


def test_a_load_of_evicted_keys_fails_whole_and_is_not_offered_again(wired: Wired) -> None:
    """Case 24, 5: without a lease after a fill: failed with all its blocks, then recomputed."""
    wired.store("a", [1, 2], [0, 1])
    wired.step()
    for number in range(100, 120):
        wired.store("c", [number], [30])
        wired.step()
    load = wired.load("b", [1, 2], [40, 41])
    wired.step()
    assert wired.end_of(load).reason is Reason.MISSING
    assert [(end.ok, end.failed_blocks) for end in wired.load_ends] == [(False, (40, 41))]
    assert wired.hits("b", [100]) == 0


def test_a_reader_that_renews_keeps_its_lease_and_one_that_stopped_asks_anew(wired: Wired) -> None:
    """Case 10."""
    wired.store("a", [1], [0])
    wired.step()
    assert wired.hits("b", [1]) == 1
    for _ in range(30):
        wired.later(1000).run()
    assert wired.daemon.status()["leases"] == 1
    wired.later(20_000)  # stopped: no call at all, then continued
    wired.run()
    assert wired.daemon.status()["leases"] == 0
    assert not wired.client.hits("b", wired.now_ns).ready
    wired.run()
    assert wired.client.hits("b", wired.now_ns).count == 1


def test_thousands_of_unused_hits_hold_nothing_in_the_end(wired: Wired) -> None:
    """Case 34: a third aborted, a third forgotten, a third left alone; then everything can be evicted."""
    wired.store("a", [1, 2, 3, 4], [0, 1, 2, 3])
    wired.step()
    for number in range(900):
        name = f"r{number}"
        assert wired.hits(name, [1, 2, 3, 4]) == 4
        if number % 3 == 0:
            wired.client.abort(name, wired.now_ns)
        elif number % 3 == 1:
            wired.client.forget(name, wired.now_ns)
        if number % 10 == 0:
            wired.step()
    for _ in range(40):
        wired.later(3000).step()
    assert wired.daemon.status()["slots"]["leased"] == 0
    for number in range(100, 108):
        wired.store("c", [number], [30])
        wired.step()
    assert wired.hits("d", [1]) == 0


def test_forgetting_gives_the_lease_back_at_once_and_no_release_is_stale(wired: Wired) -> None:
    """Case 35, 39: by its number, once."""
    wired.store("a", [1], [0])
    wired.step()
    for round_ in range(5):
        assert wired.hits("b", [1]) == 1
        if round_ % 2:
            wired.client.forget("b", wired.now_ns)
        else:
            wired.client.preempt("b", wired.now_ns)
        wired.step()
        assert wired.daemon.status()["slots"]["leased"] == 0
    assert "leases_unknown" not in wired.daemon.status()["counters"]


def test_several_slow_stores_of_one_request_end_each_for_itself(wired: Wired) -> None:
    """Case 16: three stores, ended in another order than begun."""
    wired.copies_run = False
    tickets = []
    for number in range(3):
        tickets.append(wired.store("a", [number + 1], [number]))
        wired.step()
    wired.client.finish("a", wired.now_ns)
    wired.step()
    assert wired.client.storing([0, 1, 2]) == set(tickets)
    wired.finish_copies()
    assert [wired.end_of(ticket).outcome for ticket in tickets] == [Outcome.OK] * 3


def test_a_rotated_engine_finds_nothing_old_and_its_old_stores_are_not_published(wired: Wired) -> None:
    """Case 70, 20: a fresh namespace at once; going back finds what was whole."""
    wired.store("a", [1], [0])
    wired.step()
    wired.copies_run = False
    running = wired.store("a", [2], [1])
    wired.step()
    wired.client.rotate(b"weights-2", wired.now_ns)
    wired.step()
    wired.finish_copies()
    assert wired.end_of(running).outcome is Outcome.REVOKED
    assert wired.hits("b", [1]) == 0
    fresh = wired.store("c", [1], [2])
    wired.step()
    assert wired.end_of(fresh).outcome is Outcome.OK and wired.hits("d", [1]) == 1
    wired.client.rotate(b"", wired.now_ns)
    wired.step()
    wired.client.finish("b", wired.now_ns)
    assert wired.hits("b", [1]) == 1 and wired.hits("c", [2]) == 0


def test_storing_what_is_held_leaves_no_record(wired: Wired) -> None:
    """Case 37."""
    for _ in range(200):
        ticket = wired.store("a", [1, 2], [0, 1])
        wired.step()
        assert wired.end_of(ticket).outcome is Outcome.OK
    assert wired.daemon.status()["jobs"]["stores"] == 0


def test_more_keys_than_the_pool_has_are_refused_by_reason_and_the_first_are_kept(wired: Wired) -> None:
    """Case 58, 60."""
    ticket = wired.store("a", list(range(1, 13)), list(range(12)))
    wired.step()
    end = wired.end_of(ticket)
    assert (end.accepted, end.reason) == (8, Reason.NEVER_FITS)
    assert wired.hits("b", list(range(1, 13))) == 8
    assert wired.client.counters.refused == {"NEVER_FITS": 4}


def test_a_store_of_the_moment_before_the_rank_hears_of_its_worker_ends_with_the_attachment(wired: Wired) -> None:
    """Else its slot and its fence would wait for the worker's bound, ten seconds."""
    wired.rank.lost()
    ticket = wired.store("a", [1], [7])
    wired.step()
    assert wired.daemon.status()["fences"] == 1
    wired.rank.attach(WORKER_ID)
    wired.run()
    assert wired.end_of(ticket).outcome is Outcome.CANCELLED
    assert wired.daemon.status()["fences"] == 0 and wired.worker.at_rest()
    assert wired.rank.counters.stale == 0
    again = wired.store("a", [1], [7])
    wired.step()
    assert wired.end_of(again).outcome is Outcome.OK


def test_a_load_of_that_moment_fails_at_the_rank_and_holds_its_pins_no_longer(wired: Wired) -> None:
    wired.store("a", [1], [7])
    wired.step()
    assert wired.hits("b", [1]) == 1
    wired.rank.lost()
    load = wired.load("b", [1], [20])
    wired.step()
    assert [(end.ticket, end.outcome) for end in wired.load_ends] == [(load, Outcome.NOT_BEGUN)]
    wired.rank.attach(WORKER_ID)
    wired.run()
    assert wired.memory[20] == 0 and wired.worker.at_rest()
    assert wired.daemon.status()["jobs"]["loads"] == 0
