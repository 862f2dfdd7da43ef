"""Reset by epoch: constant time, covering everything, on record before it is answered."""

import time

import pytest

from kvferry.proto.control import RanksChanged, Refused, ResetAnswer, ResetAsk
from kvferry.proto.outcome import Next, Outcome, Reason
from kvferry.scheduler_daemon.core.api import KeepEpochs, Send
from kvferry.scheduler_daemon.core.header import MAX_EPOCHS
from kvferry.scheduler_daemon.core.reset import FREED_A_STEP

from .dummy import Engine, Job, World, come_to_rest, keys


def reset(world: World, namespace: str = "*") -> ResetAnswer | Refused:
    link = world.open("admin")
    world.send(link, ResetAsk(namespace=namespace))
    [answer] = world.heard(link, ResetAnswer) or world.heard(link, Refused)
    return answer  # type: ignore[no-any-return]


def hear(engine: Engine) -> RanksChanged:
    """The client takes the new epoch over."""
    news = engine.world.heard(engine.link, RanksChanged)[-1]
    engine.epoch = news.epoch
    return news  # type: ignore[no-any-return]


def test_after_a_reset_every_key_is_a_miss_and_the_client_knows_the_epoch(world):
    engine = world.engine()
    engine.hold([1, 2, 3], ticket=1)
    answer = reset(world)
    assert answer.keys == 3 and list(answer.epochs.values()) == [1]
    assert hear(engine).epoch == 1
    assert (engine.lookup(1, [1, 2, 3]).hits, engine.lookup(2, [3]).next) == (0, Next.MISS)
    assert world.sums()["free"] == 16
    engine.hold([1], ticket=2)
    assert engine.lookup(3, [1, 2]).hits == 1


def test_what_is_said_under_the_old_epoch_is_refused(world):
    engine = world.engine()
    engine.hold([1], ticket=1)
    reset(world)
    assert engine.lookup(1, [1]).reason == Reason.STALE_EPOCH
    answer = engine.step(stores=[Job(2, 2, [2], [2])], loads=[Job(3, 3, [1], [9])])
    assert answer.reason(2) is answer.reason(3) is Reason.STALE_EPOCH


def test_stores_of_the_old_epoch_are_never_published(world):
    engine = world.engine()
    job = engine.store(1, 1, [1], [1])
    engine.done(0, job)
    reset(world)
    assert engine.ended() == {1: Outcome.CANCELLED} and engine.cancels(1) == [job]
    hear(engine)
    engine.done(1, job)
    assert engine.lookup(1, [1]).next == Next.MISS and world.sums()["free"] == 16


def test_a_load_of_the_old_epoch_is_cancelled_and_its_slots_wait_for_its_last_word(world):
    engine = world.engine()
    engine.hold([1, 2], ticket=1)
    engine.ended()
    load = engine.load(2, 2, [1], [9])
    reset(world)
    assert engine.cancels(0) == [load] and engine.ended() == {}
    assert world.sums()["quarantined"] == 1 and world.sums()["free"] == 15
    engine.done(0, load, outcome=Outcome.CANCELLED)
    engine.done(1, load)
    assert engine.ended() == {2: Outcome.CANCELLED} and world.sums()["free"] == 16


def test_leases_of_the_old_epoch_are_over(world):
    engine = world.engine()
    engine.hold([1], ticket=1)
    lease = engine.lookup(1, [1]).lease
    reset(world)
    hear(engine)
    assert world.core.status()["leases"] == 0
    assert engine.step(loads=[Job(2, 1, [1], [9], lease)]).reason(2) is Reason.MISSING
    engine.step(released=[lease])
    assert world.count("leases_unknown") == 1


def test_a_reset_of_one_namespace_leaves_the_others_alone(world):
    one, two = world.engine("one", salt=b"1"), world.engine("two", salt=b"2")
    one.hold([1], ticket=1)
    two.hold([1], ticket=1)
    running = two.store(2, 2, [2], [2])
    names = {e["engine_id"]: e["namespace"] for e in world.core.status()["engines"]}
    assert isinstance(reset(world, names["one"]), ResetAnswer)
    hear(one)
    assert one.lookup(1, [1]).hits == 0 and two.lookup(1, [1]).hits == 1
    two.finish(running)
    assert two.lookup(2, [1, 2]).hits == 2


def test_a_namespace_may_be_named_by_its_first_digits_if_no_other_begins_so(world):
    world.engine("one", salt=b"1").hold([1], ticket=1)
    world.engine("two", salt=b"2")
    name = world.core.status()["namespaces"][0]["name"]
    assert reset(world, name[:12].upper()).keys == 1
    for wrong in ("", "zz", "no such thing"):
        assert reset(world, wrong).code == "reset.namespace"
    assert reset(world).keys == 0


def test_the_epochs_are_on_record_before_anybody_hears_of_them(world):
    engine = world.engine()
    engine.hold([1], ticket=1)
    link = world.open("admin")
    actions = world.send(link, ResetAsk(namespace="*"))
    [kept] = [at for at, action in enumerate(actions) if isinstance(action, KeepEpochs)]
    assert kept < min(at for at, action in enumerate(actions) if isinstance(action, Send))
    assert [epoch for _, epoch in actions[kept].epochs] == [1]


def test_no_later_daemon_serves_a_key_of_an_ended_epoch(worlds):
    """Even if it died before the old keys' slots were freed."""
    world = worlds(slots=64)
    engine = world.engine(num_blocks=64)
    engine.hold(range(40), ticket=1)
    assert world.table is not None
    before = world.table.copy()  # no slot freed yet
    reset(world)
    hear(engine)
    engine.hold([1], ticket=2)
    for table, hits in ((before, 0), (world.table.copy(), 1)):
        later = world.restart(table=table)
        again = later.engine(num_blocks=64)
        assert again.epoch == 0 and again.lookup(1, [1]).reason == Reason.STALE_EPOCH
        again.epoch = 1
        assert again.lookup(2, [1, 2]).hits == hits
        come_to_rest(later)


@pytest.mark.parametrize("digits", [12, 32, 64])
def test_a_recovered_namespace_that_no_engine_has_named_yet_is_reset_by_its_name_too(world, digits):
    """Records carry the first half of a namespace's name; an operator may have all of it."""
    engine = world.engine()
    engine.hold([1, 2], ticket=1)
    [name] = [e["namespace"] for e in world.core.status()["engines"]]
    later = world.restart()
    assert reset(later, name[:digits]).keys == 2
    again = later.engine()
    assert later.heard(again.link, RanksChanged)[-1].epoch == 1
    assert later.sums()["ready"] == 0
    come_to_rest(later)


def test_the_slots_of_many_keys_are_freed_some_a_step_and_are_there_for_who_needs_them(worlds):
    world = worlds(slots=4000, tp=1)
    engine = world.engine(num_blocks=5000)
    engine.hold(range(4000), ticket=1)
    reset(world)
    hear(engine)
    assert world.sums()["free"] == FREED_A_STEP and world.core.status()["expired"] == 4000 - FREED_A_STEP
    answer = engine.step(stores=[Job(2, 2, range(3000), range(3000))])
    assert answer.accepted(2) == 3000, "what is not free yet is evictable"
    engine.finish(answer.job(2))
    while (due := world.core.next_due_ns()) is not None and due <= world.now:
        world.wait(0)
    assert world.core.status()["expired"] == 0
    assert world.sums()["ready"] == 3000 and world.sums()["free"] == 1000


def test_a_load_that_lets_go_before_its_old_slot_is_swept_gives_it_back(worlds):
    world = worlds(slots=4000, tp=1)
    engine = world.engine(num_blocks=5000)
    engine.hold(range(4000), ticket=1)
    load = engine.load(2, 2, range(2000), range(2000))
    reset(world)
    engine.done(0, load, outcome=Outcome.CANCELLED)
    for _ in range(5):
        world.wait(0)
    assert world.sums()["free"] == 4000


def test_two_resets_in_a_row_and_a_store_between_them(worlds):
    world = worlds(slots=4000, tp=1)
    engine = world.engine(num_blocks=5000)
    engine.hold(range(3000), ticket=1)
    reset(world)
    hear(engine)
    engine.hold(range(500), ticket=2)
    assert list(reset(world).epochs.values()) == [2]
    hear(engine)
    assert engine.lookup(1, [0]).hits == 0
    for _ in range(5):
        world.wait(0)
    assert world.sums()["free"] == 4000


def test_a_namespace_that_nobody_uses_any_more_keeps_its_epoch(world):
    engine = world.engine()
    engine.hold([1], ticket=1)
    reset(world)
    engine.goodbye()
    for rank in (0, 1):
        engine.die(rank)
    assert world.core.status()["namespaces"] == []
    again = world.engine()
    assert world.heard(again.link, RanksChanged)[-1].epoch == 1


def test_a_reset_of_all_holds_for_namespaces_that_no_record_names(worlds):
    """More of them than the record has room for, and those that only come later."""
    world = worlds(slots=200, tp=1)
    for n in range(60):
        world.engine(f"e{n}", salt=b"%d" % n).hold([1], ticket=1)
    before = world.table.copy()
    assert reset(world).keys == 60
    assert len(world.epochs) == 1
    later = world.restart(table=before)  # it died before one slot was freed
    assert later.sums()["ready"] == 0
    engine = later.engine("new", salt=b"new")
    assert later.heard(engine.link, RanksChanged)[-1].epoch == 1
    come_to_rest(later)


def test_an_epoch_that_goes_off_the_record_leaves_nothing_behind(worlds):
    """Resets of more namespaces than the record names: what the oldest of them ended is freed by then."""
    world = worlds(slots=400, tp=1)
    engines = [world.engine(f"e{n}", salt=b"%d" % n) for n in range(60)]
    for engine in engines:
        engine.hold([1], ticket=1)
    for engine in engines:
        name = next(e["namespace"] for e in world.core.status()["engines"] if e["engine_id"] == engine.name)
        assert isinstance(reset(world, name), ResetAnswer)
    kept = world.epochs[-MAX_EPOCHS:]  # as the header has room for
    world.epochs = kept
    later = world.restart()
    assert later.sums()["ready"] == 0
    come_to_rest(later)


def test_resets_of_one_and_of_all_never_go_back_in_epochs(world):
    one, two = world.engine("one", salt=b"1"), world.engine("two", salt=b"2")
    name = next(e["namespace"] for e in world.core.status()["engines"] if e["engine_id"] == "one")
    seen = [list(reset(world, name).epochs.values()) for _ in range(3)]
    assert seen == [[1], [2], [3]]
    assert set(reset(world).epochs.values()) == {4}
    assert list(reset(world, name).epochs.values()) == [5]
    assert set(reset(world).epochs.values()) == {6}
    assert hear(one).epoch == hear(two).epoch == 6
    later = world.restart()
    assert later.heard(later.engine("x", salt=b"1").link, RanksChanged)[-1].epoch == 6


@pytest.mark.parametrize("num_keys", [100, 30_000])
def test_a_reset_costs_what_is_under_way_and_not_what_is_held(num_keys, worlds):
    """A reset walks no index. Measured as the best of several, with a wide bound."""
    world = World(slots=num_keys, tp=1)
    engine = world.engine(num_blocks=num_keys)
    best = float("inf")
    for n in range(3):
        world.core.check = lambda: None  # type: ignore[method-assign]
        engine.hold(range(num_keys), ticket=n + 1)
        link = world.open("admin")
        began = time.thread_time()
        world.send(link, ResetAsk(namespace="*"))
        best = min(best, time.thread_time() - began)
        hear(engine)
        while world.core.status()["expired"]:
            world.wait(0)
    assert best < 0.02, f"a reset of {num_keys} keys took {best * 1e3:.1f} ms"


def test_keys_helper_is_wide_enough_for_many():
    assert len(set(keys(*range(5000)))) == 5000


def test_keys_that_a_gone_engine_left_keep_another_block_size_out_until_all_is_reset(world):
    """What the refusal says is the remedy, and enough."""
    gone = world.engine("gone")
    gone.hold([1, 2], ticket=1)
    gone.goodbye()
    for rank in (0, 1):
        gone.die(rank)
    other = Engine(world, "other", payload=8192)
    other.attach(0)
    [refused] = world.heard(other.worker_link[0], Refused)
    assert refused.code == "layout.slot_bytes" and "kvferry reset --all" in refused.fix
    assert reset(world).keys == 2
    later = world.engine("later", payload=8192)
    hear(later)
    later.hold([1], ticket=1)
    assert later.lookup(2, [1, 2]).hits == 1
