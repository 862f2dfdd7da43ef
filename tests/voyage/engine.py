"""An inference engine's scheduler, small but in the order of a real one, around a real client core.

    step:  take reports ─▶ (abort, preempt, rotate) ─▶ running requests compute ─▶ waiting ones look up, load or
           are admitted ─▶ end_step ─▶ Work to every rank

    WAITING ──admit──▶ LOADING ──all ranks' words──▶ RUNNING ──last block computed──▶ DONE
       ▲        └───────────── nothing to load ─────────▲ │
       └──────────────────────── preempted, rotated ──────┘

It has its own prefix cache over a few blocks, so blocks are given away early and often, mostly while
stores still read them. It believes what kvferry tells it: a block that was loaded OK is read by the next
forward of every rank, and each read is compared with what the block's key names.
"""

import random
from collections.abc import Callable
from typing import Any

from kvferry.client.core import ClientSettings
from kvferry.client.types import RankReport
from kvferry.proto.outcome import Kind

from .blocks import Blocks
from .books import Broken, Meaning
from .client import ClientShell, Connect
from .clock import Party
from .echo import Echo
from .log import Log
from .requests import DONE, LOADING, RUNNING, WAITING, Habits, Part, Request, Work


class Engine(ClientShell):
    """The scheduler. `ranks` are told by `dispatch`, and answer by `on_report`."""

    def __init__(
        self,
        name: str,
        party: Party,
        log: Log,
        rng: random.Random,
        settings: ClientSettings,
        habits: Habits,
        dispatch: Callable[[Work], None],
        draw_request: Callable[["Engine", int], Request | None],
        connect: Connect,
        echo: Echo,
    ) -> None:
        super().__init__(name, party, log, rng, settings, connect, echo)
        self.habits = habits
        self.meaning: Meaning = (",".join(f"{k}={v}" for k, v in sorted(settings.facts.items())), settings.salt)
        self.requests: list[Request] = []
        self.zombies: list[Request] = []  # gone, but their load still runs
        self.num_done = self.num_loaded = self.num_failed_loads = self.num_tokens = self.num_reused = 0
        self.num_served = 0  # steps made while the sidecar served
        self.workload_over = False
        self.idle = False
        self._dispatch = dispatch
        self._draw_request = draw_request
        self._world_size = settings.world_size
        self._blocks = Blocks(habits, self.core, rng)
        self._step = 0
        self._reports: dict[int, int] = {}  # step -> ranks that reported it
        self._finished_step = 0
        self._words: dict[int, list[bool]] = {}  # load ticket -> ranks' words
        self._loads: dict[int, Request] = {}
        self._open: dict[int, Kind] = {}
        self._stored_now: dict[str, int] = {}  # request -> store of the present step
        self._step_due = False
        self._plan_step()

    # ---- reports of the ranks ---------------------------------------------------------------------------

    def on_report(self, rank: int, step: int, report: RankReport) -> None:
        """One rank has done one step."""
        for end in report.loads:
            words = self._words.get(end.ticket)
            if words is None:
                raise Broken(f"I4: {self.name} rank {rank} has a word on load {end.ticket}, which is over or unknown")
            words.append(end.ok)
            if len(words) == self._world_size:
                del self._words[end.ticket]
                self._load_ended(end.ticket, all(words))
        self._reports[step] = self._reports.get(step, 0) + 1
        while self._reports.get(self._finished_step + 1) == self._world_size:
            self._finished_step += 1
            del self._reports[self._finished_step]
        self._plan_step()

    def _load_ended(self, ticket: int, ok: bool) -> None:
        self._log(self.name, "load {} ended {}", ticket, ok)
        self.core.load_ended(ticket, ok)
        request = self._loads.pop(ticket)
        request.ticket = 0
        if ok:
            self.num_loaded += 1
        else:
            self.num_failed_loads += 1
        if request.is_void:
            self._blocks.release(request)
            request.is_void = False
            if request in self.zombies:
                self.zombies.remove(request)
            else:
                request.state = WAITING
                request.computed = 0
            return
        request.state = RUNNING
        if ok:
            self.num_reused += request.load_to - request.computed
            request.computed = request.stored = request.load_to
            self._blocks.cache(request, request.computed)

    # ---- one step ---------------------------------------------------------------------------------------

    def _plan_step(self) -> None:
        if not self._step_due and self._step - self._finished_step < self.habits.depth:
            self._step_due = True
            self.party.after(self._rng.randrange(*self.habits.gap_ns), self._do_step)

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished or a load unanswered."""
        return bool(self.requests or self.zombies)

    def _do_step(self) -> None:
        self._step_due = False
        now = self.party.now_ns
        if self.habits.waits and not self.core.attached and not self._step:
            self._plan_step()
            return
        if not self.workload_over:
            self.num_served += self.core.attached
            fresh = self._draw_request(self, self._step)
            if fresh is not None:
                self._log(
                    self.name, "request {} of {} keys, {} of them prompt", fresh.name, len(fresh.keys), fresh.num_prompt
                )
                self.requests.append(fresh)
        elif not self.has_work:
            self.idle = True
            return
        self._step += 1
        for end in self.core.poll():
            if self._open.pop(end.ticket, None) is not end.kind:
                raise Broken(f"I4: {self.name} hears the end of ticket {end.ticket} {end.kind.name} twice or untold")
        zeros: list[int] = []
        scheduled: dict[str, Part] = {}
        loading: dict[int, tuple[Meaning, tuple[tuple[int, bytes], ...]]] = {}
        self._stored_now.clear()
        self._misbehave(now)
        for request in list(self.requests):
            if request.state == RUNNING:
                self._run(request, scheduled, zeros, now)
        for request in list(self.requests):
            if request.state == WAITING:
                self._admit(request, zeros, loading, now)
        reads = {block: key for part in scheduled.values() for block, key in part.reads}
        writes = {block: key for part in scheduled.values() for block, key in part.writes}
        directive = self.core.end_step(now)
        self._flush()
        work = Work(
            self._step, self.meaning, tuple(zeros), tuple(reads.items()), tuple(writes.items()), loading, directive
        )
        self._log(
            self.name,
            "step {}: zeros {} reads {} writes {} {}",
            self._step,
            zeros,
            list(reads),
            list(writes),
            directive,
        )
        self._dispatch(work)
        self._plan_step()

    def _misbehave(self, now: int) -> None:
        rng, habits = self._rng, self.habits
        if self.workload_over:
            return
        if rng.random() < habits.p_rotate:
            self._rotate(now)
        if self.requests and rng.random() < habits.p_abort:
            request = rng.choice(self.requests)
            self._log(self.name, "aborts {} while {}", request.name, request.state)
            self.core.abort(request.name, now)
            self.requests.remove(request)
            self._leave(request)
        running = [request for request in self.requests if request.state == RUNNING]
        if running and rng.random() < habits.p_preempt:
            self._preempt(rng.choice(running), now)
        if self._open and rng.random() < habits.p_cancel:
            ticket = rng.choice(list(self._open))
            self._log(self.name, "cancels {}", ticket)
            self.core.cancel(ticket, now)

    def _leave(self, request: Request) -> None:
        """The request is over; its blocks go as soon as no load writes them."""
        if request.state == LOADING:
            request.is_void = True
            self.zombies.append(request)
        else:
            self._blocks.release(request)
        request.state = DONE

    def _preempt(self, request: Request, now: int) -> None:
        self._log(self.name, "preempts {}", request.name)
        self.core.preempt(request.name, now)
        self._blocks.release(request)
        request.state, request.computed, request.stored, request.asked_from = WAITING, 0, 0, -1
        request.needs_all = True

    def _give_way(self, victim: Request, scheduled: dict[str, Part], now: int) -> None:
        """Preempt a request for want of blocks, also one that this step has scheduled already: it computes nothing."""
        if victim.name in self._stored_now:
            self.core.cancel(self._stored_now[victim.name], now)
        if victim.name in scheduled:
            for block, _ in scheduled.pop(victim.name).writes:
                self._blocks.uncache(block)
        self._preempt(victim, now)

    def _rotate(self, now: int) -> None:
        salt = self._rng.choice([b"", b"1", b"2"])
        if salt == self.meaning[1]:
            return
        self._log(self.name, "rotates to {}", salt)
        for request in self.requests:
            if request.state == RUNNING:
                self._preempt(request, now)
            elif request.state == LOADING:
                request.is_void = True
                self.core.cancel(request.ticket, now)
            request.asked_from = -1
        self._blocks.uncache_all()
        self.core.rotate(salt, now)
        self.meaning = (self.meaning[0], salt)

    def _run(self, request: Request, scheduled: dict[str, Part], zeros: list[int], now: int) -> None:
        if request.computed == len(request.keys):
            if self._finished_step >= request.last_step:
                self._finish(request, now)
            return
        upto = min(
            request.computed + self._rng.randrange(1, 4),
            max(request.num_prompt, request.computed + 1),
            len(request.keys),
        )
        while len(request.blocks) < upto:
            fresh = self._blocks.allocate(1, zeros)
            if fresh is None:
                upto = len(request.blocks)
                break
            request.blocks += fresh
        if upto <= request.computed:
            # Nothing free: somebody must give way.
            running = [other for other in self.requests if other.state == RUNNING]
            self._give_way(self._rng.choice(running), scheduled, now)
            return
        pairs = list(zip(request.blocks, request.keys, strict=False))
        scheduled[request.name] = Part(pairs[: request.computed], pairs[request.computed : upto])
        self.num_tokens += upto - request.computed
        request.computed = upto
        request.last_step = self._step
        self._blocks.cache(request, upto)
        if self._rng.random() < self.habits.p_store or upto == len(request.keys):
            start = request.stored
            ticket = self.core.store(request.name, request.keys[start:upto], request.blocks[start:upto], now)
            request.stored = upto
            if ticket:
                self._open[ticket] = Kind.STORE
                self._stored_now[request.name] = ticket
                self._log(self.name, "store {} of {} keys {}..{}", ticket, request.name, start, upto)

    def _finish(self, request: Request, now: int) -> None:
        self._log(self.name, "finishes {}", request.name)
        self.core.finish(request.name, now)
        self.requests.remove(request)
        self._leave(request)
        self.num_done += 1
        if len(request.keys) > len(request.talk):
            request.talk[:] = request.keys

    def _admit(self, request: Request, zeros: list[int], loading: dict[int, Any], now: int) -> None:
        local = 0
        while local < request.num_prompt and request.keys[local] in self._blocks.cached:
            local += 1
        local = min(local, request.num_prompt - 1)  # the last prompt block is always computed, as in a real engine
        if request.asked_from < 0:
            request.asked_from = 0 if self.habits.whole_chain else local
            request.patience = self._rng.randrange(0, 6)
            self.core.lookup(request.name, request.keys[request.asked_from : request.num_prompt - 1], now)
            self._flush()
        hits = self.core.hits(request.name, now)
        self._flush()
        if not hits.ready and request.patience:
            request.patience -= 1
            return
        if sum(other.state != WAITING for other in self.requests) >= self.habits.max_running:
            return
        count = hits.count if hits.ready else 0
        upto = min(request.asked_from + count, request.num_prompt - 1)
        if local < request.asked_from:
            # The own cache has lost blocks since the question was asked: what lies between was never asked for.
            self.core.forget(request.name, now)
            request.asked_from = -1
            return
        # The own cache's blocks are taken first: whoever allocates may not be given them.
        own = [self._blocks.cached[key] for key in request.keys[:local]]
        for block in own:
            self._blocks.take(block)
        wanted = len(request.keys) if request.needs_all else request.num_prompt
        fresh = self._blocks.allocate(wanted - local, zeros, is_load=upto > local, loaded=upto - local)
        if fresh is None:
            for block in own:
                self._blocks.give(block)
            return
        request.blocks = own + fresh
        request.computed = request.stored = local
        self.num_reused += local
        request.asked_from = -1
        if upto <= local:
            self.core.forget(request.name, now)
            request.state = RUNNING
            return
        blocks = request.blocks[local:upto]
        keys = request.keys[local:upto]
        ticket = self.core.load(request.name, keys, blocks, now)
        self._log(self.name, "load {} for {} keys {}..{} into {}", ticket, request.name, local, upto, blocks)
        self._open[ticket] = Kind.LOAD
        self._words[ticket] = []
        self._loads[ticket] = request
        loading[ticket] = (self.meaning, tuple(zip(blocks, keys, strict=True)))
        request.ticket, request.load_to, request.state = ticket, upto, LOADING

    # ---- at the end -----------------------------------------------------------------------------------

    def check_rest(self) -> None:
        """I6 and liveness of one engine."""
        for end in self.core.poll():
            if self._open.pop(end.ticket, None) is not end.kind:
                raise Broken(f"I4: {self.name} hears the end of ticket {end.ticket} {end.kind.name} twice or untold")
        told = self.core.describe()
        kept = {
            name: told[name]
            for name in ("requests", "lookups", "leases", "stores_open", "loads_open", "steps_unanswered")
        }
        if self._open or self._words or self._loads or any(kept.values()):
            raise Broken(f"I6: {self.name} is not at rest: tickets {self._open}, words {self._words}, client {kept}")
        if self._blocks.num_free != self.habits.num_blocks:
            raise Broken(f"{self.name} lost blocks: {self._blocks.num_free} of {self.habits.num_blocks} are free")
        if self.link is None or self.link.link.in_flight:
            raise Broken(f"I6: {self.name}'s link is away or has unacknowledged messages")
