"""Registrations, refusals, and links that break the rules."""

import pytest

from kvferry.proto.control import (
    Attached,
    Goodbye,
    Hello,
    RanksChanged,
    Refused,
    Registered,
    StatusAnswer,
    StatusAsk,
    Welcome,
)
from kvferry.proto.errors import CODES, ConfigError
from kvferry.proto.hot import Lookup, Plan, Renew
from kvferry.proto.ids import BootId, LinkId, WorkerId
from kvferry.proto.layout import slot_bytes
from kvferry.proto.outcome import Next, Outcome
from kvferry.scheduler_daemon.core.api import CloseLink, CoreSettings, Received
from kvferry.scheduler_daemon.core.core import Core

from .dummy import Engine, Job, World


def refusal(world: World, link: int) -> Refused:
    [refused] = world.heard(link, Refused)
    assert refused.code in CODES
    return refused


# ---- links ---------------------------------------------------------------------------------------------


def test_hello_is_answered_with_the_boot_and_the_tp_size(world):
    link = world.open("client")
    [welcome] = world.heard(link, Welcome)
    assert (welcome.boot, welcome.tp_size) == (0xB007, 2)


def test_a_version_that_is_not_spoken_is_refused_with_both_ranges(world):
    """Case 126."""
    world.send(9, Hello(role="client", major_min=98, major_max=99))
    refused = refusal(world, 9)
    assert refused.code == "hello.version" and "98..99" in refused.text and "1..1" in refused.text
    assert CloseLink(LinkId(9)) in world.said


def test_nothing_is_taken_before_hello(world):
    world.send(9, Renew())
    assert refusal(world, 9).code == "hello.first"
    assert CloseLink(LinkId(9)) in world.said


@pytest.mark.parametrize("role", ["client", "worker", "admin"])
def test_a_message_of_another_role_closes_its_link_and_changes_nothing(world, role):
    engine = world.engine()
    link = world.open(role)
    foreign = RanksChanged(attached=0, namespace="", epoch=0, slots=0)
    world.send(link, foreign)
    assert refusal(world, link).code == "message.unexpected"
    assert CloseLink(LinkId(link)) in world.said
    assert engine.lookup(1, [1]).next == Next.MISS


def test_a_client_must_register_before_it_asks(world):
    link = world.open("client")
    world.send(link, Lookup(lookup=1, request=1, epoch=0, group=0, key_bytes=8, keys=b""))
    assert refusal(world, link).code == "message.unexpected"


def test_status_is_plain_and_whole(world):
    import json

    engine = world.engine()
    job = engine.store(1, 1, [1, 2], [1, 2])
    link = world.open("admin")
    world.send(link, StatusAsk())
    [answer] = world.heard(link, StatusAnswer)
    told = json.loads(json.dumps(answer.status))
    assert told["slots"] == {
        "total": 16,
        "free": 14,
        "writing": 2,
        "ready": 0,
        "quarantined": 0,
        "pinned": 0,
        "leased": 0,
        "evictable": 0,
    }
    assert told["jobs"]["stores"] == 1 and told["fences"] == 2
    assert [rank["jobs_owed"] for rank in told["engines"][0]["ranks"]] == [1, 1]
    engine.finish(job)


# ---- registrations -------------------------------------------------------------------------------------


def test_another_world_size_is_refused_with_both_numbers(world):
    """Case 66, at both doors."""
    engine = Engine(world, "e")
    engine.register(world_size=4)
    refused = refusal(world, engine.link)
    assert refused.code == "register.world_size" and "4" in refused.text and "2" in refused.text
    engine.attach(0, world_size=4)
    assert refusal(world, engine.worker_link[0]).code == "register.world_size"
    assert world.core.status()["engines"] == []


def test_a_second_live_client_of_one_engine_id_is_refused_until_the_first_is_gone(world):
    engine = world.engine("e")
    other = Engine(world, "e", pid=2)
    other.register()
    assert refusal(world, other.link).code == "register.engine_taken"
    assert engine.lookup(1, [1]).next == Next.MISS
    world.lose(engine.link)
    other.register()
    assert len(world.heard(other.link, Registered)) == 1


def test_a_second_live_worker_of_one_rank_is_refused(world):
    engine = world.engine()
    first = engine.worker[1], engine.worker_link[1]
    engine.attach(1)
    refused = refusal(world, engine.worker_link[1])
    assert refused.code == "register.rank_taken"
    engine.worker[1], engine.worker_link[1] = first
    engine.hold([1], ticket=1)


def test_one_worker_serves_one_rank(world):
    engine = world.engine()
    worker = engine.worker[0]
    other = Engine(world, "f")
    other.attach(0, worker=worker)
    assert refusal(world, other.worker_link[0]).code == "worker.busy"


def test_a_rank_outside_the_world_is_refused(world):
    engine = Engine(world, "e")
    engine.attach(0, rank=5)
    assert refusal(world, engine.worker_link[0]).code == "register.rank"


def test_more_kv_groups_than_this_version_serves_are_refused(world):
    engine = Engine(world, "e")
    engine.attach(0, payload_bytes=(4096, 4096), block_tokens=(16, 16))
    refused = refusal(world, engine.worker_link[0])
    assert refused.code == "layout.groups" and "2 KV groups" in refused.text


def test_scheduler_and_ranks_must_mean_the_same_blocks(world):
    """Case 73: whoever comes second is refused with both numbers."""
    one = Engine(world, "one")
    one.register()
    one.attach(0, block_tokens=(64,))
    refused = refusal(world, one.worker_link[0])
    assert refused.code == "register.facts" and "64" in refused.text and "16" in refused.text
    one.attach(0, num_blocks=10)
    assert refusal(world, one.worker_link[0]).code == "layout.geometry"
    two = Engine(world, "two")
    two.attach(0)
    two.register(block_tokens=8)
    assert refusal(world, two.link).code == "register.facts"


def test_another_block_size_is_refused_with_both_numbers_while_the_pool_is_in_use(world):
    a = world.engine("a")
    a.hold([1], ticket=1)
    b = Engine(world, "b", payload=8192)
    b.attach(0)
    refused = refusal(world, b.worker_link[0])
    assert refused.code == "layout.slot_bytes"
    assert str(slot_bytes(4096)) in refused.text and str(slot_bytes(8192)) in refused.text
    assert a.lookup(2, [1]).hits == 1


def test_status_names_who_is_refused_until_it_gets_in_or_tries_no_more(world):
    a = world.engine("a")
    a.hold([1], ticket=1)
    b = Engine(world, "b", payload=8192)
    b.register()
    b.attach(0)
    b.attach(0)
    world.wait(4_000_000_000)
    [one] = world.core.status()["refused"]
    assert (one["engine_id"], one["half"], one["code"], one["ago_s"]) == ("b", "rank 0", "layout.slot_bytes", 4)
    [warning] = world.warnings()
    assert warning.startswith("engine 'b' rank 0 is refused: layout.slot_bytes: ") and "fix: " in warning
    c = Engine(world, "c")
    c.register(world_size=4)
    assert [one["half"] for one in world.core.status()["refused"]] == ["rank 0", "scheduler"]
    c.register()
    assert [one["engine_id"] for one in world.core.status()["refused"]] == ["b"]
    world.wait(60_000_000_000)
    assert world.core.status()["refused"] == []


def test_an_empty_pool_without_engines_is_cut_anew(world):
    a = world.engine("a")
    job = a.store(1, 1, [1], [1])
    a.done(0, job, outcome=Outcome.COPY_FAILED)
    a.done(1, job)
    [plan] = a.plans()
    world.lose(a.link)
    a.die(0)
    a.die(1)
    b = world.engine("b", payload=40_000)
    assert world.core.status()["slot_bytes"] == {"0": slot_bytes(40_000), "1": slot_bytes(40_000)}
    job = b.store(1, 1, [1], [1])
    [later] = b.plans()
    assert later.generations != plan.generations, "a generation is never given again, even after a new cut"
    b.finish(job)


def test_a_pool_smaller_than_one_slot_is_refused_with_the_numbers(world):
    """Case 58."""
    engine = Engine(world, "e")
    engine.attach(0, pool_bytes=slot_bytes(4096) - 1)
    refused = refusal(world, engine.worker_link[0])
    assert refused.code == "layout.pool_too_small"
    assert str(slot_bytes(4096)) in refused.text and str(slot_bytes(4096) - 1) in refused.text
    engine.attach(0, pool_bytes=slot_bytes(4096))
    engine.attach(1)
    assert world.sums()["total"] == 1


def test_ranks_may_hold_different_bytes_of_a_block(world):
    """Pipeline stages: the pool has as many slots as the rank that fits fewest."""
    engine = Engine(world, "e", payload=[4096, 12288])
    engine.register()
    engine.attach(0, pool_bytes=10 * slot_bytes(4096))
    engine.attach(1, pool_bytes=10 * slot_bytes(4096))
    assert world.sums()["total"] == 5
    engine.hold([1], ticket=1)


def test_a_table_that_cannot_be_made_refuses_the_attachment(world):
    def no_room(num_slots: int):
        raise ConfigError("table.shm", f"no room for {num_slots} records")

    small = World()
    small.core = Core(CoreSettings(boot=BootId(1), tp_size=2), no_room)
    engine = Engine(small, "e")
    engine.register()
    engine.attach(0)
    engine.attach(1)
    assert len(small.heard(engine.worker_link[1], Refused)) == 1
    assert small.core.status()["engines"][0]["attached"] == 1


# ---- coming and going ----------------------------------------------------------------------------------


def test_ranks_changed_is_told_when_a_rank_goes_and_comes(world):
    engine = world.engine()
    world.heard(engine.link, RanksChanged)
    engine.rank_gone(1)
    world.lose(engine.worker_link[1])
    world.reap(engine.worker[1])
    engine.attach(1)
    assert [told.attached for told in world.heard(engine.link, RanksChanged)] == [1, 2]


def test_a_rank_that_comes_back_is_expected_by_new_jobs_only(world):
    """The old job waits for the old worker: the new one's word on it is a stranger's."""
    engine = world.engine()
    old = engine.store(1, 1, [1], [1])
    old_worker, old_link = engine.worker[1], engine.worker_link[1]
    engine.rank_gone(1)
    engine.attach(1)
    assert engine.plans(1) == [Plan(planned_to=1)]
    engine.done(1, old)
    assert world.count("words_foreign") == 1
    new = engine.store(2, 2, [2], [2])
    engine.finish(new)
    engine.done(0, old)
    assert engine.ended() == {2: Outcome.OK}
    engine.worker_link[2] = old_link
    engine.done(2, old)  # it drained
    assert engine.ended() == {1: Outcome.OK}
    world.reap(old_worker)


def test_a_worker_that_died_before_its_attachment_arrived_is_not_seated(world):
    engine = Engine(world, "e")
    engine.register()
    dead = 101
    world.reap(dead)
    engine.attach(0)
    assert engine.worker[0] == dead
    assert world.heard(engine.worker_link[0], Attached) == []
    assert world.count("attaches_of_the_dead") == 1


def test_a_clients_end_drops_its_leases_and_voids_its_jobs(world):
    """Case 18, 30: the client process dies mid flight; another engine goes on."""
    a, b = world.engine("a"), world.engine("b")
    a.hold([1], ticket=1)
    a.lookup(2, [1])
    answer = a.step(stores=[Job(n, n, [n], [n]) for n in range(2, 10)], loads=[Job(20, 20, [1], [30])])
    world.lose(a.link)
    assert world.core.status()["leases"] == 0
    assert world.sums()["quarantined"] == 8 and world.sums()["pinned"] == 1
    a.finish(*(answer.job(t) for t in (*range(2, 10), 20)))
    assert world.jobs == 0 and world.sums()["quarantined"] == 0
    assert b.lookup(1, [2]).next == Next.MISS and b.lookup(2, [1]).hits == 1


def test_a_closed_incarnation_admits_nothing(world):
    engine = world.engine()
    engine.goodbye()
    world.send(engine.link, engine.message(stores=[Job(1, 1, [1], [1])]))
    assert refusal(world, engine.link).code == "hello.first"
    assert world.jobs == 0


def test_a_client_that_registers_again_has_a_fresh_incarnation_and_its_ranks(world):
    engine = world.engine()
    [first] = world.heard(engine.link, Registered)
    engine.store(5, 1, [1], [1])
    world.lose(engine.link)
    engine.register()
    [second] = world.heard(engine.link, Registered)
    assert second.incarnation != first.incarnation and second.attached == 2 and second.namespace
    engine.hold([2], ticket=6)


def test_ranks_of_an_earlier_client_process_do_not_serve_the_next_one(world):
    """An engine restarts under its old id while an old rank's worker still hangs on."""
    old = world.engine("e", pid=10)
    world.lose(old.link)
    new = Engine(world, "e", pid=11)
    new.register()
    [registered] = world.heard(new.link, Registered)
    assert registered.attached == 0
    new.attach(0)
    new.attach(1)
    new.hold([1], ticket=1)


def test_each_refusal_and_note_leaves_the_other_engines_alone(world):
    good = world.engine("good")
    good.hold([1], ticket=1)
    for link in (world.open("client"), world.open("worker")):
        world.core.step(Received(LinkId(link), Goodbye()), world.now)
    world.reap(WorkerId(4242))
    world.lose(4242)
    assert good.lookup(2, [1]).hits == 1
