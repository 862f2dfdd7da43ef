"""Lookups and leases, as the client decides them."""

from kvferry.client.types import Hits
from kvferry.proto.control import RanksChanged
from kvferry.proto.hot import Lookup, LookupAnswer
from kvferry.proto.outcome import Next, Reason
from tests.client.fakes import MS, Scene, chain, numbers_of


def test_a_lookup_is_sent_at_once_and_its_hits_are_told() -> None:
    scene = Scene()
    lookup = scene.ask("r", [1, 2, 3])
    assert (lookup.keys, lookup.epoch, lookup.key_bytes) == (b"".join(chain(1, 2, 3)), 1, 8)
    assert scene.core.hits("r", scene.now_ns) == Hits(False)
    scene.answer(lookup, 2, Next.MISS, lease=5)
    assert scene.core.hits("r", scene.now_ns) == Hits(True, 2)
    assert scene.core.counters.hits == 2


def test_keys_may_come_as_one_byte_string() -> None:
    scene = Scene()
    scene.core.lookup("r", b"".join(chain(1, 2)), scene.now_ns)
    assert scene.take(Lookup).keys == b"".join(chain(1, 2))


def test_an_answer_is_remembered_and_asking_again_costs_no_message() -> None:
    """Case 116: the same question asked 1000 times is one message."""
    scene = Scene()
    scene.leased("r", range(5000 // 100))
    for _ in range(1000):
        assert scene.core.hits("r", scene.now_ns).count == 50
    assert scene.outgoing() == []


def test_a_miss_is_asked_again_only_after_a_while() -> None:
    scene = Scene()
    scene.answer(scene.ask("r", [1]), 0, Next.MISS)
    assert scene.core.hits("r", scene.now_ns) == Hits(True)
    assert scene.outgoing() == []
    assert scene.core.hits("r", scene.later(1001).now_ns).ready
    scene.answer(scene.take(Lookup), 1, lease=3)
    assert scene.core.hits("r", scene.now_ns).count == 1


def test_an_unanswered_lookup_is_not_ready_until_patience_is_over_and_then_a_miss() -> None:
    scene = Scene()
    scene.ask("r", [1])
    assert not scene.core.hits("r", scene.now_ns).ready
    assert not scene.core.hits("r", scene.later(19).now_ns).ready
    assert scene.core.hits("r", scene.later(2).now_ns) == Hits(True)


def test_patience_begins_with_the_first_question_not_with_the_lookup() -> None:
    scene = Scene()
    scene.ask("r", [1])
    assert not scene.core.hits("r", scene.later(5000).now_ns).ready


def test_a_lookup_given_up_is_gone_as_a_whole_and_asking_again_starts_fresh() -> None:
    """Case 25: a late answer is dropped and its lease given back; a second lookup has a life of its own."""
    scene = Scene()
    first = scene.ask("r", [1, 2])
    scene.core.hits("r", scene.now_ns)
    assert scene.core.hits("r", scene.later(25).now_ns) == Hits(True)
    scene.answer(first, 2, lease=41)
    assert scene.core.hits("r", scene.now_ns) == Hits(True)
    assert scene.core.counters.late_lookups == 1
    _, step = scene.end_step()
    assert step is not None and numbers_of(step.released) == [41]
    second = scene.ask("r", [1, 2])
    assert second.lookup != first.lookup
    scene.answer(second, 2, lease=42)
    assert scene.core.hits("r", scene.now_ns).count == 2


def test_pending_is_waited_for_within_patience_and_asked_again_no_sooner_than_told() -> None:
    """Case 48: the answer says when to ask again, and the engine's asking each step makes no more messages."""
    scene = Scene()
    scene.answer(scene.ask("r", [1, 2, 3]), 1, Next.PENDING, lease=6, retry_ms=5)
    told = scene.core.hits("r", scene.now_ns)
    assert (told.ready, told.count, told.next, told.retry_ms) == (False, 1, Next.PENDING, 5)
    for _ in range(1000):
        scene.core.hits("r", scene.later(0.004).now_ns)
    assert scene.outgoing() == []
    scene.core.hits("r", scene.later(1.1).now_ns)
    again = scene.take(Lookup)
    scene.answer(again, 3, lease=7)
    assert scene.core.hits("r", scene.now_ns) == Hits(True, 3, Next.END)


def test_pending_counts_as_what_is_known_once_patience_is_over() -> None:
    """Case 48: pending has an end, after which the request goes on with the hits it has."""
    scene = Scene()
    scene.answer(scene.ask("r", [1, 2]), 1, Next.PENDING, lease=6, retry_ms=500)
    assert not scene.core.hits("r", scene.now_ns).ready
    assert scene.core.hits("r", scene.later(21).now_ns) == Hits(True, 1, Next.PENDING, 500)


def test_a_pending_answer_is_asked_again_by_time_alone() -> None:
    scene = Scene()
    scene.answer(scene.ask("r", [1]), 0, Next.PENDING, retry_ms=5)
    scene.core.hits("r", scene.now_ns)
    assert scene.core.next_due_ns() == scene.now_ns + 5 * MS
    scene.core.tick(scene.later(5).now_ns)
    scene.take(Lookup)


def test_a_pending_answer_nobody_waits_for_is_not_asked_again() -> None:
    scene = Scene()
    scene.answer(scene.ask("r", [1]), 0, Next.PENDING, retry_ms=5)
    scene.core.tick(scene.later(6).now_ns)
    assert scene.outgoing() == []


def test_leases_are_renewed_at_a_third_of_their_time() -> None:
    """Case 10: the reader renews its lease as long as it wants it."""
    scene = Scene()
    scene.leased("r", [1])
    assert scene.renewals() == []
    assert scene.core.next_due_ns() == scene.now_ns + 3000 * MS
    assert scene.later(3000).renewals() == [77]
    assert scene.later(100).renewals() == []
    assert scene.later(2900).renewals() == [77]


def test_a_lease_that_was_left_alone_is_renewed_no_more_and_ends() -> None:
    """Case 34: ten thousand hits nobody uses hold nothing in the end."""
    scene = Scene()
    for number in range(100):
        scene.leased(f"r{number}", [number], lease=number + 1)
    for _ in range(40):
        scene.later(3000).renewals()
    assert scene.renewals() == []
    assert scene.core.describe()["leases"] == 0
    assert scene.core.next_due_ns() is None


def test_a_lease_wanted_again_before_its_end_is_renewed_again() -> None:
    scene = Scene()
    scene.leased("r", [1])
    while scene.later(3000).renewals():
        pass
    assert scene.core.hits("r", scene.now_ns).count == 1
    assert scene.renewals() == [77]


def test_a_lease_over_is_asked_anew_when_wanted() -> None:
    """Case 43: an engine stopped past its lease and continued asks afresh instead of trusting an old promise."""
    scene = Scene()
    scene.leased("r", [1, 2])
    scene.core.tick(scene.later(20_000).now_ns)
    assert not scene.core.hits("r", scene.now_ns).ready
    scene.answer(scene.take(Lookup), 1, Next.MISS, lease=78)
    assert scene.core.hits("r", scene.now_ns).count == 1


def test_a_lease_over_is_not_named_by_the_load() -> None:
    """Case 10: a read under an ended lease is for the daemon to judge by what it still holds."""
    scene = Scene()
    scene.leased("r", [1])
    scene.later(10_000)
    scene.load("r", [1], [5])
    _, step = scene.end_step()
    assert step is not None and numbers_of(step.load_leases) == [0]


def test_a_load_consumes_the_lease() -> None:
    """Case 24: a hit is a lease that passes to the load; nobody gives it back beside it."""
    scene = Scene()
    scene.leased("r", [1, 2])
    scene.load("r", [1, 2], [5, 6])
    _, step = scene.end_step()
    assert step is not None
    assert (numbers_of(step.load_leases), numbers_of(step.released)) == ([77], [])
    assert scene.later(3000).renewals() == []


def test_forget_gives_the_lease_back_by_its_number() -> None:
    """Case 35: release names the lease, never keys."""
    scene = Scene()
    scene.leased("r", [1, 2])
    scene.core.forget("r", scene.now_ns)
    _, step = scene.end_step()
    assert step is not None and numbers_of(step.released) == [77]
    assert scene.core.hits("r", scene.now_ns) == Hits(True)
    scene.core.forget("r", scene.now_ns)
    assert scene.end_step()[1] is None


def test_a_request_that_ends_gives_its_lease_back_through_its_end() -> None:
    """Case 39: one release for each lease, so none is stale."""
    scene = Scene()
    scene.leased("r", [1, 2])
    scene.core.abort("r", scene.now_ns)
    _, step = scene.end_step()
    assert step is not None
    assert (numbers_of(step.end_requests), numbers_of(step.released)) == ([1], [])
    assert scene.core.describe()["leases"] == 0


def test_an_answer_after_the_requests_end_is_dropped() -> None:
    """Case 21: late answers name what is gone; they are counted and change nothing."""
    scene = Scene()
    lookup = scene.ask("r", [1])
    scene.core.finish("r", scene.now_ns)
    scene.answer(lookup, 1, lease=9)
    _, step = scene.end_step()
    assert step is not None and numbers_of(step.released) == []
    assert scene.core.counters.late_lookups == 1
    assert scene.core.describe()["lookups"] == 0


def test_asking_again_replaces_the_lookup_and_gives_back_nothing_by_name() -> None:
    """The daemon ends the request's earlier lease when it is asked again."""
    scene = Scene()
    scene.leased("r", [1, 2])
    scene.answer(scene.ask("r", [1, 2, 3]), 3, lease=78)
    assert scene.end_step()[1] is None
    assert scene.core.describe()["leases"] == 1
    assert scene.core.hits("r", scene.now_ns).count == 3


def test_releases_are_told_without_a_step_when_the_engine_is_idle() -> None:
    """Case 17: nothing hangs on a hook that an idle engine does not call."""
    scene = Scene()
    scene.leased("r", [1])
    scene.core.finish("r", scene.now_ns)
    scene.core.tick(scene.now_ns)
    assert scene.outgoing() == []
    scene.core.tick(scene.later(100).now_ns)
    (step,) = scene.outgoing()
    assert numbers_of(step.end_requests) == [1]


def test_a_new_epoch_ends_what_was_promised() -> None:
    """Case 70: after a reset no old answer is used; the request asks under the new epoch."""
    scene = Scene()
    scene.leased("r", [1, 2])
    scene.say(RanksChanged(attached=1, namespace="space", epoch=2, slots=64))
    assert not scene.core.hits("r", scene.now_ns).ready
    lookup = scene.take(Lookup)
    assert lookup.epoch == 2


def test_an_answer_of_an_ended_epoch_that_comes_again_changes_nothing() -> None:
    """Found by a voyage: an old answer, said once more after a reset, brought the client back to the old epoch."""
    scene = Scene()
    old = scene.ask("r", [1])
    scene.answer(old, 1, Next.END)
    scene.say(RanksChanged(attached=1, namespace="space", epoch=5, slots=64))
    before = scene.core.describe()
    scene.answer(old, 1, Next.END)
    assert scene.core.describe() == before
    assert before["epoch"] == 5


def test_a_stale_epoch_is_learned_from_its_answer() -> None:
    scene = Scene()
    scene.answer(scene.ask("r", [1]), 0, Next.MISS, reason=Reason.STALE_EPOCH, epoch=4)
    assert not scene.core.hits("r", scene.now_ns).ready
    assert scene.take(Lookup).epoch == 4


def test_more_hits_than_keys_are_cut_to_the_keys() -> None:
    scene = Scene()
    scene.say(LookupAnswer(scene.ask("r", [1]).lookup, 500, int(Next.END), 3, 9000, 0, 0, 1))
    assert scene.core.hits("r", scene.now_ns).count == 1


def test_an_empty_chain_hits_nothing_and_asks_nothing() -> None:
    """Case 18: empty lists are data."""
    scene = Scene()
    scene.core.lookup("r", [], scene.now_ns)
    assert scene.outgoing() == []
    assert scene.core.hits("r", scene.now_ns) == Hits(True)


def test_without_all_ranks_nothing_is_asked_until_they_are_there() -> None:
    scene = Scene(world_size=2, attach=False)
    scene.attach(attached=1)
    scene.core.lookup("r", chain(1), scene.now_ns)
    assert scene.core.hits("r", scene.now_ns) == Hits(True, reason=Reason.RANKS_AWAY)
    assert scene.outgoing() == []
    scene.say(RanksChanged(attached=2, namespace="space", epoch=1, slots=64))
    assert not scene.core.hits("r", scene.now_ns).ready
    scene.take(Lookup)
