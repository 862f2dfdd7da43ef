"""Items 4 and 13: order against the engine's work. Each has a control that must fail, or it proves nothing.

    4    marks      a store reads what was launched before its mark; a load lands after it
         control    the same without marks: must go wrong
    13   revokes    a block that is overwritten while it is stored never counts as stored
         control    revokes read before the copy instead of after it: must be fooled
         generations of slots: wrong ones, and ones that change under a load

On a GPU the races are run often enough to be lost sometimes. On CPU the engine's stream is held until the copy is
over, and the device is slowed down, so that a control goes wrong each time.
"""

import random
import time
from typing import Any, Final

import numpy as np

from kvferry.gpu_check.results import Failed, Void
from kvferry.gpu_check.stage import Geometry, Served, Stage
from kvferry.proto.outcome import Kind, Outcome

POISON, VALUE, ZERO = 0xAA, 0x55, 0
SPIN_MS: Final = 2.0
CONTROLS: Final = 50
PACED: Final = 200e6  # bytes a second of each thread of a slowed CPU device, which moves 1 MiB at a time


def order(stage: Stage, facts: dict[str, Any]) -> str:
    """Item 4: marks order copies against the engine's stream."""
    rounds = facts["rounds"] = 20 if stage.is_small else 200
    controls = 5 if stage.is_cpu else CONTROLS
    geometry = Geometry(layers=4, blocks=8, run=(16 << 10) if stage.is_cpu else (256 << 10))
    with stage.serve(geometry, 4) as served:
        for number in range(rounds):
            if not _stores_what_was_written(served, is_blind=False):
                raise Failed(f"store {number + 1} of {rounds} read a block before the engine's stream had written it")
            if not _load_stays(served, is_blind=False):
                raise Failed(f"load {number + 1} of {rounds} was wiped by work launched before its mark")
        wrong = {
            "store": sum(not _stores_what_was_written(served, is_blind=True) for _ in range(controls)),
            "load": sum(not _load_stays(served, is_blind=True) for _ in range(controls)),
        }
    facts["control_wrong_of"] = {**wrong, "of": controls}
    for kind, count in wrong.items():
        if not count:
            raise Void(
                f"without marks none of {controls} {kind}s went wrong: the race is not there, so nothing is shown"
            )
    return (
        f"{rounds} stores and {rounds} loads in order; without marks {wrong['store']} and {wrong['load']}"
        f" of {controls} went wrong"
    )


def _stores_what_was_written(served: Served, *, is_blind: bool) -> bool:
    ticket = served.plan(Kind.STORE, [3], [1], [served.generation()])
    busy, free = _busy(served, is_blind)
    served.play(
        ("fill", 3, POISON),
        ("finish",),
        busy,
        ("fill", 3, VALUE),
        ("blind", is_blind),
        ("store", ticket),
        ("await", ticket, 5.0),
        free,
        ("finish",),
        ("blind", False),
    )
    if (outcome := served.outcome(ticket)) is not Outcome.OK:
        raise Failed(f"a store ended as {outcome.name}")
    return bool((served.payload(1) == VALUE).all())


def _load_stays(served: Served, *, is_blind: bool) -> bool:
    ticket = served.plan(Kind.LOAD, [4], [2], [served.stamp(2, VALUE)])
    busy, free = _busy(served, is_blind)
    *_, is_there, _ = served.play(
        ("fill", 4, POISON),
        ("finish",),
        busy,
        ("fill", 4, ZERO),
        ("blind", is_blind),
        ("load", (ticket, [4])),
        ("await", ticket, 5.0),
        free,
        ("finish",),
        ("holds", 4, VALUE),
        ("blind", False),
    )
    if (outcome := served.outcome(ticket)) is not Outcome.OK:
        raise Failed(f"a load ended as {outcome.name}")
    return bool(is_there)


def _busy(served: Served, is_blind: bool) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """How the stream is kept busy, and let go: on CPU a control holds it until the copy is over."""
    if served.stage.is_cpu and is_blind:
        return ("hold",), ("release",)
    return ("spin", SPIN_MS), ("now",)


# ---- revokes -----------------------------------------------------------------------------------------


def revokes(stage: Stage, facts: dict[str, Any]) -> str:
    """Item 13: revokes and generations."""
    rounds = 10 if stage.is_cpu else 40 if stage.is_small else 200
    geometry = Geometry(layers=1, blocks=3, run=(8 << 20) if stage.is_small else (64 << 20))
    slow = ["--pace", str(PACED)] if stage.is_cpu else []
    with stage.serve(geometry, 2, *slow) as served:
        right = _race(served, rounds)
        facts["rounds"] = {**right, "of": rounds}
        if right["ok_and_mixed"]:
            raise Failed(f"{right['ok_and_mixed']} of {rounds} overwritten stores said OK and hold mixed bytes")
        generations = facts["generations"] = _generations(served)
        if not served.worker.is_alive:
            raise Failed("the worker ended")
    with stage.serve(geometry, 2, "--early-revokes", *slow) as served:
        fooled = facts["control"] = {**_race(served, rounds, enough=3), "of": rounds}
    if not fooled["ok_and_mixed"]:
        raise Void(f"with revokes read too early none of {rounds} mixed stores said OK: the race is not there")
    return (
        f"{rounds} stores overwritten: {right['ok']} whole and OK, {right['failed']} failed ({right['mixed']} mixed);"
        f" read too early: {fooled['ok_and_mixed']} mixed ones said OK; {generations}"
    )


def _race(served: Served, rounds: int, enough: int = 0) -> dict[str, int]:
    """Overwrite a block at a random moment of its store; ends early once `enough` mixed ones said OK."""
    seconds = _store_seconds(served)
    random.seed(13)
    # The slowed device of a CPU is in the middle of its copy then, each time: that control needs no luck.
    first, last = (0.5, 0.5) if enough and served.stage.is_cpu else (0.0, 1.3)
    counts = dict.fromkeys(("ok", "failed", "mixed", "ok_and_mixed"), 0)
    for _ in range(rounds):
        ticket = served.plan(Kind.STORE, [1], [0], [served.generation()])
        served.play(
            ("fill", 1, VALUE),
            ("finish",),
            ("store", ticket),
            ("sleep", random.uniform(first, last) * seconds),
            ("revoke", ticket),
            ("fill", 1, POISON),
            ("finish",),
            ("await", ticket, 10.0),
        )
        payload = served.payload(0)
        is_mixed = bool((payload != VALUE).any())
        is_ok = served.outcome(ticket) is Outcome.OK
        counts["ok" if is_ok else "failed"] += 1
        counts["mixed"] += is_mixed
        counts["ok_and_mixed"] += is_ok and is_mixed
        if enough and counts["ok_and_mixed"] >= enough:
            break
    return counts


def _store_seconds(served: Served) -> float:
    """How long one store takes, from its begin to its word."""
    taken: list[float] = []
    for _ in range(3):
        ticket = served.plan(Kind.STORE, [1], [0], [served.generation()])
        *_, before, _, _, after = served.play(
            ("fill", 1, VALUE), ("finish",), ("now",), ("store", ticket), ("await", ticket, 10.0), ("now",)
        )
        taken.append(float(after - before) / 1e9)
    return min(taken)


def _generations(served: Served) -> str:
    """A wrong generation in a plan; one that changes under a load. Each fails and names its block."""
    right = served.stamp(0, VALUE)
    other = served.stamp(1, VALUE)
    word = served.load([1, 2], [0, 1], [right, other + 1])
    if word["outcome"] != "TORN" or word["failed"] != [2]:
        raise Failed(f"a load with one wrong generation of two ended as {word}: block 2 should be TORN")
    seconds = _store_seconds(served)
    for _ in range(20):
        first, second = served.stamp(0, VALUE), served.stamp(1, VALUE)
        ticket = served.plan(Kind.LOAD, [1, 2], [0, 1], [first, second])
        served.play(("fill", 1, ZERO), ("fill", 2, ZERO), ("finish",), ("load", (ticket, [1, 2])))
        time.sleep(random.uniform(0.2, 1.2) * seconds)
        served.headers.open(np.array([1], dtype=np.uint32), np.array([second + 1000], dtype=np.uint64))
        word, was_copied = served.play(("await", ticket, 10.0), ("holds", 2, VALUE))
        if word["ok"]:
            continue  # it was over before the word changed
        if word["outcome"] != "TORN" or word["failed"] != [2]:
            raise Failed(f"a slot changed under a load, which ended as {word}: block 2 should be TORN")
        if was_copied:
            return "a wrong generation and one changed under a load: failed, blocks named"
    raise Void("no slot could be changed while it was being loaded in 20 tries")
