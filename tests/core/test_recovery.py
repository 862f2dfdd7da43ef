"""A daemon after another one: what was READY is served, what was not is gone, and nothing is given away too early."""

import numpy as np
import pytest

from kvferry.proto.control import Drained
from kvferry.proto.hot import StepAnswer
from kvferry.proto.outcome import Next, Outcome, Reason
from kvferry.scheduler_daemon.core.api import TableShape, WorkersListed
from kvferry.scheduler_daemon.core.slots import RECORD, SlotState, SlotTable, checksums, sound

from .dummy import Engine, Job, S, World, come_to_rest, key


def back(world: World, name: str = "e", **how) -> Engine:
    """The same engine, registered with the next daemon."""
    return world.engine(name, **how)


def test_what_was_stored_before_the_crash_is_loaded_after_it(world):
    """The pool and its table outlive the daemon; the first engine whose namespace is the same finds them at once."""
    engine = world.engine()
    engine.hold([1, 2, 3], ticket=1)
    later = world.restart()
    assert later.sums()["ready"] == 3 and later.sums()["free"] == 13
    engine = back(later)
    answer = engine.lookup(1, [1, 2, 3, 4])
    assert (answer.hits, answer.next) == (3, Next.MISS)
    job = engine.load(1, 1, [1, 2, 3], [10, 11, 12], answer.lease)
    engine.finish(job)
    assert engine.ended() == {1: Outcome.OK}
    come_to_rest(later)


def test_a_plan_after_the_restart_names_the_slots_and_generations_of_before(world):
    engine = world.engine()
    job = engine.store(1, 1, [1, 2], [1, 2])
    [before] = [plan for plan in engine.plans() if plan.jobs]
    engine.finish(job)
    engine = back(world.restart())
    engine.load(1, 1, [1, 2], [10, 11])
    [after] = [plan for plan in engine.plans() if plan.jobs]
    assert (after.slots, after.generations) == (before.slots, before.generations)


def test_what_was_being_written_is_gone_as_a_whole(world):
    engine = world.engine()
    engine.hold([1], ticket=1)
    engine.store(2, 2, [2, 3], [2, 3])
    quarantined = engine.store(3, 3, [4], [4])
    engine.done(0, quarantined, outcome=Outcome.COPY_FAILED)
    assert world.sums()["writing"] == 2 and world.sums()["quarantined"] == 1
    later = world.restart()
    assert later.sums() == {**later.sums(), "free": 15, "ready": 1, "writing": 0, "quarantined": 0}
    engine = back(later)
    assert engine.lookup(1, [1, 2, 3]).hits == 1
    assert "3 were being written or are not whole" in later.notes()[0]


@pytest.mark.parametrize("word", range(RECORD.itemsize // 8))
def test_a_torn_record_is_a_miss(world, word):
    """Whichever part of a record did not reach memory."""
    engine = world.engine()
    engine.hold([1, 2], ticket=1)
    assert world.table is not None
    torn = world.table.copy()
    [slot] = [
        int(at) for at in np.flatnonzero(torn["state"] == SlotState.READY) if bytes(torn[at]["key"])[:8] == key(1)
    ]
    torn.view(np.uint64).reshape(-1, RECORD.itemsize // 8)[slot, word] ^= np.uint64(1 << 40)
    later = world.restart(table=torn)
    engine = back(later)
    assert engine.lookup(1, [1]).hits == 0 and engine.lookup(2, [2]).hits == 1
    assert later.sums()["free"] == 15
    come_to_rest(later)


def test_of_two_records_of_one_key_the_newer_counts_and_the_other_slot_is_free(world):
    engine = world.engine()
    engine.hold([1], ticket=1)
    assert world.table is not None
    table = world.table.copy()
    [slot] = np.flatnonzero(table["state"] == SlotState.READY).tolist()
    other = (slot + 5) % 16
    table[other] = table[slot]
    table["generation"][other] += 7
    table["checksum"] = checksums(table)
    later = world.restart(table=table)
    assert later.sums()["ready"] == 1 and later.sums()["free"] == 15
    engine = back(later)
    engine.load(1, 1, [1], [9])
    [plan] = [plan for plan in engine.plans() if plan.jobs]
    assert plan.slots[0] == other


def test_a_generation_is_never_given_twice_whatever_was_torn(world):
    engine = world.engine()
    engine.hold([1, 2], ticket=1)
    assert world.table is not None
    table = world.table.copy()
    highest = int(table["generation"].max())
    table["checksum"][table["generation"] == highest] ^= 1  # the newest record is torn
    later = world.restart(table=table)
    engine = back(later)
    engine.store(1, 1, [7], [7])
    assert int(later.table["generation"].max()) > highest


def test_no_two_boots_give_one_generation_even_if_the_records_know_of_neither(world):
    """Found by a voyage: a daemon died amid its first write, and the next one gave the same generation again."""
    engine = world.engine()
    engine.hold([1, 2], ticket=1)
    assert world.table is not None
    table = world.table.copy()
    later = world.restart(table=table.copy())
    back(later).store(1, 1, [7], [7])
    given = int(later.table["generation"].max())
    last = later.restart(table=table.copy())  # nothing of that write has reached memory
    back(last).store(1, 1, [8], [8])
    assert int(last.table["generation"].max()) > given


def test_the_oldest_generation_is_evicted_first(worlds):
    world = worlds(slots=4)
    engine = world.engine()
    for n in (1, 2, 3, 4):
        engine.hold([n], ticket=n)
    later = world.restart()
    engine = back(later)
    engine.hold([5], ticket=1)
    assert [engine.lookup(n, [n]).hits for n in (1, 2, 3, 4, 5)] == [0, 1, 1, 1, 1]
    come_to_rest(later)


def test_equal_keys_of_two_namespaces_come_back_apart(world):
    one, two = world.engine("one", salt=b"1"), world.engine("two", salt=b"2")
    one.hold([1, 2], ticket=1)
    two.hold([2], ticket=1)
    later = world.restart()
    assert len(later.core.status()["namespaces"]) == 2
    one, two, three = (back(later, name, salt=salt) for name, salt in (("x", b"1"), ("y", b"2"), ("z", b"3")))
    assert [engine.lookup(1, [2]).hits for engine in (one, two, three)] == [1, 1, 0]
    assert [engine.lookup(2, [1]).hits for engine in (one, two, three)] == [1, 0, 0]
    come_to_rest(later)


def test_a_restart_after_a_restart_loses_nothing(world):
    engine = world.engine()
    engine.hold([1, 2], ticket=1)
    later = world
    for n in range(5):
        later = later.restart()
        engine = back(later)
        engine.hold([10 + n], ticket=1)
    assert all(engine.lookup(n + 1, [name]).hits for n, name in enumerate([1, 2, 10, 11, 12, 13, 14]))
    come_to_rest(later)


def test_a_daemon_whose_table_never_was_begins_empty(world):
    later = world.restart()
    engine = back(later)
    engine.hold([1], ticket=1)
    assert engine.lookup(2, [1]).hits == 1
    come_to_rest(later)


# ---- workers that outlived their daemon (rule 10) --------------------------------------------------------


def test_no_store_is_accepted_until_every_listed_worker_has_drained_or_died(world):
    old = world.engine()
    old.hold([1], ticket=1)
    later = world.restart(workers=[101, 102, 103])
    engine = Engine(later, "e")
    engine.register()
    engine.attach(0, worker=101, link=later.drained(101))
    engine.attach(1, worker=102, link=later.drained(102))
    answer = engine.lookup(1, [1])
    assert answer.hits == 1, "READY slots serve at once"
    step = engine.step(stores=[Job(1, 2, [5], [5])], loads=[Job(2, 1, [1], [9], answer.lease)])
    assert step.reason(1) is Reason.RESTARTING and step.reason(2) is Reason.NONE
    assert later.core.status()["awaited"] == [f"{103:016x}"]
    later.reap(103)
    step2 = engine.step(stores=[Job(3, 2, [5], [5])])
    assert step2.reason(3) is Reason.NONE
    engine.finish(step.job(2), step2.job(3))
    come_to_rest(later)


def test_until_the_supervisor_has_spoken_nothing_is_given_away(world):
    world.engine().hold([1], ticket=1)
    later = world.restart(workers=None)
    engine = back(later)
    assert engine.step(stores=[Job(1, 2, [5], [5])]).reason(1) is Reason.RESTARTING
    assert engine.lookup(1, [1]).hits == 1
    later.step(WorkersListed(()))
    assert engine.step(stores=[Job(2, 2, [5], [5])]).reason(2) is Reason.NONE


def test_words_before_the_list_count(world):
    """A worker may have drained, or died, before the supervisor's list is read."""
    world.engine().hold([1], ticket=1)
    later = world.restart(workers=None)
    later.drained(101)
    later.reap(102)
    later.step(WorkersListed((101, 102)))
    assert not later.core.status()["restarting"]


def test_a_worker_that_does_not_drain_in_time_is_killed(worlds):
    """One that stands still would keep all stores out for ever; a kill reaches a stopped process too."""
    world = worlds(awaited_ns=10 * S)
    world.engine().hold([1], ticket=1)
    later = world.restart(workers=[101, 102])
    later.drained(101)
    assert later.core.next_due_ns() == later.now + 10 * S
    later.wait(10 * S - 1)
    assert later.kills() == []
    later.wait(1)
    assert later.kills() == [102]
    assert later.core.status()["restarting"], "asking for a death is no proof of it"
    later.reap(102)
    assert not later.core.status()["restarting"] and later.core.next_due_ns() is None


def test_a_worker_that_attaches_has_drained(world):
    world.engine().hold([1], ticket=1)
    later = world.restart(workers=[101, 102])
    engine = Engine(later, "e")
    engine.register()
    engine.attach(0, worker=101)
    assert later.core.status()["restarting"]
    engine.attach(1, worker=102)
    assert not later.core.status()["restarting"]


def test_drained_under_another_boot_counts_for_nothing(world):
    world.engine().hold([1], ticket=1)
    later = world.restart(workers=[101])
    link = later.open("worker")
    later.send(link, Drained(worker=101, boot=world.boot))
    assert later.core.status()["restarting"] and later.count("drained_of_another_boot") == 1
    later.send(link, Drained(worker=101, boot=later.boot))
    assert not later.core.status()["restarting"]


def test_a_list_without_a_recovered_table_is_waited_for_too(world):
    """The old daemon died before its geometry was fixed, or its table was discarded."""
    world.step(WorkersListed((555,)))
    engine = world.engine()
    assert engine.step(stores=[Job(1, 1, [1], [1])]).reason(1) is Reason.RESTARTING
    world.reap(555)
    assert engine.step(stores=[Job(2, 1, [1], [1])]).reason(2) is Reason.NONE
    engine.finish(next(iter(world.core._desk.jobs)).id)


def test_words_on_jobs_of_the_old_boot_are_dropped_and_counted(world):
    """Case 20: completions of another boot name no job of this one, though their workers live on."""
    engine = world.engine()
    engine.hold([1], ticket=1)
    running = engine.store(2, 2, [2], [2])
    later = world.restart(workers=[101, 102])
    again = Engine(later, "e")
    again.register()
    for rank, worker in ((0, 101), (1, 102)):
        again.attach(rank, worker=worker, link=later.drained(worker))
        again.done(rank, running)
    assert later.count("words_of_another_boot") == 2
    assert again.lookup(1, [2]).hits == 0 and again.lookup(2, [1]).hits == 1


# ---- a worker that lost its link, and not its daemon ------------------------------------------------------


def test_a_worker_back_on_a_new_link_has_said_its_last_word_on_the_old_one(world):
    engine = world.engine()
    engine.hold([1], ticket=1)
    engine.ended()
    store = engine.store(2, 2, [2], [2])
    load = engine.load(3, 3, [1], [9])
    engine.done(0, store, load)
    world.lose(engine.worker_link[1])
    assert world.sums()["writing"] == 1
    link = world.drained(engine.worker[1])
    assert engine.ended() == {2: Outcome.CANCELLED, 3: Outcome.CANCELLED}
    assert world.sums()["free"] == 15 and world.sums()["pinned"] == 0
    engine.attach(1, worker=engine.worker[1], link=link)
    assert engine.lookup(4, [1]).hits == 1
    world.wait(60 * S)
    assert world.kills() == [], "it is no stranger that should be gone by now"
    engine.finish(engine.store(5, 5, [5], [5]))
    assert engine.ended() == {5: Outcome.OK}


def test_it_may_be_back_before_the_end_of_its_old_link_is_heard(world):
    engine = world.engine()
    store = engine.store(2, 2, [2], [2])
    old = engine.worker_link[1]
    link = world.drained(engine.worker[1])
    engine.attach(1, worker=engine.worker[1], link=link)
    world.lose(old)
    assert engine.ended() == {2: Outcome.CANCELLED}
    assert world.core.status()["engines"][0]["attached"] == 2
    engine.done(0, store)
    assert world.sums()["quarantined"] == 0


def test_drained_twice_on_one_link_changes_nothing(world):
    engine = world.engine()
    job = engine.store(1, 1, [1], [1])
    world.drained(engine.worker[0], engine.worker_link[0])
    assert world.jobs == 1
    engine.finish(job)
    assert engine.ended() == {1: Outcome.OK}


# ---- another model -----------------------------------------------------------------------------------------


def test_another_slot_size_than_the_recovered_one_is_served_and_the_old_keys_are_discarded(world):
    """A restart with another model must not be refused for ever because of keys that nobody can use any more."""
    world.engine().hold([1, 2], ticket=1)
    later = world.restart()
    other = back(later, payload=3 * 4096)
    assert later.sums() == {**later.sums(), "total": 16, "free": 16}
    assert any("2 recovered keys were discarded" in note for note in later.warnings())
    other.hold([1], ticket=1)
    last = later.restart()
    assert back(last, payload=3 * 4096).lookup(1, [1, 2]).hits == 1
    come_to_rest(last)


def test_what_this_daemon_stored_is_not_discarded_for_another_slot_size(world):
    world.engine().hold([1], ticket=1)
    later = world.restart()
    engine = back(later)
    engine.hold([2], ticket=1)
    engine.goodbye()
    for rank in (0, 1):
        engine.die(rank)
    other = Engine(later, "other", payload=3 * 4096)
    other.register()
    other.attach(0)
    assert later.count("refused.layout.slot_bytes") == 1 and later.sums()["ready"] == 2


def test_another_slot_size_is_refused_while_an_engine_of_the_recovered_one_is_there(world):
    world.engine().hold([1, 2], ticket=1)
    later = world.restart()
    back(later)
    other = Engine(later, "other", payload=3 * 4096)
    other.register()
    other.attach(0)
    assert later.count("refused.layout.slot_bytes") == 1
    assert later.sums()["ready"] == 2


def test_a_pool_file_that_holds_fewer_slots_than_the_table_is_no_place_for_them(world):
    world.engine().hold([1, 2], ticket=1)
    later = world.restart()
    later.slots = 4
    back(later)
    assert later.sums()["total"] == 4 and later.sums()["ready"] == 0


# ---- the records ---------------------------------------------------------------------------------------------


def test_a_kill_between_any_two_stores_of_a_move_leaves_a_record_that_is_not_whole():
    """State and checksum move one after the other: between them the record is of nobody."""
    memory = np.zeros(4, dtype=RECORD)
    table = SlotTable(4, lambda _: memory)
    slots = np.array(table.take(2), dtype=np.uint32)
    table.write(slots, [b"a", b"b"], key_bytes=1, groups=0, namespace=b"n", epoch=0, payload_bytes=1)
    before = memory.copy()
    table.commit(slots)
    between = memory.copy()
    between["checksum"] = before["checksum"]
    assert sound(before)[slots].all() and sound(memory)[slots].all()
    assert not sound(between)[slots].any()


def test_soundness_is_told_for_many_records_at_once():
    memory = np.zeros(40_000, dtype=RECORD)
    table = SlotTable(len(memory), lambda _: memory)
    slots = np.array(table.take(30_000), dtype=np.uint32)
    table.write(slots, [b"k"] * len(slots), key_bytes=1, groups=0, namespace=b"n", epoch=0, payload_bytes=1)
    memory["epoch"][::1000] += 1
    whole = sound(memory)
    assert int(whole.sum()) == 30_000 - 30
    assert not whole[30_000:].any(), "a record that was never written holds nothing"


def test_the_core_tells_the_shell_the_whole_shape(world):
    world.engine(payload=[4096, 8192])
    assert world.shape == TableShape(16, (8192, 12288), (16 * 8192, 16 * 12288))


def test_an_older_client_hears_an_older_reason(world):
    """A reason of 1.1 is not sent to a peer of 1.0."""
    from kvferry.proto.control import Hello
    from kvferry.scheduler_daemon.core.api import Received

    world.step(WorkersListed((555,)))
    engine = Engine(world, "e")
    engine.world._links += 1
    link = world._links
    world.step(Received(link, Hello(role="client", minor=0, pid=1)))
    opened, world.open = world.open, lambda *_: link  # type: ignore[method-assign]
    engine.register()
    world.open = opened  # type: ignore[method-assign]
    for rank in range(2):
        engine.attach(rank)
    world.send(link, engine.message(stores=[Job(1, 1, [1], [1])]))
    [answer] = world.heard(link, StepAnswer)
    assert answer.reasons == bytes([Reason.RANKS_AWAY])
