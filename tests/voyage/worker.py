"""One worker process: the real core behind a simulated shell, from spare to its end.

    spare ──accept──▶ asking the daemon ──Attached──▶ SERVING ──link lost──▶ AWAY ──at rest: drained──▶ ASKING ─┐
      │                     └── Refused ──▶ exit         ▲                                                     │
      └── each Welcome is answered by Drained            └──────────────────── Attached ───────────────────────┘

As `gpu_worker/spare.py` and `loop.py` do it. What is added is a look at each byte that its copier touches.
"""

import random
from typing import TYPE_CHECKING, Any

from kvferry.gpu_worker import api as worker_api
from kvferry.gpu_worker.core import WorkerCore
from kvferry.proto.columns import spans, u8, u32, u64
from kvferry.proto.control import Attach, Attached, Drained, Hello, RankGone, Refused, Welcome
from kvferry.proto.hot import Cancel, Done, Plan
from kvferry.proto.layout import slot_bytes
from kvferry.proto.outcome import Kind, Outcome
from kvferry.proto.page import PageReader
from kvferry.proto.tether import Begin, CancelTickets, Detach, RankRegister, RankRegistered

from .books import Broken
from .clock import MS, Party, S
from .echo import Echo
from .ledger import Ledger
from .log import Log
from .memory import Copier, PoolFile
from .net import LinkEnd, StreamEnd

if TYPE_CHECKING:
    from .ranks import Rank
    from .sidecar import Sidecar

RETRY_NS = 15 * MS
ANSWER_NS = 4 * S
DRAIN_NS = 1 * S
LEAVE_NS = 5 * S


class Worker:
    """One worker's shell, serving at most one rank of one engine."""

    def __init__(
        self,
        worker: int,
        rank: int,
        party: Party,
        log: Log,
        rng: random.Random,
        ledger: Ledger,
        pool: PoolFile,
        sidecar: "Sidecar",
        settings: dict[str, Any],
        copier: dict[str, Any],
        echo: Echo,
    ) -> None:
        self.id = worker
        self.name = f"worker{rank}.{worker & 0xFFF:x}"
        self.rank = rank
        self.party = party
        self.core: WorkerCore | None = None
        self.side: Rank | None = None  # the simulated rank it serves: for checks only
        self.tether: StreamEnd | None = None
        self.link: LinkEnd | None = None
        self.copies: dict[int, tuple[int, Kind, list[int], list[int]]] = {}  # job not reported -> its plan
        self.owed: set[int] = set()  # tickets begun and not yet worded
        self.standing = "spare"
        self.copier: Copier
        self._log = log
        self._rng = rng
        self._ledger = ledger
        self._pool = pool
        self._settings = settings
        self._copier_settings = copier
        self._echo = echo
        self._sidecar = sidecar
        self._armed_ns: int | None = None
        self._attach: Attach | None = None
        self._register: RankRegister | None = None
        self._boot = 0
        self._next_boot = 0
        self._slots = 0
        self._rank_lost = self._leaving = False
        self._is_welcome = False  # the link is open: not before that is anything said but hello
        self._orphans: set[int] = set()  # jobs of a daemon that is gone
        self._ends_ns: int | None = None
        self._reach()

    @property
    def is_free(self) -> bool:
        """Whether a rank that knocks now is let in."""
        return self.side is None and self._boot != 0 and not self.party.stopped and not self.party.ended

    # ---- the daemon's side ------------------------------------------------------------------------

    def _reach(self) -> None:
        link = self._sidecar.connect(self.party, self._from_daemon, self._lose_daemon)
        if link is None:
            self.party.after(RETRY_NS, self._reach)
            return
        self.link = link
        self._is_welcome = False
        self._send(Hello(role="worker", software="voyage", pid=self.id & 0xFFFF))

    def _send(self, message: Any) -> None:
        if self.link is not None and not self.link.send(message):
            raise Broken(f"{self.name}: the link to the daemon is full or lost")

    def _lose_daemon(self) -> None:
        self._log(self.name, "has lost the daemon")
        self.link = None
        self._is_welcome = False
        self._next_boot = 0
        if self.core is not None:
            self.standing = "away"
            self._orphans = set(self.copies)
            self._step(worker_api.DaemonLost())
        self.party.after(RETRY_NS, self._reach)

    def _from_daemon(self, message: Any) -> None:
        self._log(self.name, "<- daemon: {}", message)
        match message:
            case Welcome(boot=boot) if self.core is None:
                self._boot = boot
                self._is_welcome = True
                self._send(Drained(worker=self.id, boot=boot))
                if self._attach is not None:
                    self._send(self._attach)
            case Welcome(boot=boot):
                self._next_boot = boot
                self._serve_next_boot()
            case _ if self._leaving:
                pass
            case Attached(slots=slots) if self.core is None:
                self._serve(slots)
            case Attached(slots=slots) if self.standing == "asking":
                if slots > self._slots:
                    self._leave(f"the pool has {slots} slots now")
                else:
                    self.standing = "serving"
            case Refused() if self.core is None:
                if self.tether is not None:
                    self.tether.send(message)
                self.exit()
            case Refused():
                self._leave(message.code)
            case Plan() if self.standing == "serving":
                self._note_plan(message)
                self._hot(worker_api.Planned(message))
            case Cancel() if self.standing == "serving":
                self._hot(worker_api.JobsCancelled(message))
            case Plan() | Cancel():
                pass
            case _:
                raise Broken(f"{self.name}: the daemon sends {message}")

    def _serve_next_boot(self) -> None:
        """Nothing of the old link is in flight: say so, and attach the rank over the new one."""
        assert self.core is not None and self._attach is not None
        if not self._next_boot or self._leaving or self._rank_lost or not self.core.at_rest():
            return
        if self.copier.busy:
            raise Broken(f"rule 10: {self.name} says that it has drained, and copies {list(self.copier.busy)}")
        boot, self._next_boot = self._next_boot, 0
        self.copies.clear()
        self._echo.forget()
        self._send(Drained(worker=self.id, boot=boot))
        self._step(worker_api.DaemonFound(boot))
        self.standing = "asking"
        self.party.after(ANSWER_NS, self._give_up, self.link)
        self._send(self._attach)

    def _give_up(self, link: LinkEnd) -> None:
        if self.link is link and self.standing == "asking":
            link.close()
            self._lose_daemon()

    def _leave(self, why: str) -> None:
        """Serve no more: what runs ends, then the tether closes and the rank finds another worker."""
        self._log(self.name, "leaves: {}", why)
        self._leaving = True
        self._step(worker_api.DaemonLost())
        self._end_within(LEAVE_NS)

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
            self._ledger.tell(job, "{} has its plan", self.name)

    # ---- the rank's side --------------------------------------------------------------------------

    def accept(self, side: "Rank", tether: StreamEnd) -> None:
        """A rank has knocked: this worker serves it and no other."""
        self.side, self.tether = side, tether
        self._sidecar.taken(self)

    def from_rank(self, message: Any) -> None:
        """A message came in on the tether."""
        self._log(self.name, "<- rank: {}", message)
        match message:
            case RankRegister():
                self._register = message
                group = message.layout.groups[0]
                self._attach = Attach(
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
                self.standing = "asking"
                self.party.after(ANSWER_NS, self._refuse_late)
                if self._is_welcome:
                    self._send(self._attach)
            case Begin():
                self.owed.update(u64(message.tickets).tolist())
                self._hot(worker_api.Begun(message))
            case CancelTickets():
                self._hot(worker_api.TicketsCancelled(message))
            case Detach():
                self.lose_rank()
            case _:
                raise Broken(f"{self.name}: the rank sends {message}")

    def _refuse_late(self) -> None:
        if self.core is None and self.tether is not None:
            self.tether.send(Refused(code="daemon.lost", text="no answer"))
            self.exit()

    def lose_rank(self) -> None:
        """The tether has ended."""
        self._log(self.name, "has lost its rank")
        if self.core is None:
            self.exit()
        elif not self._rank_lost:
            self._rank_lost = True
            self.owed.clear()
            self._step(worker_api.RankLost())
            self._end_within(DRAIN_NS)

    def _serve(self, slots: int) -> None:
        register = self._register
        assert register is not None and self.side is not None and self.tether is not None
        group = register.layout.groups[0]
        settings = worker_api.WorkerSettings(
            payload_bytes=(group.payload_bytes,),
            num_blocks=group.num_blocks,
            num_slots=slots,
            boot=self._boot,
            **self._settings,
        )
        self.copier = Copier(
            self.party, self._rng, self.side.memory, self._pool, self._touch, self._copied, **self._copier_settings
        )
        self.core = WorkerCore(settings, PageReader(memoryview(self.side.page)), self._pool)
        self.standing, self._slots = "serving", slots
        self.tether.send(
            RankRegistered(worker=self.id, boot=self._boot, pid=self.id & 0xFFFF, mark_mode="word", slots=slots)
        )

    # ---- the core's side --------------------------------------------------------------------------

    def _hot(self, event: Any) -> None:
        if self.core is None:
            raise Broken(f"{self.name} hears {event} before it serves")
        self._step(event)
        self._echo.remember(event)
        if not self.party.ended and (old := self._echo.draw()) is not None:
            self._log(self.name, "again: {}", old)
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
        assert self.core is not None and self.tether is not None
        for action in self.core.step(event, self.party.now_ns):
            match action:
                case worker_api.SubmitCopy():
                    self._log(self.name, "copies {}", action)
                    self.copier.submit(action)
                case worker_api.TellDaemon(message):
                    self._over(message)
                    self._send(message)
                case worker_api.TellRank(message):
                    worded = u64(message.tickets).tolist()
                    self.owed.difference_update(worded)
                    # A dead daemon's jobs are over with their word: nobody is told of them.
                    for job in [job for job in self._orphans & self.copies.keys() if self.copies[job][0] in worded]:
                        del self.copies[job]
                    self._log(self.name, "-> rank: {}", message)
                    self.tether.send(message)
        self._arm()
        self._serve_next_boot()
        if self._ends_ns is not None and self.core.at_rest():
            self.exit()

    def _over(self, message: Done) -> None:
        """What is reported must touch nothing any more."""
        assert self.side is not None
        self._log(self.name, "-> daemon: {}", message)
        for job, outcome in zip(u64(message.jobs).tolist(), u8(message.outcomes).tolist(), strict=True):
            copy = self.copies.pop(job, None)
            if copy is None:
                raise Broken(f"I4: {self.name} reports job {job:x} twice, or one it was never given")
            ticket, kind, slots, blocks = copy
            self._ledger.tell(job, "{} says {}", self.name, Outcome(outcome).name)
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
        assert self.side is not None
        kind = batch.kind
        jobs = {
            job: ticket
            for job, (ticket, of_kind, slots, blocks) in self.copies.items()
            if of_kind == kind and slot in slots and block in blocks
        }
        if not jobs:
            raise Broken(f"law 1: {self.name} touches block {block} and slot {slot} for no job that it has to report")
        self._ledger.may_touch(kind, slot, jobs.keys())
        # A plan that this rank never began may name the same places as one that it did.
        begun = [ticket for ticket in jobs.values() if ticket in self.side.begun]
        self.side.may_touch(begun or list(jobs.values()), kind, block)

    def _copied(self, token: int, ok: bool) -> None:
        self._log(self.name, "copied {} {}", token, ok)
        self._step(worker_api.Copied(token, ok))

    def _arm(self) -> None:
        assert self.core is not None
        due = self.core.next_due_ns(self.party.now_ns)
        if due is not None and (self._armed_ns is None or due < self._armed_ns):
            self._armed_ns = due
            self.party.at(due, self._tick, due)

    def _tick(self, armed_ns: int) -> None:
        if self._armed_ns == armed_ns:
            self._armed_ns = None
            self._step(worker_api.TimePassed())

    # ---- the end ----------------------------------------------------------------------------------

    def _end_within(self, delay_ns: int) -> None:
        assert self.core is not None
        if self._ends_ns is None:
            self._ends_ns = self.party.now_ns + delay_ns
            self.party.after(delay_ns, self.exit)
        if self.core.at_rest():
            self.exit()

    def exit(self) -> None:
        """It ends by itself, in good order."""
        if self.party.ended:
            return
        self._log(self.name, "exits")
        if self.standing == "serving":
            self._send(RankGone())
        self._sidecar.crash_worker(self, 0)

    def die(self) -> None:
        """The process is gone: nothing moves, nothing is said any more."""
        self.party.end()
        self.copies.clear()
        if self.link is not None:
            self.link.sever()
        if self.tether is not None:
            self.tether.close()

    def check_rest(self) -> None:
        """I6 of one worker."""
        if self.core is None or self.party.ended:
            return
        if not self.core.at_rest() or self.copies or self.owed or self.copier.busy:
            raise Broken(f"I6: {self.name} is not at rest: {self.core.describe()} {self.copies} {self.owed}")
        if self.link is None or self.link.link.in_flight:
            raise Broken(f"I6: {self.name}'s link is away or has unacknowledged messages")
