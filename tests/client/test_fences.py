"""The client's mirror of the fence: whose blocks are written over is revoked, and nobody waits."""

from kvferry.client.types import Directive, JobEnd
from kvferry.proto.columns import pack_u64
from kvferry.proto.hot import StepAnswer
from kvferry.proto.outcome import Kind, Outcome
from tests.client.fakes import Scene, numbers_of

CANCELLED = Outcome.CANCELLED


def test_writing_a_block_that_an_unended_store_reads_revokes_the_store_in_the_next_directive() -> None:
    """Case 4: a store that loses its block is never published, and nobody waits for it."""
    scene = Scene()
    ticket = scene.running_store("a", [1], [7])
    assert scene.core.written([7, 8]) == {ticket}
    directive, step = scene.end_step()
    assert directive.revokes == (ticket,)
    assert step is not None
    assert (numbers_of(step.revoked), numbers_of(step.written, 4)) == ([ticket], [7, 8])


def test_a_store_is_revoked_once() -> None:
    scene = Scene()
    scene.running_store("a", [1], [7])
    scene.core.written([7])
    scene.end_step()
    assert scene.core.written([7]) == frozenset()
    directive, step = scene.end_step()
    assert directive.revokes == () and step is not None and numbers_of(step.revoked) == []


def test_a_store_whose_step_was_not_sent_is_withdrawn_and_nobody_hears_of_it() -> None:
    """Case 11: the block is given away in the step that would have begun the store."""
    scene = Scene()
    lost, kept = scene.store("a", [1], [7]), scene.store("a", [2], [8])
    assert scene.core.written([7]) == {lost}
    directive, step = scene.end_step()
    assert (directive.stores, directive.revokes) == ((kept,), ())
    assert step is not None and numbers_of(step.store_tickets) == [kept]
    assert scene.core.poll() == [JobEnd(lost, "a", Kind.STORE, CANCELLED)]
    assert scene.core.counters.withdrawn == 1


def test_a_store_said_after_the_write_that_fills_its_block_does_not_meet_it() -> None:
    scene = Scene()
    old = scene.running_store("a", [1], [6])
    scene.core.written([7])
    ticket = scene.store("b", [2], [7])
    directive, step = scene.end_step()
    assert directive.stores == (ticket,)
    assert step is not None and numbers_of(step.written, 4) == []
    assert scene.core.storing([6, 7]) == {old, ticket}


def test_the_blocks_of_a_load_are_written_too() -> None:
    """Case 4: all ways of losing a block go through the fence."""
    scene = Scene()
    running = scene.running_store("a", [1], [7])
    unsent = scene.store("a", [2], [8])
    load = scene.load("b", [3, 4], [7, 8])
    directive, _ = scene.end_step()
    assert directive == Directive(2, loads=((load, (7, 8)),), revokes=(running,))
    assert [end.ticket for end in scene.core.poll()] == [unsent]


def test_a_store_that_names_a_block_twice_leaves_its_fence_once() -> None:
    """Case 13: an entry is a set per block; the end is one deed per job."""
    scene = Scene()
    ticket = scene.running_store("a", [1, 2, 3], [7, 7, 8])
    assert scene.core.storing([7]) == {ticket}
    scene.ended(ticket)
    assert scene.core.storing([7, 8]) == frozenset() and scene.core.written([7, 8]) == frozenset()


def test_loads_never_enter_the_fence() -> None:
    scene = Scene()
    scene.load("a", [1], [7])
    scene.end_step()
    assert scene.core.storing([7]) == frozenset() and scene.core.written([7]) == frozenset()


def test_storing_is_only_a_question() -> None:
    scene = Scene()
    ticket = scene.running_store("a", [1], [7])
    assert scene.core.storing([7]) == scene.core.storing([7]) == {ticket}
    assert scene.end_step()[1] is None


def test_writes_are_told_only_while_there_is_a_store_to_meet() -> None:
    scene = Scene()
    scene.core.written([1, 2, 3])
    assert scene.end_step()[1] is None


def test_stores_that_the_daemons_fence_met_and_ours_had_not_are_counted() -> None:
    scene = Scene()
    scene.store("a", [1], [7])
    _, step = scene.end_step()
    assert step is not None
    scene.say(StepAnswer(step.step, 1, wait_for=pack_u64([1])))
    assert scene.core.counters.wait_for == 1
