"""Requests and their incarnations: how they end, come back, and leave nothing behind."""

from kvferry.client.types import Directive
from kvferry.proto.hot import Renew
from kvferry.proto.outcome import Ended, Outcome
from tests.client.fakes import Scene, numbers_of


def test_stores_after_a_load_belong_to_another_incarnation() -> None:
    """One incarnation carries one load or any stores, never both, and an engine need not know."""
    scene = Scene()
    scene.leased("a", [1])
    scene.load("a", [1], [10])
    scene.store("a", [2], [11])
    scene.store("a", [3], [12])
    _, step = scene.end_step()
    assert step is not None
    loads, stores = numbers_of(step.load_requests), numbers_of(step.store_requests)
    assert len(set(stores)) == 1 and not set(loads) & set(stores)


def test_a_second_load_is_another_incarnation() -> None:
    scene = Scene()
    scene.load("a", [1], [10])
    scene.load("a", [2], [11])
    _, step = scene.end_step()
    assert step is not None and len(set(numbers_of(step.load_requests))) == 2


def test_a_preempted_request_comes_back_as_a_new_incarnation_and_its_stores_stay_with_the_old() -> None:
    """Case 23: the old job's end is not booked on the new life."""
    scene = Scene()
    old = scene.running_store("a", [1], [7])
    scene.core.preempt("a", scene.now_ns)
    new = scene.store("a", [1], [8])
    _, step = scene.end_step()
    assert step is not None
    assert numbers_of(step.end_requests) == [1] and numbers_of(step.end_reasons, 1) == [Ended.PREEMPTED]
    assert numbers_of(step.store_requests) == [2]
    scene.ended(old)
    assert [end.ticket for end in scene.core.poll()] == [old]
    assert scene.core.storing([8]) == {new}


def test_finish_ends_every_incarnation_of_the_request_and_its_stores_go_on() -> None:
    """Case 28: finished closes the request for new work; what runs ends by itself."""
    scene = Scene()
    scene.leased("a", [1])
    load = scene.load("a", [1], [10])
    scene.end_step()
    scene.core.load_ended(load, True)
    store = scene.running_store("a", [2], [11])
    scene.core.finish("a", scene.now_ns)
    _, step = scene.end_step()
    assert step is not None
    assert sorted(numbers_of(step.end_requests)) == [1, 2]
    scene.ended(store)
    assert [end.ticket for end in scene.core.poll()] == [load, store]
    assert scene.core.describe()["requests"] == 0


def test_an_aborted_request_cancels_its_load_and_still_waits_for_the_word() -> None:
    scene = Scene()
    scene.leased("a", [1])
    load = scene.load("a", [1], [10])
    scene.end_step()
    scene.core.abort("a", scene.now_ns)
    directive, step = scene.end_step()
    assert directive.cancels == (load,)
    assert step is not None and numbers_of(step.cancelled) == [load]
    assert scene.core.describe()["loads_open"] == 1
    scene.core.load_ended(load, False)
    assert scene.core.describe()["loads_open"] == 0


def test_a_late_failure_of_an_ended_request_says_nothing_about_its_namesake() -> None:
    """Case 23: the same name, another life."""
    scene = Scene()
    scene.leased("a", [1])
    load = scene.load("a", [1], [10])
    scene.end_step()
    scene.core.abort("a", scene.now_ns)
    scene.leased("a", [1])
    scene.core.load_ended(load, False)
    assert scene.core.hits("a", scene.now_ns).count == 1


def test_cancel_withdraws_what_was_not_sent_and_cancels_what_was() -> None:
    scene = Scene()
    running = scene.running_store("a", [1], [7])
    unsent_store, unsent_load = scene.store("a", [2], [8]), scene.load("b", [3], [9])
    for ticket in (running, unsent_store, unsent_load, 999):
        scene.core.cancel(ticket, scene.now_ns)
    directive, step = scene.end_step()
    assert directive == Directive(2, failed_loads=((unsent_load, (9,)),))
    assert step is not None
    assert (numbers_of(step.cancelled), numbers_of(step.load_tickets)) == ([running], [])


def test_back_to_zero_when_all_requests_are_over() -> None:
    """Case 36: every exit of a ticket passes one place; at rest nothing is held."""
    scene = Scene()
    for round_ in range(20):
        name = f"r{round_}"
        scene.leased(name, [round_], lease=round_ + 1)
        load = scene.load(name, [round_], [round_])
        store = scene.store(name, [100 + round_], [50 + round_])
        _, step = scene.end_step()
        assert step is not None
        scene.accept(step)
        scene.core.load_ended(load, True)
        scene.ended(load, store, outcome=Outcome.OK if round_ % 2 else Outcome.WORKER_DIED)
        scene.core.finish(name, scene.now_ns)
        _, step = scene.end_step()
        assert step is not None
        scene.accept(step)
    assert len(scene.core.poll()) == 40
    gauges = scene.core.describe()
    names = ("requests", "lookups", "leases", "stores_open", "loads_open", "steps_unanswered")
    assert {name: gauges[name] for name in names} == dict.fromkeys(names, 0)
    assert scene.core.counters.stale == 0
    assert not [message for message in scene.outgoing() if isinstance(message, Renew)]
