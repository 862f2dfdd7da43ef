"""What goes wrong in a voyage, when, and how often: drawn from the seed, carried out as events of the clock.

    engine's step ──now and then──▶ strike, a little later ──▶ one deed of this seed's kinds

About half of all seeds have none but the weather's. The others have one to five kinds, each a method below.
Whatever is stopped goes on again and whatever was killed is started again, so that afterwards all must come to rest.
"""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvferry.proto.control import DrainAnswer, DrainAsk, Hello, Refused, ResetAnswer, ResetAsk, Welcome

from .books import Broken
from .clock import MS, US, Party, S
from .engine import Engine
from .net import LinkEnd
from .ranks import Rank
from .worker import Worker

if TYPE_CHECKING:
    from .voyage import Voyage


class Faults:
    """One voyage's misfortunes."""

    def __init__(self, voyage: "Voyage", rng: random.Random) -> None:
        self.counts: dict[str, int] = {}
        self.over = False
        self._voyage = voyage
        self._rng = rng
        kinds: dict[str, Callable[[], None]] = {
            "daemon_crash": self._crash_daemon,
            "daemon_crash_within": self._burn_daemon,
            "daemon_stall": self._stall_daemon,
            "daemon_hang": self._hang_daemon,
            "spare_hang": self._hang_spare,
            "supervisor_stall": self._stall_supervisor,
            "sidecar_stall": self._stall_sidecar,
            "worker_crash": self._crash_worker,
            "worker_stall": self._stall_worker,
            "worker_hang": self._hang_worker,
            "client_stall": self._stall_client,
            "rank_stall": self._stall_rank,
            "engine_crash": self._crash_engine,
            "rank_crash": self._crash_rank,
            "sidecar_crash": self._crash_sidecar,
            "cut_client": self._cut_client,
            "cut_worker": self._cut_worker,
            "cut_tether": self._cut_tether,
            "reset": self._reset,
            "drain": self._drain,
            "scribble": self._scribble,
        }
        self.kinds: list[str] = []
        if rng.random() < 0.55:
            self.kinds = sorted(rng.sample(list(kinds), rng.randrange(1, 6)))
        self._deeds = [kinds[kind] for kind in self.kinds]
        self._wanted = rng.randrange(2, 7)
        self._left = 2 * self._wanted
        self._rate = 0.0  # of striking in one engine step
        self._quiet_steps = 0
        self._operator = Operator(voyage)

    @property
    def are_hangs(self) -> bool:
        """Whether some process stands still for longer than anybody waits."""
        return "worker_hang" in self.kinds

    @property
    def are_stands(self) -> bool:
        """Whether those stand still of whom only the supervisor takes notice, or the supervisor itself."""
        stands = {"daemon_stall", "daemon_hang", "spare_hang", "supervisor_stall", "sidecar_stall"}
        return not stands.isdisjoint(self.kinds)

    @property
    def are_restarts(self) -> bool:
        """Whether daemons die and their table is read again."""
        deaths = {"daemon_crash", "daemon_crash_within", "daemon_hang", "daemon_stall", "sidecar_crash"}
        return not deaths.isdisjoint(self.kinds)

    def begin(self, num_steps: int) -> None:
        """The engines will make this many steps; in the first of them nothing happens."""
        self._quiet_steps = num_steps // 3 if self.are_restarts else 0
        if self.kinds:
            self._rate = self._wanted / (num_steps - self._quiet_steps)

    def end(self) -> None:
        """No more faults; what an operator has begun he ends."""
        self.over = True
        if "drain" in self.kinds:
            # Behind his last question, however long that takes.
            self._operator.unanswered += 1
            self._voyage.clock.after(500 * MS, self._end_drains)

    def _end_drains(self) -> None:
        if self._operator.unanswered > 1:  # a drain that waits at a daemon which stands still would come after this
            self._voyage.clock.after(50 * MS, self._end_drains)
            return
        self._operator.unanswered -= 1
        self._operator.ask(DrainAsk(budget_ms=0, resume=True))

    def check_rest(self) -> None:
        """I4 of the operator's questions."""
        if self._operator.unanswered:
            raise Broken(f"I4: {self._operator.unanswered} questions of the operator are unanswered")

    def look(self) -> None:
        """An engine makes a step: perhaps something happens soon."""
        self._quiet_steps -= 1
        if self._quiet_steps < 0 and self._rng.random() < self._rate:
            tries = self._rng.choice((0, 40))
            self._voyage.clock.after(self._rng.randrange(0, 6 * MS), self._wait_for_copies, tries)

    def _wait_for_copies(self, tries: int) -> None:
        """The worst moment is amid a copy: wait a little for one."""
        if tries and not any(w.core is not None and w.copier.busy for w in self._voyage.sidecar.workers.values()):
            self._voyage.clock.after(200 * US, self._wait_for_copies, tries - 1)
        else:
            self._strike()

    def _strike(self) -> None:
        if self.over or not self._left:
            return
        self._left -= 1
        at = self._rng.randrange(len(self._deeds))
        self.counts[self.kinds[at]] = self.counts.get(self.kinds[at], 0) + 1
        self._voyage.log("fault", "{}", self.kinds[at])
        self._deeds[at]()

    # ---- the sidecar ------------------------------------------------------------------------------------

    def _crash_daemon(self) -> None:
        self._voyage.sidecar.crash_daemon()

    def _burn_daemon(self) -> None:
        """It dies between two actions of a step, before the first of the next one, or amid writing records."""
        daemon = self._voyage.sidecar.daemon
        if daemon is None or daemon.fuse is not None or daemon.dies_amid:
            return
        if self._rng.random() < 0.5:
            daemon.dies_amid = True
        else:
            daemon.fuse = self._rng.randrange(0, 12)

    def _stall_daemon(self) -> None:
        """It stands still and goes on, for want of a processor or by a signal; a long one by a signal is its end."""
        daemon = self._voyage.sidecar.daemon
        if daemon is not None:
            longest = self._rng.choice((50 * MS, 500 * MS, 3 * S))
            self._stall(daemon.party, self._rng.randrange(1 * MS, longest), starved=self._rng.random() < 0.5)

    def _hang_daemon(self) -> None:
        """It never goes on by itself."""
        daemon = self._voyage.sidecar.daemon
        if daemon is not None:
            daemon.party.stop()

    def _hang_spare(self) -> None:
        spares = [w for w in self._voyage.sidecar.workers.values() if w.side is None and not w.party.ended]
        if spares:
            self._rng.choice(spares).party.stop()

    def _stall_supervisor(self) -> None:
        self._stall(self._voyage.sidecar.party, self._rng.randrange(1 * MS, self._rng.choice((150 * MS, 4 * S))))

    def _stall_sidecar(self) -> None:
        """All of it at once, and all go on at once: a container that is paused."""
        sidecar = self._voyage.sidecar
        parties = [sidecar.party, *(w.party for w in sidecar.workers.values())]
        if sidecar.daemon is not None:
            parties.append(sidecar.daemon.party)
        for_ns = self._rng.randrange(1 * MS, self._rng.choice((150 * MS, 4 * S)))
        self._rng.shuffle(parties)
        for party in parties:
            self._stall(party, for_ns)

    def _worker(self) -> Worker | None:
        living = [w for w in self._voyage.sidecar.workers.values() if not w.party.ended and w.core is not None]
        busy = [w for w in living if w.copies or w.copier.busy]
        if busy and self._rng.random() < 0.7:
            return self._rng.choice(busy)
        return self._rng.choice(living) if living else None

    def _crash_worker(self) -> None:
        worker = self._worker()
        if worker is not None:
            self._voyage.sidecar.crash_worker(worker)

    def _stall_worker(self) -> None:
        worker = self._worker()
        if worker is not None:
            self._stall(worker.party, self._rng.randrange(1 * MS, 80 * MS))

    def _hang_worker(self) -> None:
        worker = self._worker()
        if worker is not None:
            self._stall(worker.party, self._rng.randrange(500 * MS, 2 * S))

    def _crash_sidecar(self) -> None:
        self._voyage.sidecar.crash_all()

    def _cut_worker(self) -> None:
        worker = self._worker()
        if worker is not None and worker.link is not None:
            worker.link.sever()

    # ---- engines ----------------------------------------------------------------------------------------

    def _engine(self) -> Engine | None:
        engines = self._voyage.engines  # none while all of them start anew
        return self._rng.choice(engines) if engines else None

    def _rank(self) -> Rank | None:
        ranks = self._voyage.all_ranks
        return self._rng.choice(ranks) if ranks else None

    def _stall(self, party: Party, for_ns: int, *, starved: bool = False) -> None:
        if party.stopped:  # whatever it was stopped by lasts
            return
        party.stop(starved=starved)
        self._voyage.clock.after(for_ns, party.go_on)

    def _stall_client(self) -> None:
        longest = 7 * S if self._rng.random() < 0.1 else 150 * MS
        engine = self._engine()
        if engine is not None:
            self._stall(engine.party, self._rng.randrange(1 * MS, longest))

    def _stall_rank(self) -> None:
        rank = self._rank()
        if rank is not None:
            self._stall(rank.party, self._rng.randrange(1 * MS, 80 * MS))

    def _crash_engine(self) -> None:
        engine = self._engine()
        if engine is not None:
            self._voyage.crash_engine(engine)

    def _crash_rank(self) -> None:
        """One rank dies; its engine, which cannot go on without it, a little later."""
        engine = self._engine()
        if engine is not None:
            self._rng.choice(self._voyage.ranks[engine.name]).die()
            self._voyage.clock.after(self._rng.randrange(1 * MS, 80 * MS), self._voyage.crash_engine, engine)

    def _cut_client(self) -> None:
        engine = self._engine()
        if engine is not None and engine.link is not None:
            engine.link.sever()

    def _cut_tether(self) -> None:
        rank = self._rank()
        if rank is not None:
            rank.break_tether()

    # ---- the operator -----------------------------------------------------------------------------------

    def _reset(self) -> None:
        spaces = [b.hex() for b in self._voyage.ledger.namespaces]
        name = self._rng.choice([*spaces, "*"])
        self._operator.ask(ResetAsk(namespace=name))

    def _drain(self) -> None:
        self._operator.ask(DrainAsk(budget_ms=self._rng.choice((0, 5, 100))))
        self._voyage.clock.after(
            self._rng.randrange(1 * MS, 60 * MS), self._operator.ask, DrainAsk(budget_ms=0, resume=True)
        )

    # ---- memory -----------------------------------------------------------------------------------------

    def _scribble(self) -> None:
        """Somebody writes where nobody may: the slot's header tells, and the bytes must reach no engine."""
        ledger, pools = self._voyage.ledger, self._voyage.pools
        slots = [slot for slot in ledger.slots if not ledger.users.get(slot)]
        if slots:
            slot, pool = self._rng.choice(slots), self._rng.choice(pools)
            ledger.spoiled.add(ledger.ready[ledger.slots[slot]])
            pool.half[1][slot] = -1
            pool.gen_close[slot] -= 1


class Operator:
    """`kvferry reset` and `kvferry drain`: one question over a link of its own."""

    def __init__(self, voyage: "Voyage") -> None:
        self.unanswered = 0
        self._voyage = voyage

    def ask(self, message: Any) -> None:
        """Say hello, ask, wait for the answer, go. No daemon, no answer."""
        ends: list[LinkEnd] = []

        def hear(answer: Any) -> None:
            self._voyage.log("operator", "<- daemon: {}", answer)
            if isinstance(answer, Welcome):
                ends[0].send(message)
            elif isinstance(answer, ResetAnswer | DrainAnswer | Refused):
                self.unanswered -= 1
                ends[0].close()

        def lose() -> None:
            self.unanswered -= 1

        near = self._voyage.sidecar.connect(Party(self._voyage.clock), hear, lose)
        if near is not None:
            self.unanswered += 1
            ends.append(near)
            near.send(Hello(role="admin", software="voyage"))
