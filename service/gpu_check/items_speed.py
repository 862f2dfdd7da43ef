"""Items 5, 6, 7, 8 and 12: what copies, ends and pools cost, and what copies cost the engine. Numbers are always told.

They are judged on a GPU alone, and there only if `--no-speed` was not given.
"""

from typing import Any, Final

import numpy as np

from kvferry.gpu_check.results import Failed, Skipped
from kvferry.gpu_check.stage import LEAD, Stage
from kvferry.gpu_check.talk import Child
from kvferry.net.paths import SHM
from kvferry.proto.outcome import Kind
from kvferry.supervise.memory import read_machine

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
RUNS: Final = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 512 * KIB, MIB, 4 * MIB)
RATIO_LARGE: Final = 0.9  # of one plain copy, from 512 KiB a run
RATIO_64K: Final = 0.8
MAX_END_US: Final = 1000.0
MAX_PIN_S_PER_GIB: Final = 0.5
MAX_SLOWDOWN: Final = 1.10


def bandwidth(stage: Stage, facts: dict[str, Any]) -> str:
    """Item 5: runs of each size by each path, against one plain copy of the same bytes."""
    nbytes = 16 * MIB if stage.is_small else 128 * MIB if stage.is_fast else 512 * MIB
    runs = RUNS[::3] if stage.is_small else RUNS
    ways = {"auto": 0} if stage.is_cpu else {"batch": 0, "batch, flag 1": 1, "loop": 0}
    stage.make_pool(nbytes)
    rates: dict[str, dict[str, Any]] = {}
    for way, flags in ways.items():
        copier = _copier(stage, nbytes, copies=way.split(",")[0], copy_flags=flags)
        if "plain" not in facts:
            facts["plain"] = _rounded(copier.ask("plain", 60, nbytes=nbytes))
        rates[way] = {str(run): _rounded(copier.ask("rates", 60, run=run, nbytes=nbytes)) for run in runs}
        facts["rates"] = rates
        facts.setdefault("path_in_the_end", {})[way] = copier.ask("describe", 5).get("copies", "cpu")
        stage.end_copiers()
    first = next(iter(rates.values()))
    ratios = facts["ratios"] = {
        run: {kind: round(rate[kind] / facts["plain"][kind], 3) for kind in ("store", "load")}
        for run, rate in first.items()
    }
    facts["not_measured"] = "cuMemcpy2DAsync: no part of kvferry uses it"
    stage.leave()
    if stage.judges_speed:
        low = [
            f"{int(run) // KIB} KiB {kind} {ratio}"
            for run, both in ratios.items()
            for kind, ratio in both.items()
            if (int(run) >= 512 * KIB and ratio < RATIO_LARGE) or (int(run) == 64 * KIB and ratio < RATIO_64K)
        ]
        if low:
            raise Failed(f"of one plain copy's rate only: {', '.join(low)}")
    told = ", ".join(f"{int(run) // KIB} KiB {both['store']}/{both['load']}" for run, both in ratios.items())
    plain = facts["plain"]
    return f"plain copy {plain['store']}/{plain['load']} GB/s (store/load); of it: {told}"


def ends(stage: Stage, facts: dict[str, Any]) -> str:
    """Item 6: how soon the end of a copy of 1 MiB is known, by the way in use and by two others."""
    stage.make_pool(4 * MIB)
    copier = _copier(stage, 2 * MIB)
    found = facts["ends"] = copier.ask("ends", 30, count=50 if stage.is_small else 300, nbytes=MIB)
    stage.end_copiers()
    stage.leave()
    waiter = found["waiter"]
    if stage.judges_speed and waiter["p99_us"] >= MAX_END_US:
        raise Failed(f"the end of 1 MiB is known after {waiter['p99_us']} us at p99; the limit is {MAX_END_US:g}")
    told = [f"{way}: p50 {e['p50_us']}, p99 {e['p99_us']}, own time {e['cpu_us']} us" for way, e in found.items()]
    return "; ".join(told)


def pools(stage: Stage, facts: dict[str, Any]) -> str:
    """Item 7: making a pool, pinning it once, again, and from a second process beside the first."""
    machine = read_machine()
    free = min(n for n in (machine.shm_free, machine.available, machine.cgroup_free) if n is not None)
    wanted = 64 * MIB if stage.is_small else 2 * GIB if stage.is_fast else 8 * GIB
    nbytes = min(wanted, free // 3 // MIB * MIB)
    if nbytes < 64 * MIB:
        raise Skipped(f"{free // MIB} MiB of shared memory are free: enlarge {SHM}")
    gib = nbytes / GIB
    copier = stage.copier()
    fills = facts["fill_s_per_gib"] = {}
    for threads, huge in ((1, False), (4, False), (4, True)):
        path = str(stage.run_dir.pool(1))
        times = copier.ask("fill_times", 90, path=path, nbytes=nbytes, threads=threads, huge=huge)
        name = f"{threads} thread{'s' * (threads > 1)}{', huge pages advised' if huge else ''}"
        fills[name] = {key: round(value / gib, 3) for key, value in times.items() if key.endswith("_s")}
    stage.make_pool(nbytes)
    second = stage.copier()
    pins = {
        name: {key: round(value / gib, 4) for key, value in one.ask("pin_times", 90, path=_path(stage)).items()}
        for name, one in (("first", copier), ("second", second))
    }
    facts |= {"pool_bytes": nbytes, "pin_s_per_gib": pins}
    stage.end_copiers()
    stage.leave()
    worst = max(pins[name]["register_s"] for name in pins)
    if stage.judges_speed and worst >= MAX_PIN_S_PER_GIB:
        raise Failed(f"pinning took {worst} s for each GiB; the limit is {MAX_PIN_S_PER_GIB:g}")
    return (
        f"{gib:.2f} GiB, s/GiB: filled {fills['1 thread']['fill_s']} by 1 thread, {fills['4 threads']['fill_s']} by 4;"
        f" pinned {pins['first']['register_s']}, again {pins['first']['register_again_s']}, by a second process"
        f" {pins['second']['register_s']}"
    )


def interference(stage: Stage, facts: dict[str, Any]) -> str:
    """Item 8: what copies both ways cost an engine that computes."""
    if stage.is_cpu:
        raise Skipped("only on a GPU")
    if stage.engine_kind != "torch":
        raise Skipped("only with torch: the engine must run kernels")
    seconds, side = (0.5, 128) if stage.is_small else (3.0 if stage.is_fast else 7.0, 8192)
    nbytes = (32 if stage.is_small else 512) * MIB
    stage.make_pool(nbytes)
    copier = _copier(stage, nbytes)
    engine = stage.engine()
    steps: dict[str, dict[str, float]] = {}
    for name, run in (("idle", 0), ("copies of 1 MiB", MIB), ("copies of 64 KiB", 64 * KIB)):
        if run:
            copier.tell("steady", seconds=seconds + 1.0, run=run, nbytes=nbytes // 2, kinds=[Kind.STORE, Kind.LOAD])
        p50, p99 = np.percentile(engine.ask("matmul", seconds + 30, seconds=seconds, side=side), [50, 99]).tolist()
        steps[name] = {"p50_ms": round(p50, 3), "p99_ms": round(p99, 3)}
        if run:
            steps[name]["copied_gb_s"] = round(copier.answer(seconds + 30), 2)
    facts |= {"steps": steps, "not_measured": "a gather kernel in the worker: kvferry has none"}
    stage.end_copiers()
    stage.leave()
    slow = steps["copies of 1 MiB"]["p50_ms"] / steps["idle"]["p50_ms"]
    facts["slowdown"] = round(slow, 3)
    if stage.judges_speed and slow > MAX_SLOWDOWN:
        raise Failed(f"copies make the engine's step {slow:.3f} times as long at p50; the limit is {MAX_SLOWDOWN}")
    return "; ".join(f"{name}: p50 {s['p50_ms']}, p99 {s['p99_ms']} ms" for name, s in steps.items())


def storm(stage: Stage, facts: dict[str, Any]) -> str:
    """Item 12: many full batches, which some drivers do not survive."""
    run = 1 * KIB if stage.is_small else 8 * KIB
    calls, seconds = (16, 5.0) if stage.is_small else (2000, 11.0)
    nbytes = 5 * 4096 * run
    stage.make_pool(nbytes)
    copier = _copier(stage, nbytes)
    facts |= copier.ask("storm", seconds + 10, calls=calls, run=run, seconds=seconds)
    stage.end_copiers()
    stage.leave()
    return f"{facts['calls']} calls of {facts['descriptors']} copies of {run // KIB} KiB: no error, no hang"


def _copier(stage: Stage, nbytes: int, **options: Any) -> Child:
    """A copier with memory of the engine's and the stage's pool."""
    engine = stage.engine()
    engine.ask("detach", 10)
    lent = engine.ask("lend", 20, nbytes=nbytes, lead=LEAD)
    copier = stage.copier(**options)
    copier.ask("lend", 10, handle=lent["handle"], pid=engine.ask("about", 5)["pid"], fds=lent["fds"])
    copier.ask("use_pool", 60, path=_path(stage))
    return copier


def _path(stage: Stage) -> str:
    return str(stage.run_dir.pool(0))


def _rounded(rates: dict[str, float]) -> dict[str, float]:
    return {name: round(rate, 3) for name, rate in rates.items()}
