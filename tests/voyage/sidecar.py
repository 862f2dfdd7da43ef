"""The sidecar as a whole: the real supervisor core behind a simulated shell, one daemon at a time, the workers, and the
table that outlives them.

    Supervisor ──SpawnDaemon──▶ Daemon (a boot) ◀──links── workers, clients
       │ ───────SpawnWorker──▶ Worker (a spare for each rank, always)
       │ ◀──Ready, Taken, Answered, Exited── what children say, and their deaths, a little later
       └─── Tell, Look, Kill ───▶ to a child; a look sees whether it stands still

The supervisor is a process as the others: it may be stopped, and what has come meanwhile it does when it goes on.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvferry.proto.ids import WorkerId
from kvferry.scheduler_daemon.core import api as daemon_api
from kvferry.scheduler_daemon.core.slots import Table
from kvferry.supervise import api as up
from kvferry.supervise.core import Supervisor
from kvferry.supervise.state import Phase, Rules

from .books import Broken
from .clock import MS, US, Clock, Party, S
from .daemon import Daemon
from .echo import Echo
from .ledger import Ledger
from .log import Log
from .memory import PoolFile
from .net import LinkEnd, Network
from .table import TableBytes
from .worker import Worker


class Sidecar:
    """Everything that `kvferry up` runs."""

    def __init__(
        self,
        clock: Clock,
        log: Log,
        net: Network,
        rng: random.Random,
        ledger: Ledger,
        pools: list[PoolFile],
        table: TableBytes,
        settings: daemon_api.CoreSettings,
        worker_settings: tuple[dict[str, Any], dict[str, Any]],
        echo_share: float,
        draw_party: Callable[[], Party],
        beat_ns: int,
    ) -> None:
        self.daemon: Daemon | None = None
        self.party: Party  # the supervisor's
        self.workers: dict[int, Worker] = {}  # started and not yet reaped
        self.boots = self.deaths = self.kills = self.steps = 0
        self.barren = 0  # so many spares will not start; never those of a sidecar that has not been ready
        self.failed = 0  # that did not
        self.unborn = 0  # so many daemons cannot be started; never the first one of a `kvferry up`
        self.tears = False  # whether a dying daemon may leave a torn record
        self._clock = clock
        self._log = log
        self._net = net
        self._rng = rng
        self._ledger = ledger
        self._pools = pools
        self._table = table
        self._settings = settings
        self._worker_settings = worker_settings
        self._echo_share = echo_share
        self._draw_party = draw_party
        retry_ns = rng.randrange(1 * MS, 60 * MS)
        self._rules = Rules(
            len(pools),
            restarts=1 << 30,
            retry_ns=retry_ns,
            retry_most_ns=8 * retry_ns,
            beat_ns=beat_ns,
            late_ns=beat_ns,
        )
        self._answer_ns = rng.choice(((10 * US, 2 * MS), (10 * MS, 60 * MS)))  # from a ping to its answer
        self._core: Supervisor | None = None  # None: the supervisor is dead too
        self._of_daemon = 0  # the daemon as the core names it
        self._wanted: set[int] = set()  # workers whose death the daemon wants
        self._unheard: list[int] = []  # workers whose reap the daemon has not heard of yet
        self._armed_ns: int | None = None
        self.start()

    # ---- the supervisor's shell -------------------------------------------------------------------------

    def start(self) -> None:
        """`kvferry up`, until it serves."""
        self.party = self._draw_party()
        self._armed_ns = None
        rng = random.Random(self._rng.getrandbits(64))
        self._core = core = Supervisor(self._rules, lambda: rng.getrandbits(63) | 1)
        self._do(core, up.Begin())
        for child in list(core.children):
            self._do(core, up.Ready(child))

    def _hear(self, delay_ns: int, event: up.Event) -> None:
        """Something reaches the supervisor of now; whoever comes after it never hears of it."""
        if self._core is not None:
            self._clock.after(delay_ns, self.party.run, self._do, self._core, event)

    def _do(self, core: Supervisor, event: up.Event) -> None:
        if core is not self._core:
            return
        for action in core.step(event, self.party.now_ns):
            self._carry_out(core, action)
        due = core.next_due_ns()
        if core is self._core and due is not None and (self._armed_ns is None or due < self._armed_ns):
            self._armed_ns = due
            self.party.at(due, self._tick, core, due)

    def _tick(self, core: Supervisor, armed_ns: int) -> None:
        if core is self._core and self._armed_ns == armed_ns:
            self._armed_ns = None
            self._do(core, up.TimePassed())

    def _carry_out(self, core: Supervisor, action: up.Action) -> None:
        rng = self._rng
        match action:
            case up.SpawnDaemon(child) if self.unborn and core.phase is not Phase.STARTING:
                self._log("sidecar", "no process is to be had for a daemon")
                self.unborn -= 1
                self._do(core, up.Failed(child, "cannot be started: no process is to be had"))
                self._do(core, up.Exited(child, 71))
            case up.SpawnDaemon(child):
                self._start_daemon(child)
                self._do(core, up.Spawned(child, child & 0xFFFF | 1))
                self._hear(rng.randrange(100 * US, 5 * MS), up.Ready(child))
            case up.SpawnWorker(child, rank) if self.barren and core.phase is not Phase.STARTING:
                self._log("sidecar", "a spare of rank {} does not start", rank)
                self.barren -= 1
                self.failed += 1
                self._unheard.append(child)
                self._do(core, up.Spawned(child, child & 0xFFFF | 1))
                failed_ns = 1 * MS + child % (20 * MS)
                self._hear(failed_ns, up.Failed(child, "no memory is left on the GPU"))
                self._hear(failed_ns, up.Exited(child, 2))
            case up.SpawnWorker(child, rank):
                self._start_worker(child, rank)
                self._do(core, up.Spawned(child, child & 0xFFFF | 1))
                self._hear(rng.randrange(1 * MS, 20 * MS), up.Ready(child))
            case up.Tell(child, message):
                self._tell(child, message)
            case up.Look(child):
                self._do(core, up.Seen(child, self._look(child)))
            case up.Kill(child):
                self._check_kill(core.children[child].kill_why, child)
                self.kills += 1
                self._clock.after(rng.randrange(100 * US, 5 * MS), self._kill, child)
            case up.TellReady() | up.Note():
                self._log("supervisor", "{}", action)
            case _:
                raise Broken(f"liveness: the supervisor wants {action}")

    def _party(self, child: int) -> Party | None:
        """The process of this child, dead ones too; None if it is not known any more."""
        if child == self._of_daemon:
            return self.daemon.party if self.daemon is not None else None
        worker = self.workers.get(child)
        return worker.party if worker is not None else None

    def _tell(self, child: int, message: dict[str, Any]) -> None:
        party, daemon = self._party(child), self.daemon
        if party is None:
            return
        match message["event"]:
            case "ping":
                core = self._core
                party.after(self._rng.randrange(*self._answer_ns), self._answer, core, child)
            case "workers" if daemon is not None and not daemon.is_listed:
                daemon.is_listed = True
                daemon.step(daemon_api.WorkersListed(tuple(w["worker"] for w in message["workers"])))
            case "reaped" if daemon is not None:
                party.run(self._tell_reaped, daemon, message["worker"])

    def _tell_reaped(self, daemon: Daemon, worker: int) -> None:
        self._bury(worker)
        daemon.step(daemon_api.WorkerReaped(WorkerId(worker)))

    def _bury(self, worker: int) -> None:
        """From here on the books count it as dead: with the daemon's, who may stand still and hear of it later."""
        if worker in self._unheard:
            self._unheard.remove(worker)
            self._ledger.reaped(worker)

    def _answer(self, core: Supervisor, child: int) -> None:
        if core is self._core:
            self._hear(self._rng.randrange(10 * US, 200 * US), up.Answered(child))

    def _look(self, child: int) -> up.Vitals | None:
        party = self._party(child)
        if party is None or party.ended:
            return None
        return up.Vitals("R" if party.starved else "T" if party.stopped else "S", 0, 0)

    def _check_kill(self, why: str, child: int) -> None:
        party = self._party(child)
        if child in self._wanted or party is None or party.ended:
            return
        if party.starved or not party.stopped:
            raise Broken(f"liveness: the supervisor kills {child:x}, which lives: {why}")

    def _kill(self, child: int) -> None:
        if child == self._of_daemon:
            self.crash_daemon()
        elif child in self.workers:
            self.crash_worker(self.workers[child])

    # ---- starting ---------------------------------------------------------------------------------------

    def _start_daemon(self, child: int) -> None:
        if self.daemon is not None and not self.daemon.party.ended:
            raise Broken(f"rule 11: daemon {child:x} is started while {self._of_daemon:x} lives")
        rng = self._rng
        boot = rng.getrandbits(63) | 1
        self._log("sidecar", "starts daemon {:x}", boot)
        self.boots += 1
        self._of_daemon = child
        party = self._draw_party()
        party.is_awake_clock = True
        self.daemon = Daemon(
            party,
            self._log,
            self._ledger,
            replace(self._settings, boot=boot),
            self._table,
            Echo(random.Random(rng.getrandbits(64)), self._echo_share),
            self._want_dead,
            self.crash_daemon,
        )

    def _start_worker(self, child: int, rank: int) -> None:
        rng = self._rng
        core, copier = self._worker_settings
        worker = Worker(
            child,
            rank,
            self._draw_party(),
            self._log,
            random.Random(rng.getrandbits(64)),
            self._ledger,
            self._pools[rank],
            self,
            core,
            copier,
            Echo(random.Random(rng.getrandbits(64)), self._echo_share),
        )
        self.workers[worker.id] = worker
        self._log("sidecar", "starts {}", worker.name)

    def taken(self, worker: Worker) -> None:
        """A spare serves a rank now."""
        self._hear(self._rng.randrange(100 * US, 20 * MS), up.Taken(worker.id, "an engine"))

    # ---- meeting ----------------------------------------------------------------------------------------

    def connect(self, party: Party, on_message: Callable[[Any], None], on_lost: Callable[[], None]) -> LinkEnd | None:
        """A link to the daemon that listens now; None if none does."""
        daemon = self.daemon
        if daemon is None:
            return None
        number = self._rng.getrandbits(63) | 1
        near = LinkEnd(self._net, number, party, on_message, on_lost)
        far = LinkEnd(
            self._net, number, daemon.party, lambda message: daemon.hear(number, message), lambda: daemon.lose(number)
        )
        LinkEnd.join(near, far)
        daemon.accept(far)
        return near

    def spare(self, rank: int) -> Worker | None:
        """A worker that lets a knocking rank in."""
        return next((w for w in self.workers.values() if w.rank == rank and w.is_free), None)

    # ---- dying ------------------------------------------------------------------------------------------

    def crash_daemon(self, before: Table | None = None) -> None:
        """The daemon is gone, at once; another one starts.

        `before`: the records before the step amid which it died.
        """
        daemon, self.daemon = self.daemon, None
        if daemon is None:
            return
        self._log("sidecar", "daemon {:x} is dead", daemon.settings.boot)
        self.deaths += 1
        self.steps += daemon.steps
        daemon.party.end()
        for worker in list(self._unheard):
            self._bury(worker)
        for end in daemon.links.values():
            end.sever()
        unsure = self._table.change_in_part(before, self._rng) if before is not None else set()
        torn = self._table.tear(self._rng) if self.tears and self._rng.random() < 0.5 else None
        self._log("sidecar", "torn record: {}, half written: {}", torn, sorted(unsure))
        self._ledger.daemon_died(torn, unsure)
        self._hear(self._rng.randrange(100 * US, 60 * MS), up.Exited(self._of_daemon, -9))

    def crash_worker(self, worker: Worker, status: int = -9) -> None:
        """A worker's process has ended, whatever the reason; then it is reaped."""
        if worker.party.ended:
            return
        self._log("sidecar", "{} is dead", worker.name)
        self.deaths += 1
        worker.die()
        reaper = self.party if self._core is not None else Party(self._clock)  # the kernel's, for orphans
        self._clock.after(self._rng.randrange(10 * US, 20 * MS), reaper.run, self._reap, worker, status)
        if worker.side is not None and worker.tether is not None:
            # The proof comes after all that was written before the death.
            seen_ns = max(worker.tether.all_come_ns, self._clock.now_ns) + self._rng.randrange(10 * US, 50 * MS)
            self._clock.at(seen_ns, worker.side.party.run, worker.side.prove, worker)

    def _reap(self, worker: Worker, status: int) -> None:
        if self.workers.pop(worker.id, None) is None:
            return
        self._log("sidecar", "{} is reaped", worker.name)
        self._unheard.append(worker.id)
        if self._core is not None:
            self._do(self._core, up.Exited(worker.id, status))
        if self.daemon is None:
            self._bury(worker.id)

    def crash_all(self) -> None:
        """SIGKILL of the whole tree; `kvferry up` again once nobody of the old one is left."""
        if self._core is None:
            return
        self._log("sidecar", "is killed as a whole")
        self._core = None
        self.party.end()
        self.crash_daemon()
        for worker in list(self.workers.values()):
            if worker.party.ended:  # dead, and its reaper is now dead too
                self._clock.after(self._rng.randrange(10 * US, 20 * MS), self._reap, worker, -9)
            self.crash_worker(worker)
        self._clock.after(self._rng.randrange(20 * MS, 100 * MS), self._start_again)

    def _start_again(self) -> None:
        if self.workers:
            self._clock.after(5 * MS, self._start_again)
        else:
            self.start()

    def _want_dead(self, worker_id: int, why: str) -> None:
        """The daemon's wish."""
        worker = self.workers.get(worker_id)
        if worker is not None:
            party = worker.party
            recently = party.went_on_ns and self._clock.now_ns - party.went_on_ns < 2 * S
            if not (party.stopped or party.ended or recently or self._settings.grace_ns < 5 * S):
                raise Broken(f"I7: the daemon kills {worker.name}, which was owing nothing for long: {why}")
        self._wanted.add(worker_id)
        self._hear(self._rng.randrange(10 * US, 1 * MS), up.KillWanted(worker_id, why))

    # ---- resting ----------------------------------------------------------------------------------------

    def check_rest(self) -> None:
        """I6 of the sidecar."""
        if self.daemon is None:
            raise Broken("liveness: no daemon runs")
        standing = [w.name for w in self.workers.values() if w.party.stopped and w.side is None]
        if self.daemon.party.stopped or standing:
            raise Broken(f"liveness: somebody hangs and is not replaced: {standing or 'the daemon'}")
        self.daemon.check_rest()
        if self.barren == 0:
            without = [rank for rank in range(len(self._pools)) if self.spare(rank) is None]
            if without:
                raise Broken(f"liveness: ranks {without} have no spare")
        for worker in self.workers.values():
            if worker.party.ended:
                raise Broken(f"liveness: {worker.name} is dead and not reaped")
            worker.check_rest()
