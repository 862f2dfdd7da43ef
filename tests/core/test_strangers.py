"""One engine names what belongs to another: its leases, jobs, tickets, requests, keys, links."""

import pytest

from kvferry.proto.columns import pack_u8, pack_u32, pack_u64
from kvferry.proto.control import RankGone, Refused
from kvferry.proto.hot import Done, Lookup, Renew
from kvferry.proto.outcome import Outcome, Reason

from .dummy import KEY_BYTES, Job, keys


@pytest.fixture
def both(world):
    """A, who holds two keys, a lease on them and a store under way; and B, of another namespace."""
    a, b = world.engine("a", salt=b"a's"), world.engine("b", salt=b"b's")
    a.hold([1, 2], ticket=1)
    lease = a.lookup(2, [1, 2]).lease
    job = a.store(3, 4, [5], [9])
    a.ended()
    return world, a, b, lease, job


def test_what_another_engine_holds_can_be_neither_found_nor_loaded_nor_stored_over(both):
    """Case 134: equal key bytes, another's lease: a miss and a refusal."""
    world, a, b, lease, _ = both
    assert b.lookup(1, [1, 2]).hits == 0
    assert b.step(loads=[Job(1, 1, [1, 2], [0, 1], lease)]).reason(1) == Reason.MISSING
    mine = b.store(2, 2, [1, 2], [0, 1])
    b.finish(mine)
    assert a.lookup(9, [1, 2]).hits == 2
    assert world.core.status()["namespaces"][0]["entries"] == 3


def test_anothers_leases_tickets_requests_and_blocks_are_not_mine_to_end(both):
    """Case 134: what B names is B's own, or nothing."""
    world, a, b, lease, job = both
    before = world.sums()
    b.step(released=[lease], cancelled=[3], revoked=[3], ends=[2, 4], written=[9])
    world.send(b.link, Renew(leases=pack_u64([lease])))
    assert world.sums() == before
    assert a.ended() == {}
    assert world.count("leases_foreign") == 2
    a.finish(job)
    assert a.ended() == {3: Outcome.OK}
    load = a.load(8, 2, [1, 2], [0, 1], lease)
    assert load
    a.finish(load)


def test_anothers_worker_cannot_report_a_job_that_is_not_its_own(both):
    """Case 134, case 5: success is nobody's but the expected worker's to say."""
    world, a, b, _, job = both
    for rank in (0, 1):
        b.done(rank, job)
    assert a.ended() == {}
    assert world.jobs == 1
    a.done(0, job)
    b.done(1, job)
    assert a.lookup(7, [5]).hits == 0
    a.done(1, job)
    assert a.ended() == {3: Outcome.OK}


@pytest.mark.parametrize(
    "message",
    [
        Done(jobs=pack_u64([1]), outcomes=pack_u8([0]), copy_us=pack_u32([0])),
        RankGone(),
        Lookup(lookup=1, request=1, epoch=0, group=0, key_bytes=KEY_BYTES, keys=b"".join(keys(1))),
    ],
    ids=lambda message: message.TAG,
)
def test_who_has_not_registered_hears_a_refusal_and_changes_nothing(both, message):
    """Case 134: an admin, or a client before it registered, holds nothing and learns nothing."""
    world, a, _, _, job = both
    before = world.sums()
    for role in ("admin", "client"):
        link = world.open(role)
        world.send(link, message)
        assert not [m for m in world.heard(link, Refused) if not m.code]
    assert world.sums() == before
    a.finish(job)
    assert a.ended() == {3: Outcome.OK}
