"""Item 14: CUDA graphs over lent memory, as servers replay them in each step.

    capture   between the rank client's begins and the word of their ends: no call of ours breaks it, no mark is in it
    replay    busy for 2 ms; WRITTEN = the number of the replay; DERIVED = the complement of LOADED
    store     of WRITTEN and DERIVED, its mark behind the replay: the slots hold what this replay wrote
    load      into LOADED, its mark behind it too: the next replay reads it, and this one's reading is over
    control   the store's mark set before the replay: must find old bytes at least once

Loads end before the next replay is launched, as a server has it. Nothing waits for the stream in between.
"""

from typing import Any, Final

from kvferry.gpu_check.results import Failed, Skipped, Void
from kvferry.gpu_check.stage import Geometry, Served, Stage
from kvferry.proto.outcome import Kind, Outcome

ALONE, WRITTEN, LOADED, DERIVED = 0, 1, 2, 3  # blocks; the graph knows nothing of ALONE
POISON: Final = 0xAA
SPIN_MS: Final = 2.0
ROUNDS: Final = 50
CONTROLS: Final = 50
WORD_S: Final = 5.0


def graphs(stage: Stage, facts: dict[str, Any]) -> str:
    """Item 14: graphs that write and read lent memory are captured and replayed as without a cache."""
    if stage.is_cpu:
        raise Skipped("only on a GPU")
    if stage.engine_kind != "torch":
        raise Skipped("only with torch: a graph needs kernels to capture")
    facts["rounds"] = ROUNDS
    with stage.serve(Geometry(layers=4, blocks=4, run=256 << 10), 4) as served:
        facts["marks"] = served.state["mark_mode"]
        _capture(served, _value(1))
        _marks_stay_out(served)
        first = 2  # that was number 1
        for number in range(first, first + ROUNDS):
            if wrong := _round(served, number, is_early=False):
                raise Failed(f"round {number - first + 1} of {ROUNDS}: {wrong}")
        first += ROUNDS
        old = sum(bool(_round(served, number, is_early=True)) for number in range(first, first + CONTROLS))
        facts["control_old_of"] = {"store": old, "of": CONTROLS}
        if not all(served.play(("holds", ALONE, POISON), ("holds", LOADED, _value(first + CONTROLS - 1)))):
            raise Failed("a block that the graph only reads, or does not know, has changed")
        if not served.engine.ask("kernel_works", 10):
            raise Failed("the engine's next kernel gave a wrong answer")
    if not old:
        raise Void(
            f"with the mark before the replay none of {CONTROLS} stores read old bytes: the race is not there,"
            " so nothing is shown"
        )
    return (
        f"captured between begins; {ROUNDS} replays stored as they wrote and read what was loaded before them;"
        f" with the mark before the replay {old} of {CONTROLS} stores read old bytes"
    )


def _value(number: int) -> int:
    """What is loaded behind a replay: never what any of them writes in the same round."""
    return (number * 7 + 3) % 256


def _capture(served: Served, value: int) -> None:
    """Capture, with a store and a load begun right before, of whose ends the rank client hears after it."""
    store = served.plan(Kind.STORE, [ALONE], [3], [served.generation()])
    load = served.plan(Kind.LOAD, [LOADED], [2], [served.stamp(2, value)])
    *_, word = served.play(
        ("fill", ALONE, POISON),
        ("store", store),
        ("load", (load, [LOADED])),
        ("capture", WRITTEN, LOADED, DERIVED, SPIN_MS),
        ("await", store, WORD_S),
        ("await", load, WORD_S),
    )
    if (outcome := served.outcome(store)) is not Outcome.OK or not word["ok"]:
        raise Failed(f"around a capture a store ended as {outcome.name} and a load as {word['outcome']}")
    if not (served.payload(3) == POISON).all():
        raise Failed("a store begun before a capture did not read what was written before its mark")


def _marks_stay_out(served: Served) -> None:
    """A mark that was captured would be written again, with its old number, by each replay."""
    served.play(("finish",))
    before = served.engine.ask("state", 10)["mark"]
    served.play(("replay",), ("finish",))
    after = served.engine.ask("state", 10)["mark"]
    if before != after:
        raise Failed(f"a replay alone moved the mark from {before} to {after}: a mark was captured into the graph")


def _round(served: Served, number: int, *, is_early: bool) -> str:
    """One replay, its store and the next one's load; what is wrong with the store, "" if nothing."""
    generation = served.generation()
    store = served.plan(Kind.STORE, [WRITTEN, DERIVED], [0, 1], [generation, generation])
    load = served.plan(Kind.LOAD, [LOADED], [2], [served.stamp(2, _value(number))])
    begin, replay = ("store", store), ("replay",)
    *_, word = served.play(
        *((("finish",), begin, replay) if is_early else (replay, begin)),
        ("load", (load, [LOADED])),
        ("await", store, WORD_S),
        ("await", load, WORD_S),
    )
    if (outcome := served.outcome(store)) is not Outcome.OK or not word["ok"]:
        raise Failed(f"replay {number}: its store ended as {outcome.name}, the load behind it as {word['outcome']}")
    if not (served.payload(0) == number % 256).all():
        return "the store read a block before the replay had written it"
    if not (served.payload(1) == 255 - _value(number - 1)).all():
        return "the replay did not read what was loaded before it, or its answer was stored too early"
    return ""
