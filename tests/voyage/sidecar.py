"""The sidecar as a whole: the supervisor, one daemon at a time, the workers, and the table that outlives them.

    Sidecar ──starts──▶ Daemon (a boot) ◀──links── workers, clients
       │ ───starts──▶ Worker (a spare for each rank, always)
       └─ after each death: reap ─▶ WorkerReaped to the daemon, proof to the rank; another one starts

The supervisor's own rules are kept: a new daemon is told first of all who lives; a reap is told after the death;
a killed worker's rank finds the next spare by itself.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvferry.scheduler_daemon.core import api as daemon_api
from kvferry.scheduler_daemon.core.slots import Table

from .clock import MS, US, Clock, Party, S
from .daemon import Daemon
from .echo import Echo
from .ledger import Broken, Ledger
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
    ) -> None:
        self.daemon: Daemon | None = None
        self.workers: dict[int, Worker] = {}  # started and not yet reaped
        self.boots = self.deaths = self.kills = self.steps = 0
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
        self._is_down = False  # the supervisor too
        self.start()

    # ---- starting ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """`kvferry up`: a daemon, and a spare for each rank."""
        self._is_down = False
        self._start_daemon()
        for rank in range(len(self._pools)):
            self._start_spare(rank)

    def _start_daemon(self) -> None:
        if self._is_down or self.daemon is not None:
            return
        rng = self._rng
        boot = rng.getrandbits(63) | 1
        self._log("sidecar", "starts daemon {:x}", boot)
        self.boots += 1
        self.daemon = Daemon(
            self._draw_party(),
            self._log,
            self._ledger,
            replace(self._settings, boot=boot),
            self._table,
            Echo(random.Random(rng.getrandbits(64)), self._echo_share),
            self._kill,
            self.crash_daemon,
        )
        self.daemon.step(daemon_api.WorkersListed(tuple(self.workers)))

    def _start_spare(self, rank: int) -> None:
        if self._is_down or any(w.rank == rank and w.side is None for w in self.workers.values()):
            return
        rng = self._rng
        core, copier = self._worker_settings
        worker = Worker(
            rng.getrandbits(63) | 1,
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
        """A spare serves a rank now: the next one is started."""
        self._clock.after(self._rng.randrange(1 * MS, 20 * MS), self._start_spare, worker.rank)

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
        for end in daemon.links.values():
            end.sever()
        unsure = self._table.change_in_part(before, self._rng) if before is not None else set()
        torn = self._table.tear(self._rng) if self.tears and self._rng.random() < 0.5 else None
        self._log("sidecar", "torn record: {}, half written: {}", torn, sorted(unsure))
        self._ledger.daemon_died(torn, unsure)
        self._clock.after(self._rng.randrange(100 * US, 60 * MS), self._start_daemon)

    def crash_worker(self, worker: Worker) -> None:
        """A worker's process has ended, whatever the reason; then it is reaped."""
        if worker.party.ended:
            return
        self._log("sidecar", "{} is dead", worker.name)
        self.deaths += 1
        worker.die()
        self._clock.after(self._rng.randrange(10 * US, 20 * MS), self._reap, worker)
        if worker.side is not None and worker.tether is not None:
            # The proof comes after all that was written before the death.
            seen_ns = max(worker.tether.all_come_ns, self._clock.now_ns) + self._rng.randrange(10 * US, 50 * MS)
            self._clock.at(seen_ns, worker.side.party.run, worker.side.prove, worker)

    def _reap(self, worker: Worker) -> None:
        if self.workers.pop(worker.id, None) is None:
            return
        self._log("sidecar", "{} is reaped", worker.name)
        self._ledger.reaped(worker.id)
        if self.daemon is not None:
            self.daemon.step(daemon_api.WorkerReaped(worker.id))
        self._clock.after(self._rng.randrange(1 * MS, 20 * MS), self._start_spare, worker.rank)

    def crash_all(self) -> None:
        """SIGKILL of the whole tree; `kvferry up` again once nobody of the old one is left."""
        self._log("sidecar", "is killed as a whole")
        self._is_down = True
        self.crash_daemon()
        for worker in list(self.workers.values()):
            self.crash_worker(worker)
        self._clock.after(self._rng.randrange(20 * MS, 100 * MS), self._start_again)

    def _start_again(self) -> None:
        if self.workers:
            self._clock.after(5 * MS, self._start_again)
        else:
            self.start()

    def _kill(self, worker_id: int, why: str) -> None:
        worker = self.workers.get(worker_id)
        if worker is None:
            return
        party = worker.party
        recently = party.went_on_ns and self._clock.now_ns - party.went_on_ns < 2 * S
        if not (party.stopped or party.ended or recently or self._settings.grace_ns < 5 * S):
            raise Broken(f"the daemon kills {worker.name}, which was owing nothing for long: {why}")
        self.kills += 1
        self._clock.after(self._rng.randrange(100 * US, 5 * MS), self.crash_worker, worker)

    # ---- resting ----------------------------------------------------------------------------------------

    def check_rest(self) -> None:
        """I6 of the sidecar."""
        if self.daemon is None:
            raise Broken("liveness: no daemon runs")
        self.daemon.check_rest()
        for worker in self.workers.values():
            if worker.party.ended:
                raise Broken(f"liveness: {worker.name} is dead and not reaped")
            worker.check_rest()
