"""Who shares with whom (kind G): equal key bytes in different namespaces never meet."""

import pytest

from kvferry.proto.control import RanksChanged, Refused, Registered
from kvferry.proto.outcome import Next, Outcome
from kvferry.scheduler_daemon.core.namespaces import identity

from .dummy import Engine, Job

FACTS = {
    "world_size": 2,
    "key_bytes": 32,
    "rank_facts": {"dtype": "bf16", "model": "m"},
    "rank_layouts": ["a", "b"],
    "client_facts": {"hash": "sha256"},
    "salt": b"s",
}


@pytest.mark.parametrize(
    "change",
    [
        {"world_size": 4},
        {"key_bytes": 16},
        {"rank_facts": {"dtype": "fp16", "model": "m"}},
        {"rank_facts": {"dtype": "bf16"}},
        {"rank_layouts": ["b", "a"]},
        {"rank_layouts": ["ab", ""]},
        {"client_facts": {}},
        {"client_facts": {"hash": "sha256", "dtype": "bf16"}},
        {"salt": b""},
        {"rank_facts": {"dtype": "bf16", "modelm": ""}},
    ],
)
def test_every_fact_is_part_of_the_identity(change):
    """Case 64, 66: dtype as resolved, world size, each rank's layout, key width, salt."""
    assert identity(**{**FACTS, **change}) != identity(**FACTS)


def test_the_order_in_which_facts_are_told_is_no_part_of_it():
    """Case 67: the same facts through another launcher give the same name."""
    turned = dict(reversed(FACTS["rank_facts"].items()))
    assert identity(**{**FACTS, "rank_facts": turned}) == identity(**FACTS)


@pytest.mark.parametrize(
    "other",
    [
        {"facts": {"dtype": "fp16"}},
        {"layout": "another layout"},
        {"salt": b"tenant 2"},
        {"client_facts": {"hash": "seeded"}},
    ],
)
def test_engines_that_differ_in_a_fact_never_meet(world, other):
    """Case 62, 64, 66: equal sizes, equal key bytes, another meaning: a miss for each other."""
    a, b = world.engine("a"), world.engine("b", **other)
    a.hold([1, 2], ticket=1)
    assert b.lookup(1, [1, 2]).next == Next.MISS
    b.hold([1], ticket=1)
    assert a.lookup(2, [1, 2]).hits == 2 and b.lookup(2, [1, 2]).hits == 1
    assert len(world.core.status()["namespaces"]) == 2


def test_ranks_of_one_engine_must_report_equal_facts(world):
    """Case 67: the refusal has both values."""
    engine = Engine(world, "e")
    engine.register()
    engine.attach(0)
    engine.attach(1, facts={"dtype": "fp16"})
    [refused] = world.heard(engine.worker_link[1], Refused)
    assert refused.code == "register.facts"
    assert "dtype='bf16'" in refused.text and "dtype='fp16'" in refused.text
    assert world.core.status()["engines"][0]["attached"] == 1


def test_whole_keys_are_compared(world):
    """Case 68: keys that agree in their first or last bytes, or fall into one shard, stay apart."""
    engine = world.engine()
    engine.hold(["aXXXXXX", "aXXXXXY"], ticket=1)
    assert engine.lookup(2, ["aXXXXXX"]).hits == 1
    assert engine.lookup(3, ["aXXXXXZ"]).hits == 0


def test_the_namespace_is_known_once_all_ranks_and_the_client_are_there(worlds):
    world = worlds(tp=3)
    engine = Engine(world, "e")
    engine.attach(0)
    engine.register()
    [registered] = world.heard(engine.link, Registered)
    assert (registered.attached, registered.namespace, registered.slots) == (1, "", 0)
    engine.attach(2)
    engine.attach(1)
    told = world.heard(engine.link, RanksChanged)
    assert [(m.attached, bool(m.namespace), m.slots) for m in told] == [(2, False, 0), (3, True, 16)]


def test_two_engines_of_one_namespace_share_and_one_leaves_without_the_other_noticing(world):
    """Case 87."""
    a, b = world.engine("a"), world.engine("b")
    a.hold([1, 2], ticket=1)
    answer = b.lookup(1, [1, 2])
    assert answer.hits == 2
    load = b.load(1, 1, [1, 2], [3, 4], answer.lease)
    stored = a.store(2, 2, [3], [3])
    told = len(world.heard(b.link, RanksChanged))
    world.lose(a.link)
    a.die(0)
    a.die(1)
    assert told and world.heard(b.link, RanksChanged) == []
    assert stored and b.lookup(2, [3]).next == Next.MISS
    b.finish(load)
    assert b.ended() == {1: Outcome.OK}
    assert [engine["engine_id"] for engine in world.core.status()["engines"]] == ["b"]
    assert b.lookup(3, [1, 2]).hits == 2


def test_one_engine_joins_the_store_of_another(world):
    a, b = world.engine("a"), world.engine("b")
    job = a.store(1, 1, [1], [1])
    joined = b.step(stores=[Job(1, 1, [1], [9])])
    assert (joined.job(1), joined.accepted(1)) == (0, 1)
    assert b.lookup(2, [1]).next == Next.PENDING
    a.finish(job)
    assert b.lookup(2, [1]).hits == 1


def test_block_ids_are_each_engines_own(world):
    """The same block number of two engines is two blocks: no fence reaches across."""
    a, b = world.engine("a"), world.engine("b")
    job = a.store(1, 1, [1], [7])
    assert b.step(written=[7]).wait_for == []
    a.finish(job)
    assert a.ended() == {1: Outcome.OK}


def test_an_engine_restarted_under_the_same_facts_finds_what_it_had(world):
    first = world.engine("e", pid=10)
    first.hold([1, 2], ticket=1)
    world.lose(first.link)
    first.die(0)
    first.die(1)
    assert world.core.status()["engines"] == [] and len(world.core.status()["namespaces"]) == 1
    second = world.engine("e", pid=11)
    assert second.lookup(1, [1, 2]).hits == 2


def test_rotating_moves_this_engine_alone_and_revokes_its_running_stores(world):
    """Case 70: a new salt is an instant miss; the old one is still there if asked for; siblings keep theirs."""
    a, b = world.engine("a"), world.engine("b")
    a.hold([1], ticket=1)
    lease = a.lookup(2, [1]).lease
    running = a.store(2, 2, [2], [2])
    load = a.load(3, 3, [1], [30])
    world.heard(a.link, RanksChanged)
    a.rotate(b"weights 2")
    [told] = world.heard(a.link, RanksChanged)
    assert told.attached == 2 and a.ended()[2] == Outcome.REVOKED
    assert a.lookup(4, [1]).next == Next.MISS and b.lookup(1, [1]).hits == 1
    a.renew(lease)
    assert world.count("leases_unknown") == 1
    a.finish(running, load)
    assert a.ended() == {3: Outcome.OK}
    assert b.lookup(2, [2]).next == Next.MISS
    a.rotate(b"")
    assert a.lookup(5, [1]).hits == 1


def test_rotating_while_a_rank_is_away_takes_effect_when_it_is_back(world):
    engine = world.engine()
    engine.hold([1], ticket=1)
    engine.die(1)
    world.heard(engine.link, RanksChanged)
    engine.rotate(b"new")
    [told] = world.heard(engine.link, RanksChanged)
    assert (told.attached, told.namespace) == (1, "")
    engine.attach(1)
    assert engine.lookup(2, [1]).next == Next.MISS


def test_a_namespace_without_entries_or_engines_is_forgotten(worlds):
    world = worlds(slots=2)
    engine = world.engine()
    engine.hold([1, 2], ticket=1)
    engine.rotate(b"2")
    assert len(world.core.status()["namespaces"]) == 2
    engine.hold([3, 4], ticket=2)  # evicts all of the old one
    world.wait(0)  # looked at now and then, not at every step
    assert len(world.core.status()["namespaces"]) == 1
    for n in range(20):
        engine.rotate(f"{n}".encode())
    assert len(world.core.status()["namespaces"]) == 2
