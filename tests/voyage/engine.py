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
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvferry.client.core import ClientCore, ClientSettings
from kvferry.client.types import Directive, RankReport
from kvferry.proto.control import Refused
from kvferry.proto.hot import JobsEnded, LookupAnswer, StepAnswer
from kvferry.proto.outcome import Kind

from .clock import MS, Party
from .daemon import PASSING
from .echo import Echo
from .ledger import Broken, Meaning
from .log import Log
from .net import LinkEnd

WAITING, LOADING, RUNNING, DONE = "waiting", "loading", "running", "done"


class Keys:
    """The tree of all prefixes: a key names the whole path to it, as a chained hash would."""

    WIDTH = 8

    def __init__(self) -> None:
        self._children: dict[tuple[bytes, int], bytes] = {}

    def child(self, parent: bytes, token: int) -> bytes:
        """The key of `parent`'s prefix with one more block."""
        found = self._children.get((parent, token))
        if found is None:
            found = self._children[parent, token] = (len(self._children) + 1).to_bytes(self.WIDTH, "big")
        return found


@dataclass(slots=True)
class Request:
    """One request: the keys of its prompt and of what it will say."""

    name: str
    keys: list[bytes]
    num_prompt: int
    talk: list[bytes]  # the conversation it belongs to
    state: str = WAITING
    blocks: list[int] = field(default_factory=list)
    computed: int = 0  # leading blocks that the engine believes valid
    stored: int = 0  # leading blocks that need no store
    asked_from: int = -1  # first key of the lookup that runs; -1: none
    patience: int = 0
    ticket: int = 0
    load_blocks: list[int] = field(default_factory=list)
    load_to: int = 0
    is_void: bool = False  # aborted or rotated while loading: its load's result counts for nothing
    last_step: int = 0
    needs_all: bool = False  # was preempted: comes back only when all its blocks are free, or two would thrash


@dataclass(frozen=True, slots=True)
class Part:
    """What one request does in a step: the (block, key) pairs it reads and those it computes."""

    reads: list[tuple[int, bytes]]
    writes: list[tuple[int, bytes]]


@dataclass(frozen=True, slots=True)
class Work:
    """What one step asks of every rank."""

    step: int
    meaning: Meaning
    zeros: tuple[int, ...]
    reads: tuple[tuple[int, bytes], ...]
    writes: tuple[tuple[int, bytes], ...]
    loading: dict[int, tuple[Meaning, tuple[tuple[int, bytes], ...]]]  # ticket -> what its blocks must hold
    directive: Directive


@dataclass(slots=True)
class Habits:
    """How this engine behaves: drawn once a voyage."""

    num_blocks: int
    depth: int  # steps under way at once
    gap_ns: tuple[int, int]
    p_store: float  # of a full block being stored at once
    p_wait: float  # of passing over blocks that a store still reads
    p_zero: float
    p_abort: float
    p_preempt: float
    p_rotate: float
    p_cancel: float
    whole_chain: bool  # look up the whole prompt, or only what the own cache lacks
    waits: bool  # for all ranks to be attached before the first step
    reuses_newest: bool  # gives blocks out again that have just been freed
    has_cache: bool  # keeps computed blocks for later requests, as far as they are not given away
    tells_load_blocks: bool  # names a load's blocks in `written` too
    max_running: int = 3


class Engine:
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
        connect: Callable[[Callable[[Any], None], Callable[[], None]], LinkEnd | None],
        echo: Echo,
    ) -> None:
        self.name = name
        self.core = ClientCore(settings)
        self.habits = habits
        self.meaning: Meaning = (",".join(f"{k}={v}" for k, v in sorted(settings.facts.items())), settings.salt)
        self.requests: list[Request] = []
        self.zombies: list[Request] = []  # gone, but their load still runs
        self.num_done = self.num_loaded = self.num_failed_loads = self.num_tokens = self.num_reused = 0
        self.num_served = 0  # steps made while the sidecar served
        self.workload_over = False
        self.idle = False
        self.settings = settings
        self.party = party
        self.link: LinkEnd | None = None
        self.found: bool | None = None  # what a probe brought
        self._log = log
        self._rng = rng
        self._dispatch = dispatch
        self._echo = echo
        self._draw_request = draw_request
        self._world_size = settings.world_size
        self._free: deque[int] = deque(range(habits.num_blocks))
        self._refs = [0] * habits.num_blocks
        self._cached: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._step = 0
        self._reports: dict[int, int] = {}  # step -> ranks that reported it
        self._finished_step = 0
        self._words: dict[int, list[bool]] = {}  # load ticket -> ranks' words
        self._loads: dict[int, Request] = {}
        self._open: dict[int, Kind] = {}
        self._stored_now: dict[str, int] = {}  # request -> store of the present step
        self._step_due = False
        self._armed_ns: int | None = None
        self._connect = connect
        self._reach()
        self._plan_step()

    # ---- the client core's shell ----------------------------------------------------------------------

    def _reach(self) -> None:
        if self.link is not None:
            return
        self.link = self._connect(self._from_daemon, self._lose_daemon)
        if self.link is None:
            self._reach_again()
            return
        self.core.attach(self.party.now_ns, software="voyage", pid=1)
        self._flush()

    def _reach_again(self) -> None:
        self.party.after(self._rng.randrange(5 * MS, 60 * MS), self._reach)

    def _lose_daemon(self) -> None:
        self._log(self.name, "has lost the daemon")
        self.link = None
        self._echo.forget()
        self.core.lost(self.party.now_ns)
        self._flush()
        self._reach_again()

    def die(self) -> None:
        """The process is gone."""
        self.party.end()
        if self.link is not None:
            self.link.sever()

    def _from_daemon(self, message: Any) -> None:
        self._log(self.name, "<- daemon: {}", message)
        if isinstance(message, Refused):
            if message.code not in PASSING:
                raise Broken(f"{self.name} was refused: {message.code} {message.text}")
            assert self.link is not None
            self.link.close()
            self.core.on_message(message, self.party.now_ns)
            self._lose_daemon()
            return
        self.core.on_message(message, self.party.now_ns)
        self._flush()
        if isinstance(message, LookupAnswer | StepAnswer | JobsEnded):
            self._echo.remember(message)
        if (old := self._echo.draw()) is not None:
            self._log(self.name, "<- daemon again: {}", old)
            before = self.core.describe()
            self.core.on_message(old, self.party.now_ns)
            self._flush()
            if self.core.describe() != before:
                raise Broken(f"I5: {self.name}: {old.TAG} again turns {before} into {self.core.describe()}")

    def _flush(self) -> None:
        for message in self.core.outgoing():
            if self.link is None:
                continue
            self._log(self.name, "-> daemon: {}", message)
            if not self.link.send(message):
                raise Broken(f"{self.name}: the link to the daemon is full or lost")
        due = self.core.next_due_ns()
        if due is not None and (self._armed_ns is None or due < self._armed_ns):
            self._armed_ns = due
            self.party.at(due, self._tick, due)

    def _tick(self, armed_ns: int) -> None:
        if self._armed_ns == armed_ns:
            self._armed_ns = None
            self.core.tick(self.party.now_ns)
            self._flush()

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
            self._release(request)
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
            self._cache(request, request.computed)

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
            self._release(request)
        request.state = DONE

    def _preempt(self, request: Request, now: int) -> None:
        self._log(self.name, "preempts {}", request.name)
        self.core.preempt(request.name, now)
        self._release(request)
        request.state, request.computed, request.stored, request.asked_from = WAITING, 0, 0, -1
        request.needs_all = True

    def _give_way(self, victim: Request, scheduled: dict[str, Part], now: int) -> None:
        """Preempt a request for want of blocks, also one that this step has scheduled already: it computes nothing."""
        if victim.name in self._stored_now:
            self.core.cancel(self._stored_now[victim.name], now)
        if victim.name in scheduled:
            for block, _ in scheduled.pop(victim.name).writes:
                if block in self._key_of:
                    del self._cached[self._key_of.pop(block)]
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
        for key, block in list(self._cached.items()):
            del self._cached[key], self._key_of[block]
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
            fresh = self._allocate(1, zeros)
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
        self._cache(request, upto)
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
        while local < request.num_prompt and request.keys[local] in self._cached:
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
        own = [self._cached[key] for key in request.keys[:local]]
        for block in own:
            self._take(block)
        wanted = len(request.keys) if request.needs_all else request.num_prompt
        fresh = self._allocate(wanted - local, zeros, is_load=upto > local, loaded=upto - local)
        if fresh is None:
            for block in own:
                self._give(block)
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

    # ---- blocks -----------------------------------------------------------------------------------------

    def _allocate(self, count: int, zeros: list[int], *, is_load: bool = False, loaded: int = 0) -> list[int] | None:
        """Blocks for a new owner, or None; the first `loaded` of them will be filled by a load."""
        if len(self._free) < count:
            return None
        rng, habits = self._rng, self.habits
        chosen: list[int] = []
        if rng.random() < habits.p_wait:
            chosen = [block for block in self._free if not self.core.storing([block])][:count]
            if len(chosen) < count and rng.random() < 0.5:
                return None  # wait: perhaps a store ends
        chosen += [block for block in self._free if block not in chosen][: count - len(chosen)]
        for block in chosen:
            self._take(block)
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._cached[key]
        is_zeroed = rng.random() < habits.p_zero
        if is_zeroed:
            zeros += chosen
        told = chosen if is_zeroed or habits.tells_load_blocks or not is_load else chosen[loaded:]
        self.core.written(told)
        return chosen

    def _take(self, block: int) -> None:
        if self._refs[block] == 0:
            self._free.remove(block)
        self._refs[block] += 1

    def _give(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            if self.habits.reuses_newest:
                self._free.appendleft(block)
            else:
                self._free.append(block)

    def _release(self, request: Request) -> None:
        for block in reversed(request.blocks):
            self._give(block)
        request.blocks = []

    def _cache(self, request: Request, upto: int) -> None:
        if not self.habits.has_cache:
            return
        for at in range(upto):
            key, block = request.keys[at], request.blocks[at]
            if key not in self._cached and block not in self._key_of:
                self._cached[key] = block
                self._key_of[block] = key

    # ---- after the end -----------------------------------------------------------------------------------

    def probe(self, key: bytes) -> None:
        """Look one key up; `found` tells."""
        self.found = None
        self.core.lookup("probe", [key], self.party.now_ns)
        self._flush()
        self.party.after(300 * MS, self._look, 200)

    def _look(self, times: int) -> None:
        hits = self.core.hits("probe", self.party.now_ns)
        if hits.ready or not times:
            self.found = hits.count > 0
            self.core.finish("probe", self.party.now_ns)
        else:
            self.party.after(1 * MS, self._look, times - 1)
        self._flush()

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
        if len(self._free) != self.habits.num_blocks:
            raise Broken(f"{self.name} lost blocks: {len(self._free)} of {self.habits.num_blocks} are free")
        if self.link is None or self.link.link.in_flight:
            raise Broken(f"I6: {self.name}'s link is away or has unacknowledged messages")
