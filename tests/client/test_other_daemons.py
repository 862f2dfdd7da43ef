"""Without a daemon, with another one, and in another namespace: what the core gives up, keeps, and says again."""

from kvferry.client.core import MAX_UNANSWERED_STEPS, State
from kvferry.client.types import Directive, Hits, JobEnd
from kvferry.proto.columns import pack_u8, pack_u32, pack_u64
from kvferry.proto.control import Hello, RanksChanged, Register, Rotate, Welcome
from kvferry.proto.hot import Lookup, StepAnswer
from kvferry.proto.outcome import Kind, Outcome, Reason
from tests.client.fakes import Scene, chain, numbers_of, refused

CANCELLED = Outcome.CANCELLED


# ---- without, and with another daemon ----------------------------------------------------------------


def test_without_a_daemon_everything_is_a_miss_and_loads_are_failed_by_the_ranks() -> None:
    """Case 46: no sidecar = all misses, nothing else."""
    scene = Scene(attach=False)
    for number in range(100):
        name = f"r{number}"
        scene.core.lookup(name, chain(number), scene.now_ns)
        assert scene.core.hits(name, scene.now_ns) == Hits(True, reason=Reason.OFF)
        assert scene.store(name, [number], [number % 50]) == 0
        assert scene.core.written([number % 50]) == frozenset()
        scene.core.finish(name, scene.now_ns)
    ticket = scene.load("r", [1], [5])
    directive, step = scene.end_step()
    assert ticket > 0 and directive == Directive(1, failed_loads=((ticket, (5,)),)) and step is None
    assert scene.core.counters.stores_off == 100
    assert scene.core.describe()["requests"] == 1
    scene.core.load_ended(ticket, False)
    assert scene.core.poll() == [JobEnd(ticket, "r", Kind.LOAD, Outcome.COPY_FAILED)]


def test_a_request_known_before_the_daemon_came_hits_afterwards() -> None:
    """Case 46: the daemon starts later; hits follow by themselves."""
    scene = Scene(attach=False)
    scene.core.lookup("r", chain(1), scene.now_ns)
    assert scene.core.hits("r", scene.now_ns).reason is Reason.OFF
    scene.attach()
    assert not scene.core.hits("r", scene.now_ns).ready
    scene.answer(scene.take(Lookup), 1, lease=3)
    assert scene.core.hits("r", scene.now_ns).count == 1


def test_a_lost_daemon_ends_stores_and_lookups_and_leaves_loads_to_the_ranks() -> None:
    scene = Scene()
    scene.leased("a", [1])
    load = scene.load("a", [1], [10])
    store = scene.running_store("b", [2], [11])
    scene.ask("c", [3])
    scene.core.lost(scene.now_ns)
    assert scene.core.poll() == [JobEnd(store, "b", Kind.STORE, CANCELLED, Reason.OFF)]
    assert scene.core.hits("c", scene.now_ns) == Hits(True, reason=Reason.OFF)
    assert scene.core.describe()["loads_open"] == 1
    scene.core.load_ended(load, True)
    assert scene.core.poll() == [JobEnd(load, "a", Kind.LOAD, Outcome.OK, accepted=1)]
    assert scene.core.counters.lost_stores == 1


def test_stores_of_a_lost_daemon_are_revoked_at_the_ranks_and_not_named_to_the_next_daemon() -> None:
    """Nobody guards their blocks any more, and a daemon that lives on without us could publish them."""
    scene = Scene()
    ticket = scene.running_store("a", [1], [7])
    scene.core.lost(scene.now_ns)
    scene.attach()
    directive, step = scene.end_step()
    assert directive.revokes == (ticket,) and step is None
    assert scene.end_step()[0].revokes == ()


def test_work_of_an_unsent_step_is_taken_back_when_the_daemon_is_lost() -> None:
    scene = Scene()
    store, load = scene.store("a", [1], [7]), scene.load("b", [2], [8])
    scene.core.lost(scene.now_ns)
    directive, step = scene.end_step()
    assert directive == Directive(1, failed_loads=((load, (8,)),)) and step is None
    assert [end.ticket for end in scene.core.poll()] == [store]


def test_registering_again_is_the_same_path_and_the_step_count_begins_anew() -> None:
    """Case 45: recovery is the start path; ten restarts are ten registrations."""
    scene = Scene()
    for _ in range(10):
        scene.running_store("a", [1], [7])
        scene.core.lost(scene.now_ns)
        scene.attach()
        scene.store("b", [1], [8])
        _, step = scene.end_step()
        assert step is not None and step.step == 1
        scene.core.lost(scene.now_ns)
        scene.attach()
    assert scene.core.counters.attaches == 21


def test_messages_of_an_earlier_daemon_are_counted_and_dropped() -> None:
    """Case 21: old completion frames, replayed after a restart."""
    scene = Scene()
    scene.running_store("a", [1], [7])
    scene.core.lost(scene.now_ns)
    scene.core.poll()
    scene.attach()
    before = scene.core.counters.stale
    scene.ended(1)
    scene.say(StepAnswer(1, 1, pack_u64([1]), pack_u64([5]), pack_u32([1]), pack_u8([0])))
    assert scene.core.counters.stale == before + 2 and scene.core.poll() == []


def test_a_refusal_stands_with_its_reason() -> None:
    scene = Scene(attach=False)
    scene.core.attach(scene.now_ns)
    scene.take(Hello)
    scene.say(refused())
    assert scene.core.state is State.REFUSED and not scene.core.attached
    assert scene.core.refusal is not None and scene.core.refusal.code == "register.world_size"
    assert scene.load("a", [1], [2]) > 0
    assert scene.end_step()[0].failed_loads


def test_a_daemon_that_answers_no_step_gets_no_more_stores() -> None:
    """Case 15: what piles up is bounded, and the engine does not wait for it."""
    scene = Scene()
    for number in range(MAX_UNANSWERED_STEPS):
        assert scene.store("a", [number], [number % 100])
        scene.end_step()
    assert scene.store("a", [1], [1]) == 0
    ticket = scene.load("b", [1], [1])
    assert scene.end_step()[0].failed_loads == ((ticket, (1,)),)
    assert scene.core.counters.stores_off == 1


def test_five_hundred_running_stores_hold_nothing_up_and_their_ends_need_no_call() -> None:
    """Case 15: idle completions are collected; a new request is served at once."""
    scene = Scene()
    tickets = [scene.running_store("a", [n], [n % 100]) for n in range(500)]
    scene.core.finish("a", scene.now_ns)
    scene.end_step()
    scene.leased("b", [1])
    assert scene.core.hits("b", scene.now_ns).count == 1
    scene.ended(*tickets)
    assert [end.ticket for end in scene.core.poll()] == tickets


def test_an_idle_registration_stands_and_asks_for_nothing() -> None:
    """Case 43: liveness is the link's; silence is no death, and nobody pings."""
    scene = Scene()
    for _ in range(100):
        scene.core.tick(scene.later(60_000).now_ns)
    assert scene.outgoing() == [] and scene.core.attached
    scene.leased("a", [1])
    assert scene.core.hits("a", scene.now_ns).count == 1


# ---- namespaces --------------------------------------------------------------------------------------


def test_rotate_revokes_forgets_and_moves_in_that_order_on_the_wire() -> None:
    """Case 70: after a weight update nothing old is found, and what is being stored is not published."""
    scene = Scene()
    running = scene.running_store("a", [1], [7])
    unsent = scene.store("a", [2], [8])
    scene.leased("b", [3])
    scene.core.rotate(b"salt-2", scene.now_ns)
    assert scene.take(Rotate).salt == b"salt-2"
    assert scene.core.hits("b", scene.now_ns) == Hits(True)
    fresh = scene.store("a", [4], [9])
    directive, step = scene.end_step()
    assert (directive.revokes, directive.stores) == ((running,), (fresh,))
    assert step is not None
    assert (numbers_of(step.revoked), numbers_of(step.released)) == ([running], [77])
    assert [end.ticket for end in scene.core.poll()] == [unsent]
    scene.say(RanksChanged(attached=1, namespace="space-2", epoch=1, slots=64))
    assert scene.core.registration.namespace == "space-2"


def test_a_rotated_salt_is_registered_with_the_next_daemon() -> None:
    scene = Scene()
    scene.core.rotate(b"salt-2", scene.now_ns)
    scene.core.lost(scene.now_ns)
    scene.core.attach(scene.now_ns)
    scene.outgoing()
    scene.say(Welcome(major=1, minor=0, boot=8, tp_size=1))
    assert scene.take(Register).salt == b"salt-2"
