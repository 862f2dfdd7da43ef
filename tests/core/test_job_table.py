"""Walks over the table of a job's turns: every pair moves as promised, or is refused and changes nothing."""

import itertools

import numpy as np
import pytest

from kvferry.proto.ids import JobId, Ticket
from kvferry.proto.outcome import Kind, Outcome
from kvferry.scheduler_daemon.core.jobs import NEXT, Effect, State, TransferJobStatus, Turn


def job(kind: Kind, ranks: int = 2, state: State = State.COPYING) -> TransferJobStatus:
    empty = np.array([], dtype=np.uint32)
    return TransferJobStatus(
        id=JobId(1),
        ticket=Ticket(1),
        session=None,  # type: ignore[arg-type]
        request=1,
        kind=kind,
        group=0,
        entries=[],
        slots=empty,
        blocks=empty,
        workers=(None,) * ranks,  # type: ignore[arg-type]
        num_bytes=0,
        accepted_ns=0,
        space=None,  # type: ignore[arg-type]
        state=state,
    )


PAIRS = list(itertools.product(Kind, State, Turn))


@pytest.mark.parametrize(("kind", "state", "turn"), PAIRS)
def test_every_pair_moves_as_the_table_says_or_refuses_and_changes_nothing(kind, state, turn):
    moving = job(kind, state=state)
    moving.cause = Outcome.REVOKED
    if (kind, state, turn) not in NEXT:
        assert state is State.OVER
        with pytest.raises(KeyError):
            moving.turn(turn)
        assert moving.state is state and moving.outcome is None
        return
    effects = moving.turn(turn)
    assert (moving.state, effects) == NEXT[kind, state, turn]
    assert (moving.outcome is not None) == (Effect.TELL in effects)


@pytest.mark.parametrize(("kind", "state", "turn"), list(NEXT))
def test_a_job_is_over_exactly_with_its_last_word_and_then_gives_everything_back(kind, state, turn):
    after, effect = NEXT[kind, state, turn]
    last = turn in (Turn.LAST_OK, Turn.LAST_FAILED)
    assert (after is State.OVER) == last == (Effect.RELEASE in effect)


@pytest.mark.parametrize(("kind", "state", "turn"), list(NEXT))
def test_only_a_store_that_every_rank_called_whole_and_nobody_voided_is_published(kind, state, turn):
    _, effect = NEXT[kind, state, turn]
    assert (Effect.PUBLISH in effect) == ((kind, state, turn) == (Kind.STORE, State.COPYING, Turn.LAST_OK))


@pytest.mark.parametrize("turns", list(itertools.product((Turn.PROGRESS, Turn.FAILED, Turn.VOIDED), repeat=3)))
@pytest.mark.parametrize("last", [Turn.LAST_OK, Turn.LAST_FAILED])
@pytest.mark.parametrize("kind", Kind)
def test_every_way_through_the_table_gives_one_answer_and_one_release(kind, turns, last):
    walking = job(kind)
    effects = [walking.turn(turn) for turn in (*turns, last)]
    assert sum(Effect.TELL in effect for effect in effects) == 1
    assert sum(Effect.RELEASE in effect for effect in effects) == 1
    # A store is published or dropped, never both and never neither; a load is neither.
    ways = sum((Effect.PUBLISH in effect) + (Effect.DROP in effect) for effect in effects)
    assert ways == (1 if kind is Kind.STORE else 0)
    if kind is Kind.LOAD:
        assert Effect.TELL in effects[-1], "a load is answered with its last word only"


@pytest.mark.parametrize("words", list(itertools.permutations(range(3))))
def test_pending_count_is_what_the_two_sets_leave(words):
    counting = job(Kind.STORE, ranks=3)
    left = 3
    for rank in words:
        assert counting.pending_count == left
        turn = counting.report(rank, Outcome.OK)
        assert counting.report(rank, Outcome.OK) is None
        left -= 1
        assert turn is (Turn.PROGRESS if left else Turn.LAST_OK)
    assert counting.pending_count == 0


def test_the_first_cause_stays():
    failing = job(Kind.LOAD)
    failing.report(0, Outcome.TORN)
    failing.blame(Outcome.DEADLINE)
    assert failing.report(1, Outcome.CANCELLED) is Turn.LAST_FAILED
    failing.turn(Turn.LAST_FAILED)
    assert failing.outcome is Outcome.TORN and failing.torn


def test_a_voided_load_that_still_came_whole_everywhere_is_ok():
    """Its engine heard OK from every rank; the daemon must not say otherwise."""
    late = job(Kind.LOAD)
    late.blame(Outcome.DEADLINE)
    late.turn(Turn.VOIDED)
    late.report(0, Outcome.OK)
    late.turn(Turn.PROGRESS)
    late.turn(late.report(1, Outcome.OK))
    assert late.outcome is Outcome.OK


@pytest.mark.parametrize(("kind", "state"), [(kind, state) for kind, state, turn in NEXT if turn is Turn.PROGRESS])
def test_progress_moves_nothing(kind, state):
    """The daemon leaves the table out for it."""
    assert NEXT[kind, state, Turn.PROGRESS] == (state, ())
