"""One engine rank: a real rank core, a shared page, and a simulated device that computes.

    host    obey(work): revoke ─ begin_loads(m1) ─ launch forward ─ begin_stores(m2)
    stream              zero ─ [mark m1] ─ read, write first halves ── read, write second halves ─ [mark m2] ─ report

On a CPU engine the host is the stream: it moves the marks itself and begins a step's stores after its
forward. On a streaming engine the host runs ahead, announces marks that the stream reaches later, and is
already busy with the next step meanwhile. Where it holds begins back, as a device wants that cannot write marks,
it sends them when it looks and finds the stream past them.

It finds its worker as a rank client does: knock at the socket, show the memory, wait for the verdict; again after
each loss, under the same page and core. A load of a lost worker stays open until the proof of that worker's death.
"""

import random
from collections import deque
from collections.abc import Callable
from typing import Any

from kvferry.client.rank_core import RankCore
from kvferry.client.types import RankReport
from kvferry.proto import limits
from kvferry.proto.columns import u64
from kvferry.proto.control import Refused
from kvferry.proto.outcome import Kind, Outcome
from kvferry.proto.page import PageWriter
from kvferry.proto.tether import Begin, RankRegister, RankRegistered, Words

from .books import Broken, Meaning
from .clock import MS, US, Party
from .daemon import PASSING
from .ledger import Ledger
from .log import Log
from .memory import ZERO, Halves, Stamps
from .net import Network, StreamEnd
from .requests import Work
from .sidecar import Sidecar
from .worker import Worker


class Rank:
    """One rank of one engine."""

    def __init__(
        self,
        name: str,
        rank: int,
        party: Party,
        log: Log,
        rng: random.Random,
        net: Network,
        sidecar: Sidecar,
        register: RankRegister,
        stamps: Stamps,
        ledger: Ledger,
        num_blocks: int,
        is_stream: bool,
        is_held: bool,
        forward_ns: tuple[int, int],
        load_timeout_ns: int,
        report: Callable[[int, int, RankReport], None],
    ) -> None:
        self.name = name
        self.rank = rank
        self.memory = Halves(num_blocks)
        self.page = bytearray(limits.PAGE_BYTES)
        self.core = RankCore(load_timeout_ns)
        self.party = party
        self.tether: StreamEnd | None = None
        self.workers: list[Worker] = []  # that serve or served it and may be alive
        self._net = net
        self._sidecar = sidecar
        self._register = register
        self._writer = PageWriter(memoryview(self.page))
        self._log = log
        self._rng = rng
        self._stamps = stamps
        self._ledger = ledger
        self._is_stream = is_stream
        self._is_held = is_held and is_stream
        self._held: dict[int, int] = {}  # ticket -> mark that its begin waits for, though it does not say so
        self._forward_ns = forward_ns
        self._report = report
        self._announced = 0  # marks promised
        self._stream_free_ns = 0
        self._todo: deque[Work] = deque()
        self._is_busy = False
        self._arrives_ns = 0
        self._reports_ns = 0
        self.begun: dict[int, int] = {}  # ticket -> mark
        self._begun_at: dict[int, int] = {}  # ticket -> the worker that was told: no other copies for it
        self.revoked: set[int] = set()
        self._loading: dict[int, tuple[Meaning, tuple[tuple[int, bytes], ...]]] = {}
        self._reported: set[int] = set()
        self._armed_ns: int | None = None

    # ---- the tether -----------------------------------------------------------------------------------

    def knock(self) -> None:
        """Look for a worker, and show it the memory."""
        if self.tether is not None:
            return
        worker = self._sidecar.spare(self.rank)
        if worker is None:
            self._knock_again()
            return
        near = StreamEnd(
            self._net,
            random.Random(self._rng.getrandbits(64)),
            self.party,
            lambda message: self._hear(near, worker, message),
            lambda: self._lose(near),
        )
        far = StreamEnd(
            self._net, random.Random(self._rng.getrandbits(64)), worker.party, worker.from_rank, worker.lose_rank
        )
        StreamEnd.join(near, far)
        self.tether = near
        self.workers.append(worker)
        worker.accept(self, far)
        near.send(self._register)

    def _knock_again(self) -> None:
        self.party.after(self._rng.randrange(5 * MS, 60 * MS), self.knock)

    def _hear(self, tether: StreamEnd, worker: Worker, message: Any) -> None:
        if tether is not self.tether:
            return
        self._log(self.name, "<- worker: {}", message)
        match message:
            case RankRegistered(worker=number):
                self.core.attach(number)
                self._flush()
            case Words():
                self.core.on_message(message, worker.id)
            case Refused(code=code) if code in PASSING:
                self._lose(tether)
            case _:
                raise Broken(f"{self.name}: its worker sends {message}")

    def _lose(self, tether: StreamEnd) -> None:
        """The tether has ended: a notice, no proof."""
        if tether is self.tether:
            self._log(self.name, "has lost its worker")
            tether.close()
            self.tether = None
            self.core.lost()
            self._knock_again()

    def prove(self, worker: Worker) -> None:
        """The worker's pidfd says that it is dead."""
        self._log(self.name, "knows {} dead", worker.name)
        if worker in self.workers:
            self.workers.remove(worker)
        if self.tether is not None and self.tether.peer is worker.tether:
            self._lose(self.tether)
        self.core.dead(worker.id)

    def break_tether(self) -> None:
        """The connection ends though both processes live."""
        if self.tether is not None:
            self.tether.snap()

    def die(self) -> None:
        """The process is gone."""
        self.party.end()
        if self.tether is not None:
            self.tether.close()

    def _flush(self) -> None:
        for message in self.core.outgoing():
            self._log(self.name, "-> worker: {}", message)
            if isinstance(message, Begin):
                tickets = u64(message.tickets).tolist()
                self.begun.update((ticket, self._held.get(ticket, message.mark)) for ticket in tickets)
                self._begun_at.update(dict.fromkeys(tickets, self.core.worker))
            if self.tether is not None:
                self.tether.send(message)
        due = self.core.next_due_ns()
        if due is not None and (self._armed_ns is None or due < self._armed_ns):
            self._armed_ns = due
            self.party.at(due, self._tick, due)

    def _tick(self, armed_ns: int) -> None:
        if self._armed_ns == armed_ns:
            self._armed_ns = None
            self.core.tick(self.party.now_ns)
            self._flush()

    # ---- work -----------------------------------------------------------------------------------------

    def send(self, work: Work) -> None:
        """The scheduler hands over one step; steps arrive in order."""
        self._arrives_ns = max(self._arrives_ns, self.party.now_ns + self._rng.randrange(20 * US, 3 * MS))
        self.party.at(self._arrives_ns, self._take, work)

    def _take(self, work: Work) -> None:
        self._todo.append(work)
        self._obey_next()

    def _obey_next(self) -> None:
        """A host that is the stream takes the next step when it has done the last one."""
        while self._todo and not self._is_busy:
            self._is_busy = not self._is_stream
            self._obey(self._todo.popleft())

    def _obey(self, work: Work) -> None:
        now = self.party.now_ns
        directive = work.directive
        if directive.revokes:
            self._writer.revoke(directive.revokes)
            self.revoked.update(directive.revokes)
            self.core.withdraw(directive.revokes)
        self._loading.update(work.loading)
        marks = (self._announced + 1, self._announced + 2)
        self._announced += 2
        if self._is_held:
            self._held.update((ticket, marks[0]) for ticket, _ in directive.loads)
            self._held.update((ticket, marks[1]) for ticket in directive.stores)
            self.core.begin_loads(directive, 0, now, hold=marks[0])
            self.core.begin_stores(directive, 0, hold=marks[1])
            self._let_go()
        elif self._is_stream:
            self.core.begin_loads(directive, marks[0], now)
            self.core.begin_stores(directive, marks[1])
            self._flush()
        starts = max(now, self._stream_free_ns) + self._rng.randrange(5 * US, 200 * US)
        ends = starts + self._rng.randrange(*self._forward_ns)
        self._stream_free_ns = ends + 1
        self.party.at(starts, self._start, work, marks[0])
        self.party.at(ends, self._end, work, marks[1])

    def _let_go(self) -> None:
        """The host looks how far the stream is."""
        self.core.release(self._writer.mark())
        self._flush()

    def _signal(self, mark: int) -> None:
        if self._writer.signal() != mark:
            raise Broken(f"{self.name}: mark {mark} was announced, {self._writer.mark()} was reached")

    def _start(self, work: Work, mark: int) -> None:
        for block in work.zeros:
            self._overwrite(block)
            self.memory.write(block, ZERO)
        self._signal(mark)
        if not self._is_stream:
            self.core.begin_loads(work.directive, mark, self.party.now_ns)
            self._flush()
        self._read(work)
        for block, key in work.writes:
            self._overwrite(block)
            self.memory.half[0][block] = self._stamps.of(work.meaning, key, self.rank)

    def _end(self, work: Work, mark: int) -> None:
        self._read(work)
        for block, key in work.writes:
            self._overwrite(block)
            self.memory.half[1][block] = self._stamps.of(work.meaning, key, self.rank)
        self._signal(mark)
        if self._is_held:
            self.party.after(self._rng.randrange(10 * US, 5 * MS), self._let_go)
        if not self._is_stream:
            self.core.begin_stores(work.directive, mark)
            self._flush()
        report = self.core.poll()
        for end in report.loads:
            if end.ticket in self._reported:
                raise Broken(f"I4: {self.name} reports load {end.ticket} twice")
            self._reported.add(end.ticket)
            meaning, blocks = self._loading.pop(end.ticket)
            if end.ok:
                for block, key in blocks:
                    self._holds(block, meaning, key, f"I1: load {end.ticket} ended OK")
            elif not end.failed_blocks or not {block for block, _ in blocks}.issuperset(end.failed_blocks):
                raise Broken(
                    f"I4: {self.name}: load {end.ticket} failed {Outcome(end.outcome).name} naming {end.failed_blocks}"
                )
        self._log(self.name, "did step {}: {}", work.step, report)
        self._reports_ns = max(self._reports_ns, self.party.now_ns + self._rng.randrange(20 * US, 2 * MS))
        self.party.at(self._reports_ns, self._report, self.rank, work.step, report)
        self._is_busy = False
        self._obey_next()

    # ---- checks ---------------------------------------------------------------------------------------

    def _holds(self, block: int, meaning: Meaning, key: bytes, why: str) -> None:
        wanted = self._stamps.of(meaning, key, self.rank)
        if not self.memory.holds(block, wanted):
            held = self.memory.text(block, self._stamps)
            raise Broken(f"{why}: {self.name} block {block} holds {held}, not {self._stamps.text(wanted)}")

    def _read(self, work: Work) -> None:
        for block, key in work.reads:
            self._holds(block, work.meaning, key, f"I1: step {work.step} reads")

    def _overwrite(self, block: int) -> None:
        """New contents come into a block: whatever may still be published must not be read from it."""
        reached = self._writer.mark()
        copies = [(worker.id, *item) for worker in self.workers for item in worker.copies.items()]
        for worker, job, (ticket, kind, _, blocks) in copies:
            # A late plan may reach the worker that came after the one that the rank told to begin.
            is_begun = self._begun_at.get(ticket) == worker and self.begun[ticket] <= reached
            if block not in blocks or not is_begun:
                continue
            if kind == Kind.LOAD:
                raise Broken(f"law 1: {self.name} writes block {block} while load {ticket} may write it")
            if ticket not in self.revoked and self._ledger.may_be_published(job):
                raise Broken(f"I3: {self.name} writes block {block} under store {ticket}, which nobody revoked")

    def may_touch(self, tickets: list[int], kind: Kind, block: int) -> None:
        """The worker's device touches a block now, for one of these tickets."""
        if self.party.ended:
            return
        reached = self._writer.mark()
        marked = [ticket for ticket in tickets if self.begun.get(ticket, reached + 1) <= reached]
        if not marked:
            raise Broken(f"I3: {self.name} {kind.name.lower()} {tickets} touches block {block} before its mark")
        if kind == Kind.LOAD and self._loading.keys().isdisjoint(marked):
            raise Broken(f"law 1: {self.name} load {marked} writes block {block} after its word")

    def check_rest(self) -> None:
        """I6 of one rank."""
        if not self.core.attached:
            raise Broken(f"liveness: {self.name} has no worker")
        if self.core.open_loads or self.core.awaited_workers() or self._loading:
            raise Broken(f"I6: {self.name} is not at rest: {self.core.awaited_workers()} {self._loading}")
