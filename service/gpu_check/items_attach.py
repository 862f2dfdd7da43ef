"""Items 1, 2 and 9: memory lent and mapped, marks seen, memory of other kinds."""

import os
import time
from typing import Any, Final

from kvferry.gpu_check.results import Failed, Skipped, Void
from kvferry.gpu_check.stage import LEAD, Geometry, Served, Stage
from kvferry.gpu_check.talk import ChildError
from kvferry.proto.outcome import Kind, Outcome

SMALL: Final = Geometry(layers=4, blocks=16, run=64 << 10)
SPIN_MS: Final = 50.0
EARLY_MS: Final = 3.0  # that a stream may need to be found idle behind its mark
EARLY_OF_A_THREAD_MS: Final = 25.0  # the same for a thread, on a machine with better things to do
FORGED: Final = "GPU-00000000-0000-0000-0000-000000000000"


def attach(stage: Stage, facts: dict[str, Any]) -> str:
    """Item 1: W maps what E lends, at the right offset, and both see each other's bytes."""
    began = time.monotonic()
    with stage.serve(SMALL, 4) as served:
        state = served.state
        facts |= {
            "start_s": round(time.monotonic() - began, 2),
            "handle": state["handle_kind"],
            "base_offset": state["base_offset"],
            "mark_mode": state["mark_mode"],
            "notes": state["notes"],
            "worker": served.worker.device,
            "engine": served.engine.ask("about", 5),
        }
        if not stage.is_cpu and state["handle_kind"] != "cuda_ipc":
            raise Failed(f"E lent its memory as {state['handle_kind']}, not as cuda_ipc")
        if state["base_offset"] < LEAD:
            raise Failed(f"the handle begins {state['base_offset']} bytes into its allocation, E's memory {LEAD}")
        both_ways(served)
    if stage.is_cpu:
        return f"{state['handle_kind']} at offset {state['base_offset']}; bytes seen both ways"
    _renumbered(stage, state["allocation"])
    facts["forged"] = _forged(stage)
    return f"cuda_ipc at offset {state['base_offset']}; bytes seen both ways; GPU by UUID; another one refused"


def both_ways(served: Served) -> None:
    """E's bytes arrive in the pool, the pool's bytes in E. Failed otherwise."""
    pattern = os.urandom(served.geometry.payload)
    served.engine.ask("show", 10, block=5, data=pattern)
    outcome, _ = served.store(5, 2)
    if outcome is not Outcome.OK:
        raise Failed(f"a store ended as {outcome.name}")
    if served.payload(2).tobytes() != pattern:
        raise Failed("a store said OK, and the slot holds other bytes than the engine's block")
    pattern = os.urandom(served.geometry.payload)
    word = served.load([9], [3], [served.stamp(3, pattern)])
    if not word["ok"]:
        raise Failed(f"a load ended as {word['outcome']}")
    if served.engine.ask("see", 10, block=9) != pattern:
        raise Failed("a load said OK, and the engine's block holds other bytes than the slot")


def _renumbered(stage: Stage, uuid: str) -> None:
    """W sees its GPU under another number, or as the only one: only the UUID counts."""
    with stage.serve(SMALL, 4, env={"CUDA_VISIBLE_DEVICES": uuid}) as served:
        both_ways(served)


def _forged(stage: Stage) -> str:
    try:
        with stage.serve(SMALL, 4, device=FORGED):
            raise Failed("W took memory of a GPU that is not its own")
    except Failed as error:
        if "handle.other_gpu" not in str(error):
            raise
        stage.leave()
        return str(error)


def marks(stage: Stage, facts: dict[str, Any]) -> str:
    """Item 2: a mark is seen when the engine's stream has come there, and not before; how events would do."""
    with stage.serve(SMALL, 4) as served:
        mode = facts["mode"] = served.state["mark_mode"]
        waits = []
        for _ in range(5):
            ticket = served.plan(Kind.LOAD, [1], [1], [served.stamp(1, 7)])
            before, _, _, word, after, _, idle = served.play(
                *(("now",), ("spin", SPIN_MS), ("load", (ticket, [1])), ("await", ticket, 5.0), ("now",)),
                *(("finish",), ("now",)),
            )
            if not word["ok"]:
                raise Failed(f"a load behind a busy stream ended as {word['outcome']}")
            left_ms = (idle - after) / 1e6
            if left_ms > (EARLY_OF_A_THREAD_MS if stage.is_cpu else EARLY_MS):
                raise Failed(f"a load ended {left_ms:.1f} ms before the stream had come to its mark (mode {mode})")
            waits.append(((after - before) / 1e6, word["wait_us"] / 1e3))
        facts["waited_ms"] = [{"engine": round(e, 2), "worker": round(w, 2)} for e, w in waits]
        early = min(engine for engine, _ in waits)
        if early < SPIN_MS / 10:
            raise Void(f"the stream was busy for {early:.1f} ms only, not for {SPIN_MS:g}: nothing is shown")
        late = max(engine for engine, _ in waits) - SPIN_MS
        facts["late_ms"] = round(late, 2)
        facts["null_stream"] = served.engine.ask("mark_on_null_stream", 10)
        facts["host_mode"] = "not asked"
        facts["event"] = _event(stage, served)
    if mode == "word" and not stage.is_cpu:
        with stage.serve(SMALL, 4, marks="host") as served:
            both_ways(served)
            facts["host_mode"] = "works too"
    event = facts["event"]
    said = (
        event if isinstance(event, str) else f"seen {event['late_ms']:.2f} ms late, {event['query_us']:.1f} us a query"
    )
    return f"mode {mode}: nothing before the spin's end, at most {late:.1f} ms after it; event: {said}"


def _event(stage: Stage, served: Served) -> Any:
    """What an interprocess event would do; only told."""
    if stage.engine_kind != "torch":
        return "skipped: only on a GPU with torch"
    try:
        copier = stage.copier()
        copier.ask("warm_torch", 30)
        made = served.engine.ask("event", 10, spin_ms=SPIN_MS)
        open_us = copier.ask("open_event", 5, handle=made["handle"])
        seen = copier.ask("ask_event", 5, seconds=2.0)
    except (ChildError, TimeoutError) as error:
        return f"does not work here: {error}"
    finally:
        stage.end_copiers()
    if not seen["happened"]:
        return "does not work here: it was never seen to happen"
    late_ms = (seen["ended_ns"] - made["busy_since_ns"]) / 1e6 - SPIN_MS
    return {
        "late_ms": round(late_ms, 2),
        "query_us": seen["query_us"],
        "open_us": round(open_us, 1),
        "record_us": made["record_us"],
    }


def vmm(stage: Stage, facts: dict[str, Any]) -> str:
    """Item 9: memory of cuMemCreate goes over a descriptor; without the bit for it, it is refused by name."""
    if stage.is_cpu:
        raise Skipped("only on a GPU")
    with stage.serve(SMALL, 4, kind="vmm") as served:
        facts["handle"] = served.state["handle_kind"]
        if facts["handle"] != "cuda_vmm_fd":
            raise Failed(f"memory of cuMemCreate was lent as {facts['handle']}")
        both_ways(served)
    try:
        with stage.serve(SMALL, 4, kind="closed"):
            raise Failed("memory that can be shown to nobody was lent")
    except ChildError as error:
        facts["refusal"] = str(error)
        if error.code != "memory.not_exportable":
            raise
    stage.leave()
    facts["kernel_after_refusals"] = stage.engine().ask("kernel_after_refusals", 20)
    if facts["kernel_after_refusals"] == "fails":
        raise Failed("after calls that the driver refused, the engine's next kernel fails")
    return "attached, copied, detached over a descriptor; without the bit: refused, with the setting's name"
