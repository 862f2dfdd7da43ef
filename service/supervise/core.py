"""What the supervisor decides: who is started, killed, told and given up. Pure; the shell is `shell.py`.

              Begin                    daemon ready, a spare for each rank           the daemon dies
    IDLE ──────────────▶ STARTING ──────────────────────────────────────▶ SERVING ──────────────────▶ RESTARTING
                           │                                                │  ▲                          │
       a child dies before │                                           Stop │  └── another one is ready ──┘
       the first ready     │                                                ▼
                           ▼                 at rest, bound, second Stop  DRAINING
    OVER (exit code) ◀── STOPPING (told, then SIGTERM, then SIGKILL) ◀──────┘
          all reaped

Rules
- One worker per rank is on its way or ready (the spare); when an engine's rank takes it, the next is started.
- A taken worker's end is ordinary: its rank went away, or it died and the rank comes back to the spare. It is
  told to the daemon after the reap, never before: the reap is the daemon's proof.
- The daemon's death ends nobody else: another one is started and told first of all who lives; the workers find
  it by themselves, and what the pool holds is served again.
- A stop is a drain first: nothing new is admitted, loads end, stores have a budget. Then all are told to end.
- Each second is a beat: who can answer is asked for a sign of life, who owes one is looked at (`pulse.py`). A hung
  child is killed, and then it is one that died: for a hung daemon another one starts, warm. A supervisor whose
  beat comes late stood still itself, or waits for a CPU like all others: it counts anew.
- A daemon that hangs soon after the one before it did, or that cannot be started at all, is tried again with a growing
  pause, for ever, and this is said (`daemons.py`).
- A child that dies before the first ready line would die again: give up at once. Later, more than
  `restarts` deaths of the daemon within `window_ns` give up. No worker's death is counted: one engine's trouble
  must not end the sidecar of its neighbours. A spare that does not start is tried again with a growing pause, for
  ever, and nobody is served less (`spares.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvferry.supervise.api import (
    Action,
    Answered,
    AtRest,
    Begin,
    Event,
    Exited,
    Failed,
    Finish,
    Kill,
    KillWanted,
    Look,
    Note,
    Ready,
    Seen,
    SpawnDaemon,
    Spawned,
    SpawnWorker,
    Stop,
    Taken,
    Tell,
    TellReady,
    Terminate,
    TimePassed,
    Vitals,
)
from kvferry.supervise.daemons import Daemons
from kvferry.supervise.pulse import STOPPED, TICKS_A_SECOND
from kvferry.supervise.spares import Spares
from kvferry.supervise.state import ALIVE, Child, Ending, Life, Phase, Rules, how_ended, name_of


@dataclass(slots=True)
class Supervisor:
    """The state machine. `new_id` gives random worker ids, never one twice."""

    rules: Rules
    new_id: Callable[[], int]
    phase: Phase = Phase.IDLE
    children: dict[int, Child] = field(default_factory=dict)
    workers_died: int = 0  # workers that ended by a signal or an error
    _daemons: Daemons = field(init=False)
    _spares: Spares = field(init=False)
    _served: bool = False  # the first ready line is out
    _ending: Ending | None = None
    _spare_at: dict[int, int] = field(default_factory=dict)  # rank -> when its next spare may start
    _beat_at: int = 0
    _drained_by: int = 0  # when DRAINING is over
    _keep: bool = True
    _code: int = 0
    _why: str = ""

    def __post_init__(self) -> None:
        self._daemons = Daemons(self.rules)
        self._spares = Spares(self.rules)

    # ---- the door ------------------------------------------------------------------------------------

    def step(self, event: Event, now_ns: int) -> list[Action]:
        """Take one event; what is to be done, in order."""
        if self.phase is Phase.OVER:
            return []
        match event:
            case Begin():
                return self._begin(now_ns)
            case Spawned(child, pid):
                self.children[child].pid = pid
                return self._tell_workers()
            case Ready(child, device):
                return self._ready(child, device, now_ns)
            case Taken():
                return self._taken(event, now_ns)
            case Failed(child, why):
                if child in self.children:
                    self.children[child].failed_why = (why.splitlines() or [""])[0]
                return []
            case Exited(child, status):
                return self._exited(child, status, now_ns)
            case KillWanted(worker, why):
                return self._kill_wanted(worker, why)
            case Answered(child):
                return self._answered(child, now_ns)
            case Seen(child, vitals):
                return self._seen(child, vitals)
            case AtRest(child):
                return self._at_rest(child, now_ns)
            case Stop(why, keep):
                return self._wish_to_stop(why, keep, now_ns)
            case TimePassed():
                return self._time(now_ns)

    def next_due_ns(self) -> int | None:
        """When TimePassed has something to do."""
        due = [*self._spare_at.values(), self._beat_at] if self.phase in ALIVE else []
        if self.phase in ALIVE and self._daemons.start_at is not None:
            due.append(self._daemons.start_at)
        if self.phase is Phase.DRAINING:
            due.append(self._drained_by)
        if self._ending:
            e, r = self._ending, self.rules
            bound = r.term_ns if not e.terminated else r.kill_ns if not e.killed else r.leave_ns
            due.append(e.since + bound)
        return min(due, default=None)

    @property
    def trouble(self) -> str:
        """Why no daemon serves, for whoever asks meanwhile; "" if there is no more to it than a death."""
        return self._daemons.trouble

    @property
    def restarts(self) -> int:
        """Of the daemon."""
        return self._daemons.restarts

    # ---- starting ------------------------------------------------------------------------------------

    def _begin(self, now_ns: int) -> list[Action]:
        if self.phase is not Phase.IDLE:
            return []
        self.phase = Phase.STARTING
        self._beat_at = now_ns + self.rules.beat_ns
        daemon = self._new_child(-1)
        # The daemon first: it is told who lived before it, and that is nobody. Workers wait for it by themselves.
        return [SpawnDaemon(daemon), *self._spawn_spares(now_ns)]

    def _ready(self, child: int, device: dict[str, Any], now_ns: int) -> list[Action]:
        one = self.children.get(child)
        if one is None or one.life is not Life.STARTING or self.phase not in ALIVE:
            return []
        one.life, one.device = Life.SPARE, device
        one.pulse.forget()
        told = self._spares.work(one.rank, now_ns)
        return [*self._tell_workers(), *self._complete(now_ns), *([Note(told)] if told else [])]

    def _complete(self, now_ns: int) -> list[Action]:
        """Say that it serves, if now it does. Once it has, a rank whose spare does not start holds up nobody else."""
        daemon = self._daemon()
        if self.phase not in ALIVE or daemon is None or not self._daemons.serves(daemon):
            return []
        self._daemons.work(now_ns)
        ready = {c.rank for c in self.workers() if c.life is not Life.STARTING}
        if self._served:
            ready |= self._spares.waiting()
        if self.phase is Phase.SERVING or not ready >= set(range(self.rules.tp_size)):
            return []
        self.phase = Phase.SERVING
        again, self._served = self._served, True
        return [TellReady(again)]

    def _answered(self, child: int, now_ns: int) -> list[Action]:
        one = self.children.get(child)
        if one is None:
            return []
        one.answered = True
        one.pulse.answer()
        return self._complete(now_ns)

    def _taken(self, taken: Taken, now_ns: int) -> list[Action]:
        one = self.children.get(taken.child)
        if one is None or one.rank < 0 or one.life is Life.TAKEN:
            return []
        one.life, one.engine, one.marks = Life.TAKEN, taken.engine, taken.marks
        one.lent_bytes = taken.lent_bytes
        one.pulse.answer()
        self._spares.forget(one.rank)
        return self._spawn_spares(now_ns) + self._tell_workers()

    def _spawn_spares(self, now_ns: int) -> list[Action]:
        """Start a worker for each rank that has none on its way or ready."""
        if self.phase not in ALIVE:
            return []
        actions: list[Action] = []
        covered = {c.rank for c in self.children.values() if c.life is not Life.TAKEN}
        for rank in range(self.rules.tp_size):
            if self._spare_at.get(rank, 0) > now_ns:
                continue
            self._spare_at.pop(rank, None)  # over, also for a rank that has its spare: no time is due for ever
            if rank in covered:
                continue
            actions.append(SpawnWorker(self._new_child(rank), rank, self._spares.is_told(rank)))
        return actions

    # ---- deaths --------------------------------------------------------------------------------------

    def _exited(self, child: int, status: int, now_ns: int) -> list[Action]:
        one = self.children.pop(child, None)
        if one is None:
            return []
        name, how = name_of(one), how_ended(status, one.kill_why)
        if self.phase is Phase.STOPPING:
            return self._ended()
        if one.rank >= 0 and status != 0:
            self.workers_died += 1
        if self.phase is Phase.DRAINING:
            return self._reaped(one) if one.rank >= 0 else self._end_all(now_ns)
        if not self._served:
            why = f"{name} {how} before kvferry was ready; its own lines above say why"
            return [*self._reaped(one), *self._stop(1, why, now_ns)]
        if one.rank < 0:
            return self._daemon_died(one, how, now_ns)
        actions = self._reaped(one)
        if one.life is Life.TAKEN:
            if status != 0:
                served = f", which served engine {one.engine!r}," if one.engine else ""
                actions.append(Note(f"{name}{served} {how}; the rank attaches again to the spare"))
            pause_ns = self._spares.hurry(one.rank)
            if pause_ns is not None:
                self._spare_at[one.rank] = now_ns + pause_ns
        else:
            told, pause_ns = self._spares.fail(one, status, now_ns)
            if told:
                actions.append(Note(told))
            if pause_ns:
                self._spare_at[one.rank] = now_ns + pause_ns
                actions += self._complete(now_ns)
        return actions + self._spawn_spares(now_ns) + self._tell_workers()

    def _daemon_died(self, one: Child, how: str, now_ns: int) -> list[Action]:
        told, is_over = self._daemons.die(one, how, now_ns)
        if is_over:
            return self._stop(1, told, now_ns)
        self.phase = Phase.RESTARTING
        return [*([Note(told)] if told else []), *self._start_daemon(now_ns)]

    def _start_daemon(self, now_ns: int) -> list[Action]:
        """Once its pause is over."""
        return [SpawnDaemon(self._new_child(-1))] if self._daemons.is_due(now_ns) else []

    def _kill_wanted(self, worker: int, why: str) -> list[Action]:
        one = self.children.get(worker)
        if one is None or one.rank < 0:
            # Reaped before the wish came: the daemon waits for exactly this word.
            return self._tell_daemon({"event": "reaped", "worker": worker})
        return self._kill(one, why or "the daemon wanted it")

    def _kill(self, one: Child, why: str) -> list[Action]:
        if one.kill_why:
            return []
        one.kill_why = why
        return [Note(f"killing {name_of(one)}: {why}"), Kill(one.id)]

    # ---- signs of life -------------------------------------------------------------------------------

    def _beat(self, now_ns: int) -> list[Action]:
        """Ask who can answer, look at who owes an answer; a late beat counts nothing of what was before it."""
        if now_ns < self._beat_at:
            return []
        is_late = now_ns > self._beat_at + self.rules.late_ns
        self._beat_at = now_ns + self.rules.beat_ns
        actions: list[Action] = []
        for one in self.children.values():
            if not one.pid or one.kill_why:
                continue
            if is_late:
                one.pulse.forget()
            if one.life is not Life.TAKEN and one.pulse.ask():
                actions.append(Tell(one.id, {"event": "ping"}))
            actions.append(Look(one.id))
        return actions

    def _seen(self, child: int, vitals: Vitals | None) -> list[Action]:
        one, rules = self.children.get(child), self.rules
        if one is None or self.phase not in ALIVE:
            return []
        if one.life is Life.TAKEN:
            why = one.pulse.see_stopped(vitals, rules.looks_serving)
        else:
            # No slow disk stops a process.
            may_be_slow = one.life is Life.STARTING and (vitals is None or vitals.state != STOPPED)
            looks = rules.looks_starting if may_be_slow else rules.looks
            why = one.pulse.see(vitals, looks, rules.spin_s * TICKS_A_SECOND)
        return self._kill(one, why) if why else []

    # ---- ending --------------------------------------------------------------------------------------

    def _wish_to_stop(self, why: str, keep: bool, now_ns: int) -> list[Action]:
        """Drain if anything is served; a second wish ends the drain."""
        if self.phase is Phase.DRAINING:
            return self._end_all(now_ns)
        if self.phase is Phase.STOPPING:
            return []
        self._keep = keep
        daemon = self._daemon()
        if not self._served or daemon is None or daemon.life is Life.STARTING:
            return self._stop(0, why, now_ns)
        self.phase, self._why = Phase.DRAINING, why
        self._drained_by = now_ns + self.rules.drain_ns
        return [Tell(daemon.id, {"event": "drain", "budget_ms": self.rules.store_budget_ms})]

    def _at_rest(self, child: int, now_ns: int) -> list[Action]:
        daemon = self._daemon()
        known = self.phase is Phase.DRAINING and daemon is not None and daemon.id == child
        return self._end_all(now_ns) if known else []

    def _stop(self, code: int, why: str, now_ns: int) -> list[Action]:
        if self.phase is Phase.STOPPING:
            return []
        self._code, self._why = code, why
        return self._end_all(now_ns)

    def _end_all(self, now_ns: int) -> list[Action]:
        self.phase = Phase.STOPPING
        self._ending = Ending(now_ns)
        tell: list[Action] = [Tell(child, {"event": "stop"}) for child in self.children]
        # A worker that still starts would read this only when all is imported, and holds nothing to put away.
        new = [child.id for child in self.workers() if child.life is Life.STARTING]
        return [*tell, *(Terminate(child) for child in new), *self._ended()]

    def _ended(self) -> list[Action]:
        """Over once nobody is left."""
        if self.children:
            return []
        self._ending = None
        self.phase = Phase.OVER
        return [Finish(self._code, self._why, self._keep)]

    def _time(self, now_ns: int) -> list[Action]:
        e, r = self._ending, self.rules
        if e is None:
            if self.phase is Phase.DRAINING and now_ns >= self._drained_by:
                return self._end_all(now_ns)
            if self.phase not in ALIVE:
                return []
            return self._start_daemon(now_ns) + self._spawn_spares(now_ns) + self._beat(now_ns)
        if not e.terminated and now_ns >= e.since + r.term_ns:
            e.terminated = True
            return [Terminate(child) for child in self.children]
        if not e.killed and now_ns >= e.since + r.kill_ns:
            e.killed = True
            return [Kill(child) for child in self.children]
        if e.killed and now_ns >= e.since + r.leave_ns:
            left = ", ".join(str(child.pid) for child in self.children.values())
            self.phase = Phase.OVER
            text = f"left behind children that do not die (pids {left}); their pool file may stay in use"
            return [Finish(1, text, self._keep)]
        return []

    # ---- words ---------------------------------------------------------------------------------------

    def workers(self) -> list[Child]:
        """All living workers."""
        return [child for child in self.children.values() if child.rank >= 0]

    def _reaped(self, one: Child) -> list[Action]:
        return self._tell_daemon({"event": "reaped", "worker": one.id}) if one.rank >= 0 else []

    def _tell_workers(self) -> list[Action]:
        listed = [
            {
                "worker": c.id,
                "rank": c.rank,
                "pid": c.pid,
                "state": c.life.value,
                "engine": c.engine,
                "marks": c.marks,
                "lent_bytes": c.lent_bytes,
                "device": c.device,
            }
            for c in self.workers()
            if c.pid  # one that is only about to be spawned has served nobody: a new daemon need not await it
        ]
        died = {"daemon_restarts": self.restarts, "workers_died": self.workers_died}
        lacks = {"spares_failed": self._spares.failed, "no_spare": self._spares.listed()}
        return self._tell_daemon({"event": "workers", "workers": listed, **died, **lacks})

    def _tell_daemon(self, message: dict[str, Any]) -> list[Action]:
        daemon = self._daemon()
        return [] if daemon is None else [Tell(daemon.id, message)]

    def _daemon(self) -> Child | None:
        return next((child for child in self.children.values() if child.rank < 0), None)

    def _new_child(self, rank: int) -> int:
        child = self.new_id()
        self.children[child] = Child(child, rank)
        return child
