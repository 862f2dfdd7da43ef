"""Coming to rest: nothing is admitted, loads end, stores have a budget, and then it is said."""

from kvferry.proto.control import DrainAnswer, DrainAsk
from kvferry.proto.outcome import Next, Outcome, Reason
from kvferry.scheduler_daemon.core.api import AtRest, DrainBegun

from .dummy import MS, Job, S, World


def ask(world: World, **how) -> int:
    link = world.open("admin")
    world.send(link, DrainAsk(**how))
    return link


def test_an_idle_daemon_is_at_rest_at_once(world):
    engine = world.engine()
    engine.hold([1], ticket=1)
    link = ask(world)
    assert world.heard(link, DrainAnswer) == [DrainAnswer(dropped=0, waited_ms=0)]
    assert world.core.status()["draining"]


def test_while_it_drains_nothing_is_admitted(world):
    engine = world.engine()
    engine.hold([1], ticket=1)
    lease = engine.lookup(1, [1]).lease
    ask(world)
    assert world.core.status()["leases"] == 0
    answer = engine.lookup(2, [1])
    assert (answer.hits, answer.next, answer.reason) == (0, Next.MISS, Reason.DRAINING)
    step = engine.step(stores=[Job(2, 2, [2], [2])], loads=[Job(3, 1, [1], [9], lease)])
    assert step.reason(2) is step.reason(3) is Reason.DRAINING


def test_loads_run_to_their_end_and_stores_within_their_budget(world):
    engine = world.engine()
    engine.hold([1], ticket=1)
    quick, slow = engine.store(2, 2, [2], [2]), engine.store(3, 3, [3], [3])
    load = engine.load(4, 4, [1], [9])
    engine.ended()
    link = ask(world, budget_ms=500)
    engine.finish(quick)
    world.wait(500 * MS)
    assert engine.ended() == {2: Outcome.OK, 3: Outcome.CANCELLED}
    assert engine.cancels(0) == [slow]
    engine.finish(slow)
    assert world.heard(link, DrainAnswer) == []
    world.wait(1500 * MS)
    engine.finish(load)
    assert engine.ended() == {4: Outcome.OK}
    assert world.heard(link, DrainAnswer) == [DrainAnswer(dropped=1, waited_ms=2000)]


def test_time_alone_ends_the_budget(world):
    engine = world.engine()
    job = engine.store(1, 1, [1], [1])
    ask(world, budget_ms=500)
    assert world.core.next_due_ns() == world.now + 500 * MS
    world.wait(500 * MS)
    engine.finish(job)


def test_a_worker_that_owes_a_word_past_budget_and_grace_is_killed(worlds):
    world = worlds(grace_ns=1 * S)
    engine = world.engine()
    job = engine.store(1, 1, [1], [1])
    engine.done(0, job)
    link = ask(world, budget_ms=500)
    world.wait(500 * MS)
    world.wait(1 * S)
    assert world.kills() == [engine.worker[1]]
    assert world.heard(link, DrainAnswer) == [], "asking for a death is no rest"
    engine.die(1)
    assert len(world.heard(link, DrainAnswer)) == 1


def test_the_shell_may_ask_too_and_is_told(world):
    engine = world.engine()
    job = engine.store(1, 1, [1], [1])
    assert not any(isinstance(a, AtRest) for a in world.step(DrainBegun(2 * S)))
    engine.done(0, job)
    assert any(isinstance(a, AtRest) for a in engine.done(1, job))
    assert not any(isinstance(a, AtRest) for a in world.wait(1 * S)), "said once"


def test_the_shell_is_told_of_a_drain_that_it_asked_for_and_of_no_other(world):
    engine = world.engine()
    engine.hold([1], ticket=1)
    link = ask(world)
    assert world.heard(link, DrainAnswer) and not any(isinstance(a, AtRest) for a in world.said)
    assert any(isinstance(a, AtRest) for a in world.step(DrainBegun(2 * S)))


def test_a_second_ask_is_answered_too_and_may_shorten_the_budget(world):
    engine = world.engine()
    job = engine.store(1, 1, [1], [1])
    one = ask(world, budget_ms=60_000)
    two = ask(world, budget_ms=0)
    assert engine.ended() == {1: Outcome.CANCELLED}
    engine.finish(job)
    assert len(world.heard(one, DrainAnswer)) == len(world.heard(two, DrainAnswer)) == 1


def test_each_who_asked_is_told_how_long_it_waited_itself(world):
    engine = world.engine()
    job = engine.store(1, 1, [1], [1])
    one = ask(world, budget_ms=60_000)
    world.wait(3 * S)
    two = ask(world, budget_ms=60_000)
    world.wait(2 * S)
    engine.finish(job)
    assert [world.heard(link, DrainAnswer)[0].waited_ms for link in (one, two)] == [5000, 2000]


def test_resume_admits_again_and_answers_who_still_waited(world):
    engine = world.engine()
    engine.hold([1], ticket=1)
    job = engine.store(2, 2, [2], [2])
    waiting = ask(world, budget_ms=60_000)
    link = ask(world, resume=True)
    assert len(world.heard(waiting, DrainAnswer)) == len(world.heard(link, DrainAnswer)) == 1
    assert engine.lookup(3, [1]).hits == 1
    engine.finish(job)
    assert engine.ended()[2] is Outcome.OK
    assert not world.core.status()["draining"]


def test_who_asked_and_left_is_not_answered(world):
    engine = world.engine()
    job = engine.store(1, 1, [1], [1])
    link = ask(world)
    world.lose(link)
    engine.finish(job)
    assert world.heard(link, DrainAnswer) == []


def test_what_is_stored_before_a_drain_is_there_after_the_next_start(world):
    engine = world.engine()
    engine.hold([1, 2], ticket=1)
    ask(world)
    later = world.restart()
    assert later.engine().lookup(1, [1, 2]).hits == 2
