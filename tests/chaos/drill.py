"""The drill itself: the story from the baseline to the verdict.

    an engine alone answers all talks ──▶ sidecar + engine + users ──▶ cycles ──▶ everybody ends ──▶ findings

    a cycle: a random pause · a fault · until the cache is used again (mostly: now and then the next fault
             strikes earlier) · a census

Whether the cache is used again is read from the connector's trace: a load that began after the return, and
ended well.
"""

import json
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vllm_lab as lab
from vllm_model import ModelShape, write_model

from . import census
from .crowd import Crowd, Desk, Known, learn
from .engine import Engine, Stall
from .faults import KINDS, Bag, Kind
from .report import Fault, Findings, Wait
from .sidecar import Sidecar, SidecarError
from .talks import make_talks

SHAPE = ModelShape(layers=4)
BLOCK, NUM_BLOCKS = 32, 100  # 3168 tokens of cache: a quarter of what the users talk about
UNPROVOKED_S = 3.0  # so long after a stop its consequences may come
REUSE_S = 20.0  # how long a cycle waits for the cache to be used again
LOOK_S = 0.02
LINE_S = 0.5  # at most, from a deed of the sidecar to its line here
# Short, so that a stopped worker is replaced within the goal; a copy here takes milliseconds.
DEADLINE_S, GRACE_S = 1.0, 0.5
FLAGS = ("--job-deadline", f"{DEADLINE_S:g}s", "--kill-grace", f"{GRACE_S:g}s")
REST_S = 15.0  # until then all is at rest: longer than a lease
GAUGES = ("stores", "loads", "fences", "leases", "writing", "quarantined", "pinned")


@dataclass(frozen=True, slots=True)
class Plan:
    """What one run is made of."""

    minutes: float = 10.0
    tp_size: int = 1
    seed: int = 0
    users: int = 4
    talks: int = 20
    turns: tuple[int, ...] = (400, 60, 60)  # tokens that each turn adds
    answer_tokens: int = 24
    host_memory: str = "24MiB"  # holds about half of what the users say: some comes back, some was evicted
    kinds: tuple[Kind, ...] = KINDS
    folder: Path | None = None  # keeps logs there; a temporary one otherwise
    quiet: bool = False


class Drill:
    """One run. It is the `Scene` that faults act on."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.rng = random.Random(plan.seed)
        self.found = Findings(tp_size=plan.tp_size, seed=plan.seed)
        self._folder = folder
        self._started = time.monotonic()
        self._desk = Desk()
        self._engines: list[Engine] = []
        self._samples: list[census.Sample] = []
        self._trace = _Tail(folder / "trace.jsonl")
        # Moments: when a lookup was asked, and when it was answered with hits; when its load had ended well.
        self._hit: list[tuple[float, float]] = []
        self._used: list[tuple[float, float]] = []
        self._late: list[tuple[float, float]] = []  # when a thread woke up, and how many seconds too late
        self._over = threading.Event()
        self.sidecar = Sidecar(folder / "run", plan.tp_size, plan.host_memory, folder / "sidecar.log", *FLAGS)

    # ---- the story -----------------------------------------------------------------------------------

    def run(self) -> Findings:
        """From beginning to end."""
        model = write_model(self._folder / "model", SHAPE)
        known = self._baseline(model)
        with ExitStack() as stack:
            stack.callback(self._stop_engines)
            stack.callback(lambda: self.found.left.extend(self.sidecar.close()))
            threading.Thread(target=self._listen, name="trace", daemon=True).start()
            stack.callback(self._over.set)
            self.sidecar.start()
            self._say("sidecar is ready; starting the engine beside it")
            self._put_engine()
            crowd = Crowd(self._desk, known, self.plan.users, self.plan.seed)
            crowd.start()
            self.pause(2.0)
            began, waited_s = time.monotonic(), census.cpu_waited_s()
            try:
                self._cycles(began + self.plan.minutes * 60)
            except SidecarError as error:
                self.complain(f"it does not come up any more: {error}")
            finally:
                self.found.seconds = time.monotonic() - began
                self.found.cpu_pressure = (census.cpu_waited_s() - waited_s) / self.found.seconds
                crowd.close()
                self._take(crowd)
            self.pause(1.0)
            self._look_at_rest()
            self._look_for_unprovoked_kills()
        return self.found

    def _baseline(self, model: Path) -> list[Known]:
        self._say("an engine alone answers everything once")
        engine = self._start(model, "alone", None)
        try:
            engine.wait_ready()
            engine.warm_up(self.plan.turns[0])
            plan = self.plan
            talks = make_talks(plan.talks, plan.seed, plan.turns, plan.answer_tokens)
            known = learn(engine, talks, plan.users)
            self.found.baseline_wait_s = max((stall.seconds for stall in engine.stalls), default=0.0)
        finally:
            engine.stop()
        self._say(f"{len(known)} talks of {plan.talks} have clear answers, {len(plan.turns)} turns each")
        assert known, "no talk has a clear answer: choose another seed"
        return known

    def _cycles(self, until: float) -> None:
        bag = Bag(self.plan.kinds, self.rng)
        while (now := time.monotonic()) < until:
            if not self._engines[-1].is_running:
                self.found.failed.append("the engine ended by itself\n" + self._engines[-1].tail())
                return
            self._cycle(bag.draw(now))

    def _cycle(self, kind: Kind) -> None:
        self.pause(self.rng.uniform(0.3, 2.0))
        if not self.sidecar.is_up:
            self.complain("the sidecar ended by itself: " + self.sidecar.last_lines(3))
            self.sidecar.start()
        began = time.monotonic()
        try:
            back = kind.inflict(self)
        except SidecarError as error:
            self.complain(f"{kind.name}: {error}")
            self.sidecar.kill_tree()
            back = self.sidecar.start()
        if back is None:
            return
        waits = self.rng.random() < 0.85
        reused = self._wait_used(back) if waits else None
        found = _first(self._hit, back) if waits else None
        fault = Fault(kind.name, kind.is_return, began, back, reused, waits, time.monotonic(), found)
        self.found.faults.append(fault)
        seen = "-" if not waits else "not seen" if reused is None else f"{reused:.2f} s"
        self._say(f"{len(self.found.faults):3} {kind.name}: {back - began:.2f} s, used again: {seen}")
        if reused is not None:
            self._sample()

    # ---- what faults may do --------------------------------------------------------------------------

    def pause(self, seconds: float) -> None:
        """Let the load go on."""
        time.sleep(seconds)

    def restart_engine(self) -> float:
        """SIGKILL it and start another; the moment it is ready."""
        self._desk.put(None)
        self._engines[-1].kill()
        return self._put_engine()

    def complain(self, text: str) -> None:
        """For the report."""
        self.found.complaints.append(text)
        self._say(f"complaint: {text}")

    # ---- helpers -------------------------------------------------------------------------------------

    def _start(self, model: Path, name: str, kv_transfer: dict[str, Any] | None) -> Engine:
        return Engine(
            self._folder,
            model,
            name=name,
            kv_transfer=kv_transfer,
            tp_size=self.plan.tp_size,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK,
        )

    def _put_engine(self) -> float:
        given = lab.connector(self._folder / "run", trace=str(self._trace.path))
        engine = self._start(self._folder / "model", f"engine-{len(self._engines) + 1}", given)
        self._engines.append(engine)
        engine.wait_ready()
        engine.warm_up(self.plan.turns[0])
        self._desk.put(engine)
        return time.monotonic()

    def _stop_engines(self) -> None:
        for engine in self._engines:
            engine.stop()

    def _listen(self) -> None:
        """A thread of its own: when a line came has to be known to a hundredth of a second."""
        asleep = time.monotonic()
        while not self._over.wait(LOOK_S):
            now = time.monotonic()
            self._late.append((now, now - asleep - LOOK_S))
            self.found.starved_s = max(self.found.starved_s, now - asleep - LOOK_S)
            asleep = now
            for line in self._trace.lines():
                asked = now - line.get("received_ms", line["answered_ms"]) / 1e3
                if "ok" in line or line["hits"]:
                    self._hit.append((asked, asked + line["answered_ms"] / 1e3))
                if "ok" not in line:
                    continue  # nothing to load, or the engine has it all
                if not line["ok"]:
                    self.found.loads_failed += 1
                elif line["blocks"]:
                    self.found.loads += 1
                    self.found.loaded_blocks += line["blocks"]
                    self._used.append((asked, now))

    def _wait_used(self, since: float) -> float | None:
        """Seconds from `since` to the end of a load that began after it; None if none is seen in time."""
        until = max(since, time.monotonic()) + REUSE_S
        while time.monotonic() < until:
            if (seconds := _first(self._used, since)) is not None:
                return seconds
            self.pause(LOOK_S)
        return None

    def _sample(self) -> None:
        engine, daemon = self._engines[-1], self.sidecar.daemon()
        looks = [
            *census.of_group(f"engine {len(self._engines)}", engine.pgid),
            census.of_processes(f"daemon {daemon}", [daemon] if daemon else []),
            census.of_processes(f"supervisor {self.sidecar.pid}", [self.sidecar.pid]),
            census.of_files("the sidecar's files", self.sidecar.files()),
        ]
        self._samples += [look for look in looks if look is not None]

    def _look_at_rest(self) -> None:
        """Nobody asks any more: jobs, fences, leases, quarantine have to be zero."""
        until = time.monotonic() + REST_S
        while True:
            done = self.sidecar.ask("status", "--json")
            if done.returncode:
                self.complain(f"kvferry status: {(done.stderr or done.stdout)[-300:]}")
                return
            status = json.loads(done.stdout)
            (self._folder / "status.json").write_text(done.stdout)
            flat = {**status, **status.get("jobs", {}), **status.get("slots", {})}
            self.found.at_rest = {name: flat[name] for name in GAUGES if isinstance(flat.get(name), int)}
            if not any(self.found.at_rest.values()) or time.monotonic() > until:
                return
            self.pause(0.5)

    def _look_for_unprovoked_kills(self) -> None:
        """A worker that the sidecar killed, though nobody had stopped it.

        The drill's deadline and grace are a second and a half in all. On a machine where a thread that only sleeps is
        late by half a grace in that time, a healthy worker may miss it too: that is said, and is not a fault of it.
        """
        stops = [fault for fault in self.found.faults if "SIGSTOP" in fault.kind]
        for moment, line in self.sidecar.said("killing rank"):
            if any(fault.began < moment < fault.settled + UNPROVOKED_S for fault in stops):
                continue
            late_s = lateness(self._late, moment - DEADLINE_S - GRACE_S - LINE_S, moment + LINE_S)
            if late_s > GRACE_S / 2:
                self.found.starved.append(f"a thread that only sleeps was {late_s:.2f} s late just then: {line}")
            else:
                self.complain(f"unprovoked: {line}")

    def _take(self, crowd: Crowd) -> None:
        tally, found = crowd.tally, self.found
        found.asked, found.answered, found.cut = tally.asked, tally.answered, tally.cut
        found.failed += tally.failed
        found.wrong += tally.wrong
        found.cached_share = tally.cached_tokens / max(tally.prompt_tokens, 1)
        found.growth = census.growth(self._samples)
        found.waits = self._named([stall for engine in self._engines for stall in engine.stalls])
        found.silences = self._named([stall for engine in self._engines for stall in engine.silences])

    def _named(self, stalls: Sequence[Stall]) -> list[Wait]:
        """Each with the latest fault that had begun before it did, and had not settled by then."""
        named = []
        for stall in stalls:
            going = [f for f in self.found.faults if f.began < stall.since + 0.5 and f.settled + 1.0 > stall.since]
            kind = going[-1].kind if going else "-"
            named.append(Wait(round(stall.seconds, 3), stall.what, kind, round(stall.since, 3)))
        return named

    def _say(self, text: str) -> None:
        if not self.plan.quiet:
            print(f"[{time.monotonic() - self._started:6.1f} s] {text}", flush=True)


def lateness(late: Sequence[tuple[float, float]], since: float, until: float) -> float:
    """The longest that the thread woke up too late between these moments, seconds."""
    return max((seconds for moment, seconds in late if since < moment and moment - seconds < until), default=0.0)


def _first(moments: Sequence[tuple[float, float]], since: float) -> float | None:
    """Seconds from `since` to the end of the first that began after it."""
    return min((ended - since for began, ended in reversed(moments) if began >= since), default=None)


class _Tail:
    """New whole lines of a file of JSON lines, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0

    def lines(self) -> list[dict[str, Any]]:
        if not self.path.exists() or self.path.stat().st_size == self._at:
            return []
        with self.path.open("rb") as file:
            file.seek(self._at)
            whole = file.read()
        whole = whole[: whole.rfind(b"\n") + 1]
        self._at += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def run(plan: Plan) -> Findings:
    """A whole drill; its folder is removed unless the plan names one."""
    folder = plan.folder or Path(tempfile.mkdtemp(prefix="kvf-chaos-", dir="/tmp"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return Drill(plan, folder).run()
    finally:
        if plan.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
