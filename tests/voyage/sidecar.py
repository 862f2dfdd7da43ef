"""The daemon and its workers: real cores behind simulated shells.

    LinkEnd ──message──▶ Daemon ──Received──▶ Core ──Send──▶ LinkEnd       every step also goes into the ledger
    LinkEnd, StreamEnd ──▶ Worker ──▶ WorkerCore ──SubmitCopy──▶ Copier

A shell's whole work is here in a few lines: turn what comes in into events, carry out actions, pass time
when it is due. What is added is what a test wants: a second delivery of an old message now and then (I5),
and a look at each byte that a copier touches.
"""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvferry.gpu_worker import api as worker_api
from kvferry.gpu_worker.core import WorkerCore
from kvferry.proto.columns import spans, u8, u32, u64
from kvferry.proto.control import Attach, Attached, Hello, RankGone, Refused, Welcome
from kvferry.proto.hot import Cancel, Done, Plan, Renew, Step
from kvferry.proto.layout import slot_bytes
from kvferry.proto.outcome import Kind, Outcome
from kvferry.proto.page import PageReader
from kvferry.proto.tether import Begin, CancelTickets, Detach, RankRegister, RankRegistered
from kvferry.scheduler_daemon.core import api as daemon_api
from kvferry.scheduler_daemon.core.core import Core

from .clock import Clock
from .echo import Echo
from .ledger import Broken, Ledger
from .log import Log
from .memory import Copier, PoolFile
from .net import LinkEnd, Network, StreamEnd

if TYPE_CHECKING:
    from .ranks import Rank

# Said again, these must change nothing. A lookup is a question: asked again it is leased again, until that lease ends.
HOT = (Step, Renew, Done)


class Daemon:
    """The daemon's shell."""

    def __init__(
        self,
        clock: Clock,
        log: Log,
        ledger: Ledger,
        settings: daemon_api.CoreSettings,
        echo: Echo,
        kill: Callable[[int], None],
    ) -> None:
        self.core = Core(settings)
        self.links: dict[int, LinkEnd] = {}
        self.steps = 0
        self._clock = clock
        self._log = log
        self._ledger = ledger
        self._echo = echo
        self._kill = kill
        self._armed_ns: int | None = None

    def accept(self, end: LinkEnd) -> None:
        """A peer has connected."""
        self.links[end.link.id] = end

    def hear(self, link: int, message: Any) -> None:
        """A message came in on a link."""
        self._log("daemon", "<- {:x}: {}", link, message)
        self.step(daemon_api.Received(link, message))
        if isinstance(message, HOT):
            self._echo.remember((link, message))
        if (old := self._echo.draw()) is not None and old[0] in self.links:
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
        self.steps += 1
        actions = self.core.step(event, self._clock.now_ns)
        self._ledger.saw(event, actions)
        self.core.check()
        for action in actions:
            match action:
                case daemon_api.Send(link, message):
                    self._log("daemon", "-> {:x}: {}", link, message)
                    if isinstance(message, Refused):
                        raise Broken(f"the daemon refuses {message.code}: {message.text}")
                    if link in self.links:
                        self.links[link].send(message)
                case daemon_api.CloseLink(link):
                    self._log("daemon", "closes {:x}", link)
                    self.links.pop(link, None)
                case daemon_api.KillWorker(worker, why):
                    self._log("daemon", "kills {:x}: {}", worker, why)
                    self._kill(worker)
                case daemon_api.Note(text):
                    self._log("daemon", "notes: {}", text)
        due = self.core.next_due_ns()
        if due is not None and (self._armed_ns is None or due < self._armed_ns):
            self._armed_ns = due
            self._clock.at(due, self._tick, due)

    def _tick(self, armed_ns: int) -> None:
        if self._armed_ns == armed_ns:
            self._armed_ns = None
            self.step(daemon_api.TimePassed())

    def check_rest(self) -> None:
        """I6 of the daemon."""
        if any(self.core.at_rest().values()):
            raise Broken(f"I6: the daemon is not at rest: {self.core.at_rest()}")
        for link, end in self.links.items():
            if end.link.in_flight:
                raise Broken(f"I6: the daemon's link {link:x} has unacknowledged messages")


class Worker:
    """One worker's shell, serving one rank of one engine."""

    def __init__(
        self,
        worker: int,
        rank: int,
        clock: Clock,
        log: Log,
        net: Network,
        rng: random.Random,
        ledger: Ledger,
        pool: PoolFile,
        daemon: Daemon,
        settings: dict[str, Any],
        copier: dict[str, Any],
        echo: Echo,
    ) -> None:
        self.id = worker
        self.name = f"worker{rank}.{worker & 0xFF:x}"
        self.rank = rank
        self.core: WorkerCore | None = None
        self.dead = False
        self.side: Rank  # the simulated rank it serves: for checks only
        self.copies: dict[int, tuple[int, Kind, list[int], list[int]]] = {}  # job not reported -> its plan
        self.owed: set[int] = set()  # tickets begun and not yet worded
        self._clock = clock
        self._log = log
        self._rng = rng
        self._ledger = ledger
        self._pool = pool
        self._settings = settings
        self._copier_settings = copier
        self._echo = echo
        self._daemon = daemon
        self._armed_ns: int | None = None
        self._register: RankRegister | None = None
        self._slots = 0
        self.link, far = LinkEnd.pair(
            net, rng.getrandbits(63) | 1, self._from_daemon, lambda m: daemon.hear(far.link.id, m)
        )
        daemon.accept(far)
        self.tether: StreamEnd
        self.copier: Copier
        self._send(Hello(role="worker", software="voyage", pid=worker & 0xFFFF))

    # ---- the daemon's side ------------------------------------------------------------------------

    def _send(self, message: Any) -> None:
        if not self.link.send(message):
            raise Broken(f"{self.name}: the link to the daemon is full or lost")

    def _from_daemon(self, message: Any) -> None:
        self._log(self.name, "<- daemon: {}", message)
        match message:
            case Welcome():
                pass
            case Attached(slots=slots):
                self._serve(slots)
            case Plan():
                self._note_plan(message)
                self._hot(worker_api.Planned(message))
            case Cancel():
                self._hot(worker_api.JobsCancelled(message))
            case _:
                raise Broken(f"{self.name}: the daemon sends {message}")

    def _note_plan(self, plan: Plan) -> None:
        slots, blocks = u32(plan.slots).tolist(), u32(plan.blocks).tolist()
        rows = zip(
            u64(plan.tickets).tolist(),
            u64(plan.jobs).tolist(),
            u8(plan.kinds).tolist(),
            spans(plan.counts),
            strict=True,
        )
        for ticket, job, kind, (start, stop) in rows:
            self.copies[job] = (ticket, Kind(kind), slots[start:stop], blocks[start:stop])

    # ---- the rank's side --------------------------------------------------------------------------

    def from_rank(self, message: Any) -> None:
        """A message came in on the tether."""
        self._log(self.name, "<- rank: {}", message)
        match message:
            case RankRegister():
                self._register = message
                group = message.layout.groups[0]
                self._send(
                    Attach(
                        worker=self.id,
                        engine_id=message.engine_id,
                        rank=message.rank,
                        world_size=message.world_size,
                        layout_digest=message.layout.digest,
                        payload_bytes=(group.payload_bytes,),
                        block_tokens=(group.block_tokens,),
                        num_blocks=group.num_blocks,
                        pool_bytes=len(self._pool.gen_open) * slot_bytes(group.payload_bytes),
                        facts=message.facts,
                    )
                )
            case Begin():
                self.owed.update(u64(message.tickets).tolist())
                self._hot(worker_api.Begun(message))
            case CancelTickets():
                self._hot(worker_api.TicketsCancelled(message))
            case Detach():
                self._step(worker_api.RankLost())
                self._send(RankGone())
            case _:
                raise Broken(f"{self.name}: the rank sends {message}")

    def _serve(self, slots: int) -> None:
        register = self._register
        assert register is not None
        group = register.layout.groups[0]
        settings = worker_api.WorkerSettings(
            payload_bytes=(group.payload_bytes,),
            num_blocks=group.num_blocks,
            num_slots=slots,
            **self._settings,
        )
        self.copier = Copier(
            self._clock, self._rng, self.side.memory, self._pool, self._touch, self._copied, **self._copier_settings
        )
        self.core = WorkerCore(settings, PageReader(memoryview(self.side.page)), self._pool)
        self.tether.send(RankRegistered(worker=self.id, boot=1, pid=self.id & 0xFFFF, mark_mode="word", slots=slots))

    # ---- the core's side --------------------------------------------------------------------------

    def _hot(self, event: Any) -> None:
        self._step(event)
        self._echo.remember(event)
        if (old := self._echo.draw()) is not None:
            self._log(self.name, "again: {}", old)
            assert self.core is not None
            before = self._gauges()
            self._step(old)
            if self._gauges() != before:
                raise Broken(f"I5: {self.name}: {old} again turns {before} into {self._gauges()}")

    def _gauges(self) -> Any:
        assert self.core is not None
        told = self.core.describe()
        del told["counters"]
        return told, sorted(self.copies), sorted(self.copier.busy)

    def _step(self, event: Any) -> None:
        assert self.core is not None
        for action in self.core.step(event, self._clock.now_ns):
            match action:
                case worker_api.SubmitCopy():
                    self._log(self.name, "copies {}", action)
                    self.copier.submit(action)
                case worker_api.TellDaemon(message):
                    self._over(message)
                    self._send(message)
                case worker_api.TellRank(message):
                    self.owed.difference_update(u64(message.tickets).tolist())
                    self._log(self.name, "-> rank: {}", message)
                    self.tether.send(message)
        self._arm()

    def _over(self, message: Done) -> None:
        """What is reported must touch nothing any more."""
        self._log(self.name, "-> daemon: {}", message)
        for job, outcome in zip(u64(message.jobs).tolist(), u8(message.outcomes).tolist(), strict=True):
            copy = self.copies.pop(job, None)
            if copy is None:
                raise Broken(f"I4: {self.name} reports job {job:x} twice, or one it was never given")
            ticket, kind, slots, blocks = copy
            if kind == Kind.STORE and outcome == Outcome.OK and ticket in self.side.revoked:
                raise Broken(
                    f"I3: {self.name} says OK for store {ticket}, whose revoke was written before its last byte"
                )
            for batch in self.copier.busy.values():
                if batch.kind == kind and set(zip(batch.slots.tolist(), batch.blocks.tolist(), strict=True)) & set(
                    zip(slots, blocks, strict=True)
                ):
                    raise Broken(
                        f"law 1: {self.name} reports ticket {ticket} {Outcome(outcome).name} and still copies it"
                    )

    def _touch(self, batch: worker_api.SubmitCopy, slot: int, block: int) -> None:
        kind = batch.kind
        self._ledger.may_touch(kind, slot)
        tickets = [
            ticket
            for ticket, of_kind, slots, blocks in self.copies.values()
            if of_kind == kind and slot in slots and block in blocks
        ]
        if not tickets:
            raise Broken(f"law 1: {self.name} touches block {block} and slot {slot} for no job that it has to report")
        # A plan that this rank never began may name the same places as one that it did.
        self.side.may_touch([ticket for ticket in tickets if ticket in self.side.begun] or tickets, kind, block)

    def _copied(self, token: int, ok: bool) -> None:
        self._log(self.name, "copied {} {}", token, ok)
        self._step(worker_api.Copied(token, ok))

    def _arm(self) -> None:
        assert self.core is not None
        due = self.core.next_due_ns(self._clock.now_ns)
        if due is not None and (self._armed_ns is None or due < self._armed_ns):
            self._armed_ns = due
            self._clock.at(due, self._tick, due)

    def _tick(self, armed_ns: int) -> None:
        if self._armed_ns == armed_ns and not self.dead:
            self._armed_ns = None
            self._step(worker_api.TimePassed())

    # ---- faults -----------------------------------------------------------------------------------

    def die(self) -> None:
        """The process is gone: nothing moves, nothing is said any more."""
        self.dead = True
        self.link.cut = self.tether.cut = True
        if self.core is not None:
            self.copier.cut = True

    def check_rest(self) -> None:
        """I6 of one worker."""
        if self.core is None or self.dead:
            return
        if not self.core.at_rest() or self.copies or self.owed or self.copier.busy:
            raise Broken(f"I6: {self.name} is not at rest: {self.core.describe()} {self.copies} {self.owed}")
