"""One boot of the daemon: the real core behind a simulated shell.

    LinkEnd ──message──▶ Daemon ──Received──▶ Core ──Send──▶ LinkEnd       every step also goes into the ledger

A shell's whole work is here in a few lines: turn what comes in into events, carry out actions, pass time when it
is due. What is added is what a test wants: a second delivery of an old message now and then (I5), and an end at
any moment: between two actions of one step (`fuse`), and amid the records that a step writes (`dies_amid`).
"""

from collections.abc import Callable
from typing import Any

from kvferry.proto.control import Refused
from kvferry.proto.hot import Done, Renew, Step
from kvferry.scheduler_daemon.core import api as daemon_api
from kvferry.scheduler_daemon.core.core import Core
from kvferry.scheduler_daemon.core.jobs import State
from kvferry.scheduler_daemon.core.slots import Table

from .books import Broken
from .clock import Party, S
from .echo import Echo
from .ledger import Ledger
from .log import Log
from .net import LinkEnd
from .table import TableBytes

LATE_NS = 1 * S  # for the bytes that an engine has in flight, at the least bandwidth: more than any voyage has
# Said again, these must change nothing. A lookup is a question: asked again it is leased again, until that lease ends.
HOT = (Step, Renew, Done)
# Refusals that pass by themselves: the last worker or link of the same engine is not yet known to be gone.
PASSING = frozenset({"register.rank_taken", "register.engine_taken", "worker.busy", "daemon.lost", "frame.link"})


class Daemon:
    """The daemon's shell, from one start to its death."""

    def __init__(
        self,
        party: Party,
        log: Log,
        ledger: Ledger,
        settings: daemon_api.CoreSettings,
        table: TableBytes,
        echo: Echo,
        kill: Callable[[int, str], None],
        burnt: Callable[[Table | None], None],
    ) -> None:
        self.party = party
        self.settings = settings
        self.links: dict[int, LinkEnd] = {}
        self.steps = 0
        self.is_listed = False  # it has heard who outlived the last one
        self.fuse: int | None = None  # actions that are still carried out before the end
        self.dies_amid = False  # the next time that it writes records
        self._log = log
        self._ledger = ledger
        self._table = table
        self._echo = echo
        self._kill = kill
        self._burnt = burnt
        self._armed_ns: int | None = None
        self.core = Core(settings, table.make, table.recover())
        ledger.daemon_starts(settings.boot)

    def accept(self, end: LinkEnd) -> None:
        """A peer has connected."""
        self.links[end.link.id] = end

    def lose(self, link: int) -> None:
        """A link is over."""
        if self.links.pop(link, None) is not None:
            self._log("daemon", "loses {:x}", link)
            self.step(daemon_api.LinkLost(link))

    def hear(self, link: int, message: Any) -> None:
        """A message came in on a link."""
        if link not in self.links:
            return
        self._log("daemon", "<- {:x}: {}", link, message)
        self.step(daemon_api.Received(link, message))
        if isinstance(message, HOT):
            self._echo.remember((link, message))
        if (old := self._echo.draw()) is not None and old[0] in self.links and not self.party.ended:
            self._log("daemon", "<- {:x} again: {}", *old)
            before = self._gauges()
            self.step(daemon_api.Received(*old))
            if self._gauges() != before:
                raise Broken(f"I5: {old[1].TAG} again turns {before} into {self._gauges()}")

    def _gauges(self) -> Any:
        status = self.core.status()
        return self.core.at_rest(), status["slots"], status["namespaces"], status["jobs"]

    def step(self, event: Any) -> None:
        """One step of the core, its books checked against the ledger's, its actions carried out."""
        if self.party.ended:
            return
        self.steps += 1
        before = self._table.records.copy() if self.dies_amid else None
        actions = self.core.step(event, self.party.now_ns)
        if before is not None and len(before) and before.tobytes() != self._table.records.tobytes():
            self._log("daemon", "dies amid {}", event)
            self._burnt(before)
            return
        self._ledger.saw(event, actions)
        self.core.check()
        self._check_bounds()
        for action in actions:
            if self.fuse is not None:
                self.fuse -= 1
                if self.fuse < 0:
                    self._burnt(None)
                    return
            match action:
                case daemon_api.Send(link, message):
                    self._log("daemon", "-> {:x}: {}", link, message)
                    if isinstance(message, Refused) and message.code not in {*PASSING, "reset.namespace"}:
                        raise Broken(f"the daemon refuses {message.code}: {message.text}")
                    if link in self.links and not self.links[link].send(message):
                        raise Broken(f"the daemon's link {link:x} is full")
                case daemon_api.CloseLink(link):
                    self._log("daemon", "closes {:x}", link)
                    self.links.pop(link).close()
                case daemon_api.KillWorker(worker, why):
                    self._log("daemon", "kills {:x}: {}", worker, why)
                    self._kill(worker, why)
                case daemon_api.KeepEpochs(epochs):
                    self._table.keep_epochs(epochs)
                    self._ledger.epochs_kept(epochs)
                case daemon_api.Note(text):
                    self._log("daemon", "notes: {}", text)
        due = self.core.next_due_ns()
        if due is not None and (self._armed_ns is None or due < self._armed_ns):
            self._armed_ns = due
            self.party.at(due, self._tick, due)

    def _tick(self, armed_ns: int) -> None:
        if self._armed_ns == armed_ns:
            self._armed_ns = None
            self.step(daemon_api.TimePassed())

    def _check_bounds(self) -> None:
        """Rules 7 and 9."""
        desk = self.core._desk
        for job in desk.jobs:
            age_ns = desk.now_ns - job.accepted_ns
            if job.state is State.COPYING and age_ns > desk.settings.job_ns + LATE_NS:
                raise Broken(f"rule 7: job {job.id:x} goes on {age_ns / S:.1f} s after its acceptance")
        if desk.pool is not None:
            most = int(desk.pool.num_slots * desk.settings.lease_share)
            if desk.pool.num_leased > most:
                raise Broken(f"rule 9: leases hold {desk.pool.num_leased} slots of at most {most}")

    def check_rest(self) -> None:
        """I6 of the daemon."""
        if any(self.core.at_rest().values()):
            raise Broken(f"I6: the daemon is not at rest: {self.core.at_rest()}")
        ready = self.core.status()["slots"]["ready"]
        if ready != len(self._ledger.ready):
            raise Broken(f"I6: {ready} slots are READY, {len(self._ledger.ready)} keys are held")
        for link, end in self.links.items():
            if end.link.in_flight:
                raise Broken(f"I6: the daemon's link {link:x} has unacknowledged messages")
