"""Items 10 and 11: an engine killed while its worker copies, and a worker killed while it copies for its engine."""

import os
import time
from typing import Any, Final

from kvferry.gpu_check.results import Failed, Void
from kvferry.gpu_check.stage import Geometry, Served, Stage
from kvferry.gpu_check.talk import Child, ChildError
from kvferry.proto.outcome import Kind, Outcome

REAPED_S: Final = 2.0
NEVER_MS: Final = 20_000.0  # a mark behind this is pending when the engine dies
NEVER_OF_COPIES_MS: Final = 2_000.0  # the same, where a busy stream is many queued copies
OLD, NEW, LATE = 0x11, 0x22, 0x33
QUIET_S: Final = 1.0
REATTACH_S: Final = 20.0


def _geometry(stage: Stage) -> Geometry:
    return Geometry(layers=2, blocks=16, run=(1 << 20) if stage.is_cpu else (16 << 20) if stage.is_fast else (32 << 20))


def _slow(stage: Stage) -> list[str]:
    # So that there is something to kill into: on a GPU the copies are large instead.
    return ["--pace", "100e6"] if stage.is_cpu else []


def engine_killed(stage: Stage, facts: dict[str, Any]) -> str:
    """Item 10: SIGKILL of E, with copies running and a mark that never comes."""
    watcher = stage.copier()
    at_start = _free(watcher)
    with stage.serve(_geometry(stage), 16, *_slow(stage)) as served:
        pattern = os.urandom(served.geometry.payload)
        served.engine.ask("show", 10, block=1, data=pattern)
        outcome, generation = served.store(1, 0)
        if outcome is not Outcome.OK:
            raise Failed(f"a store ended as {outcome.name}")
        spare = stage.worker(*_slow(stage))
        tickets = [served.plan(Kind.STORE, [n], [n], [served.generation()]) for n in range(2, 12)]
        stuck = served.plan(Kind.STORE, [12], [12], [served.generation()])
        before = _free(watcher)
        has_event = _keep_busy(stage, served, watcher, facts)
        # Those that copy wait for no mark: the stream will not come to any more of them.
        served.play(("store", stuck), ("blind", True), ("store", *tickets))
        time.sleep(0.002)
        running = sum(stage.daemon.known(ticket) is None for ticket in tickets)
        killed = time.monotonic()
        stage.strike_engine()
        if has_event:
            facts["event_of_the_dead"] = _ask_event(watcher)
        after_kill = _free(watcher)
        how = served.worker.wait(REAPED_S + 3.0)
        reaped_s = time.monotonic() - killed
        stage.drop_engine()
        engine_s = time.monotonic() - killed
        after_reap = _free(watcher)
        facts |= {
            "stores_running_at_the_kill": running,
            "worker_ended": how,
            "reaped_s": round(reaped_s, 3),
            "free_bytes": {
                "at_start": at_start, "serving": before, "engine_killed": after_kill, "worker_reaped": after_reap
            },
            "engine_gone_s": round(engine_s, 3),
            "store_behind_the_mark": _name_of(stage.daemon.known(stuck)),
        }  # fmt: skip
        if not running:
            raise Void("the stores were over before the engine was killed: nothing is shown")
        if how != "code 0":
            raise Failed(f"the worker of a killed engine ended with {how}, not with code 0")
        if reaped_s >= REAPED_S:
            raise Failed(f"the worker of a killed engine was reaped {reaped_s:.2f} s after the kill")
        said = stage.daemon.known(stuck)
        if said is Outcome.OK:
            raise Failed("a store whose mark never came said OK")
        if not spare.is_alive:
            raise Failed("the ready spare ended with the other engine's worker")
        _fresh_engine(stage, served, pattern, generation)
    stage.end_copiers()
    is_known = not stage.is_cpu and min(before, after_reap) >= 0
    freed = f"; {(after_reap - before) >> 20} MiB of the GPU are free again" if is_known else ""
    return (
        f"{running} copies running: worker ended ({how}) {reaped_s:.2f} s after the kill{freed};"
        " a spare served the next engine"
    )


def _fresh_engine(stage: Stage, served: Served, pattern: bytes, generation: int) -> None:
    """The next engine, on the spare that stood by: what was stored is there."""
    geometry = served.geometry
    engine = served.engine = stage.engine()
    state = engine.ask(
        "attach", 30, name="check-next", layers=geometry.layers, blocks=geometry.blocks, run=geometry.run, lead=0
    )
    if not state["attached"]:
        raise Failed(f"the next engine is not served: {'; '.join(state['notes'])}")
    word = served.load([3], [0], [generation])
    if not word["ok"] or engine.ask("see", 10, block=3) != pattern:
        raise Failed(f"what the killed engine had stored did not come back to the next one: {word}")


def _name_of(outcome: Outcome | None) -> str:
    return "nothing was said of it" if outcome is None else outcome.name


def _free(watcher: Child) -> int:
    """Free bytes of the GPU; -1 if the watcher cannot tell, as after an error that a dead engine left it."""
    try:
        return int(watcher.ask("memory_free", 5))
    except ChildError:
        return -1


def _keep_busy(stage: Stage, served: Served, watcher: Child, facts: dict[str, Any]) -> bool:
    """Make E's stream busy for longer than E will live; whether the watcher holds an event that lies behind that."""
    if stage.engine_kind != "torch":
        served.play(("spin", NEVER_OF_COPIES_MS))
        return False
    try:
        watcher.ask("warm_torch", 30)
        made = served.engine.ask("event", 10, spin_ms=NEVER_MS)
        watcher.ask("open_event", 10, handle=made["handle"])
    except ChildError as error:
        facts["event_of_the_dead"] = f"no event: {error}"
        served.play(("spin", NEVER_MS))
        return False
    return True


def _ask_event(watcher: Child) -> str:
    """What a dead process's event says; nothing is built on it."""
    try:
        return "happened" if watcher.ask("ask_event", 10, seconds=0.0)["happened"] else "has not happened"
    except ChildError as error:
        return str(error)


def worker_killed(stage: Stage, facts: dict[str, Any]) -> str:
    """Item 11: SIGKILL of W while it copies both ways."""
    with stage.serve(_geometry(stage), 16, *_slow(stage)) as served:
        kept = {slot: served.stamp(slot, OLD + slot) for slot in range(2)}
        loads = {block: served.stamp(block, NEW) for block in range(2, 8)}  # into block n from slot n
        stores = {block: served.generation() for block in range(8, 14)}  # from block n into slot n
        load = served.plan(Kind.LOAD, list(loads), list(loads), list(loads.values()))
        store = served.plan(Kind.STORE, list(stores), list(stores), list(stores.values()))
        served.play(("store", store), ("load", (load, list(loads))))
        time.sleep(0.002)
        if not served.worker.kill():
            raise Failed("the worker does not die of SIGKILL")
        torn = [slot for slot, generation in stores.items() if not served.is_whole(slot, generation)]
        facts["slots_torn"] = torn
        word = served.play(("await", load, 10.0))[0]
        facts["load_word"] = word["outcome"]
        if not torn or word["ok"]:
            raise Void("the copies were over before the worker was killed: nothing is shown")
        if word["outcome"] != "WORKER_DIED" or sorted(word["failed"]) != sorted(loads):
            raise Failed(f"the load of a killed worker ended as {word}")
        _nothing_lands(served, list(loads))
        _next_worker(stage, served, kept, torn[0], stores[torn[0]])
    return (
        f"killed in the middle of a load and a store ({len(torn)} of {len(stores)} slots torn, and refused later):"
        f" no byte changed in {QUIET_S:g} s after its reap; the next worker serves"
    )


def _nothing_lands(served: Served, blocks: list[int]) -> None:
    """After the proof of a death the blocks are the engine's: what it writes there stays."""
    served.play(*(("fill", block, LATE) for block in blocks), ("finish",))
    until = time.monotonic() + QUIET_S
    while time.monotonic() < until:
        if not all(served.play(*(("holds", block, LATE) for block in blocks))):
            raise Failed("a byte of a dead worker's load landed after its death was known")


def _next_worker(stage: Stage, served: Served, kept: dict[int, int], torn: int, generation: int) -> None:
    served.worker = stage.worker(*_slow(stage))
    until = time.monotonic() + REATTACH_S
    while not (state := served.engine.ask("state", 10))["attached"]:
        if time.monotonic() > until:
            raise Failed(f"the engine did not attach again: {'; '.join(state['notes'])}")
        time.sleep(0.1)
    for slot, its_generation in kept.items():
        word = served.load([12 + slot], [slot], [its_generation])
        if not word["ok"] or not served.play(("holds", 12 + slot, OLD + slot))[0]:
            raise Failed(f"a finished slot did not come back after the worker's death: {word}")
    word = served.load([15], [torn], [generation])
    if word["outcome"] != "TORN":
        raise Failed(f"a slot that was being stored at the worker's death loads as {word['outcome']}")
    if not served.engine.ask("kernel_works", 20):
        raise Failed("the engine's next kernel gave a wrong answer")
