"""The drill's findings, its verdict and its table. Pure: values in, text out.

Musts make the drill fail: no failed request, no wrong answer, nothing left or held at the end, no growth of what
kvferry holds, no complaint; and something was asked at all. Goals are reported: they are times, which a crowded machine
misses, what the engine's own memory does, and workers that were killed while nobody got a processor in time. A strict
drill fails by them too.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from .census import Growth

STALL_GOAL_S = 2.0
REUSE_GOAL_S = 5.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault and what came of it. Moments are seconds on the monotonic clock."""

    kind: str
    is_return: bool
    began: float
    back: float  # from when all should be well
    reused_s: float | None  # from `back` to the next load that began after it; None: not waited for, or not seen
    waited: bool = True
    settled: float = 0.0  # when the drill went on
    found_s: float | None = None  # from `back` to the first hit of a lookup that was asked after it


@dataclass(frozen=True, slots=True)
class Wait:
    """A time without a token that was long enough to be noted, and what went on in it."""

    seconds: float
    what: str
    during: str  # kind of the fault, or "-"
    since: float = 0.0  # seconds on the monotonic clock


@dataclass(slots=True)
class Findings:
    """Everything the drill saw."""

    seconds: float = 0.0
    tp_size: int = 1
    seed: int = 0
    asked: int = 0
    answered: int = 0
    cut: int = 0
    cached_share: float = 0.0
    loads: int = 0
    loads_failed: int = 0
    loaded_blocks: int = 0
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)  # of one request
    silences: list[Wait] = field(default_factory=list)  # of all requests
    starved_s: float = 0.0  # the longest that a thread which only sleeps 20 ms slept beyond it
    cpu_pressure: float = 0.0  # the share of time in which somebody wanted a processor and had none
    baseline_wait_s: float = 0.0  # longest without kvferry and without faults
    growth: list[Growth] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    starved: list[str] = field(default_factory=list)  # workers killed that had got no processor in time
    left: list[str] = field(default_factory=list)
    at_rest: dict[str, int] = field(default_factory=dict)  # gauges that should be 0 at the end


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the verdict."""

    name: str
    found: str
    wanted: str
    ok: bool
    is_must: bool = False


def verdict(found: Findings) -> list[Line]:
    """Musts and goals, each met or not."""
    longest = max((wait.seconds for wait in found.waits), default=0.0)
    silence = max((wait.seconds for wait in found.silences), default=0.0)
    returns = [fault for fault in found.faults if fault.is_return and fault.waited]
    reused = [fault.reused_s for fault in returns]
    slowest = max((seconds for seconds in reused if seconds is not None), default=0.0)
    unused = sum(seconds is None for seconds in reused)
    leaks = [one for one in found.growth if one.is_leak]
    engines = [one for one in leaks if one.measure == "private_mib" and one.subject.startswith("engine")]
    answered = f"{found.answered} of {found.asked} ({found.cut} cut)"
    gauges = {name: value for name, value in found.at_rest.items() if value}
    return [
        Line("requests answered", answered, "> 0", found.answered > 0, is_must=True),
        Line("failed requests", str(len(found.failed)), "0", not found.failed, is_must=True),
        Line("wrong answers", str(len(found.wrong)), "0", not found.wrong, is_must=True),
        Line("loads from kvferry", f"{found.loads} ({found.loaded_blocks} blocks)", "> 0", found.loads > 0),
        Line("longest wait of a request", f"{longest:.2f} s", f"<= {STALL_GOAL_S:g} s", longest <= STALL_GOAL_S),
        Line("longest silence of the engine", f"{silence:.2f} s", f"<= {STALL_GOAL_S:g} s", silence <= STALL_GOAL_S),
        Line(
            "cache used again after a return",
            f"{slowest:.2f} s" + (f", {unused} of {len(returns)} not seen" if unused else ""),
            f"<= {REUSE_GOAL_S:g} s",
            slowest <= REUSE_GOAL_S and not unused,
        ),
        _grown("growth", [one for one in leaks if one not in engines], is_must=True),
        _grown("growth of the engine's memory", engines, is_must=False),
        Line("workers killed for want of a processor", str(len(found.starved)), "0", not found.starved),
        Line("at rest, not zero", str(gauges or "none"), "none", not gauges, is_must=True),
        Line("left behind", ", ".join(found.left) or "nothing", "nothing", not found.left, is_must=True),
        Line("other complaints", str(len(found.complaints)), "0", not found.complaints, is_must=True),
    ]


def _grown(name: str, leaks: Sequence[Growth], *, is_must: bool) -> Line:
    said = ", ".join(f"{one.subject}: {one.measure} {one.first:g} to {one.last:g}" for one in leaks)
    return Line(name, said or "none", "none", not leaks, is_must)


def passes(lines: Sequence[Line], *, strict: bool = False) -> bool:
    """Whether every must is met; if strict, every goal too."""
    return all(line.ok for line in lines if line.is_must or strict)


def table(found: Findings) -> str:
    """For a person."""
    out = [
        f"\nchaos drill: {found.seconds:.0f} s, TP {found.tp_size}, seed {found.seed}, {len(found.faults)} faults, "
        f"{found.cached_share:.0%} of prompt tokens cached, {found.loads_failed} loads failed and were computed",
        f"the machine: {found.cpu_pressure:.0%} of the time somebody wanted a processor and had none; a thread that"
        f" sleeps 20 ms was woken up to {found.starved_s:.2f} s late",
        "",
        f"{'fault':36}{'times':>6}{'hits again s':>14}{'used again s':>14}{'longest':>9}{'longest wait s':>16}",
    ]
    counts = Counter(fault.kind for fault in found.faults)
    for kind in sorted(counts):
        reused = [f.reused_s for f in found.faults if f.kind == kind and f.reused_s is not None]
        mid, most = (f"{median(reused):.2f}", f"{max(reused):.2f}") if reused else ("-", "-")
        hits = [f.found_s for f in found.faults if f.kind == kind and f.found_s is not None]
        hit = f"{median(hits):.2f}" if hits else "-"
        wait = max((wait.seconds for wait in found.waits if wait.during == kind), default=0.0)
        out.append(f"{kind:36}{counts[kind]:6}{hit:>14}{mid:>14}{most:>9}{f'{wait:.2f}' if wait else 'short':>16}")
    quiet = max((wait.seconds for wait in found.waits if wait.during == "-"), default=0.0)
    out.append(f"{'none of them going on':36}{'':6}{'':28}{'':9}{f'{quiet:.2f}' if quiet else 'short':>16}")
    out.append(f"{'an engine alone, before':36}{'':6}{'':28}{'':9}{found.baseline_wait_s:16.2f}")
    out += ["(medians; longest of used again)", "", f"{'':36}{'found':>34}{'wanted':>12}"]
    for line in verdict(found):
        word = "" if line.ok else "  FAILED" if line.is_must else "  goal not met"
        out.append(f"{line.name:36}{line.found:>34}{line.wanted:>12}{word}")
    out += ["", "held, first and last third of a life:"]
    for one in found.growth:
        grown = "  GROWS" if one.is_leak else ""
        out.append(
            f"  {one.subject:30}{one.measure:14}{one.samples:4} samples{one.first:10.1f} {one.last:10.1f}{grown}"
        )
    said = {"failed": found.failed, "wrong": found.wrong, "complaints": found.complaints, "starved": found.starved}
    for name, texts in said.items():
        out += [f"{name}: {text}" for text in texts[:10]]
    for wait in sorted(found.waits, key=lambda one: -one.seconds)[:8]:
        out.append(f"wait {wait.seconds:6.2f} s: {wait.what} [{wait.during}]")
    return "\n".join(out)


def as_json(found: Findings) -> dict[str, Any]:
    """All of it, with the verdict."""
    lines = verdict(found)
    return {"passes": passes(lines), "verdict": [asdict(line) for line in lines], **asdict(found)}
