"""The scheduler half: turns what vLLM's scheduler does into calls of `kvferry.Client`. Imports no vLLM.

    arrival ──▶ lookup (sent at once)                           a request's way
    asked   ──▶ matched: hits │ not yet │ nothing
    blocks  ──▶ allocated: load of the hits' blocks             (engine waits for the ranks' word: heard)
    step    ──▶ stores of blocks that this step fills, revokes of stores whose blocks were given away
    end     ──▶ finished: its tail, pinned until it is copied

It keeps per request how far its blocks are stored, and nothing about copies: those are the client's. Blocks
are stored as soon as the step that fills them is planned; the ranks begin them after that step's forward.

Never: waits (but inside `Client.hits`: for the lookup's budget, a little longer in an engine without other
work), offers a request a load twice after one failed, stores what a reset has made stale.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from kvferry.client.types import Directive, Hits, JobEnd
from kvferry.proto.outcome import Kind, Next, Outcome, Reason
from kvferry.vllm.sensor import ReuseSensor
from kvferry.vllm.trace import LoadTrace
from kvferry.vllm.work import LoadTimes, StepWork

# A tail's blocks are kept from new owners while they are copied: a copy takes milliseconds, and if it does
# not, the store is worth less than the blocks.
PIN_NS: Final = 100_000_000
MAX_PINS: Final = 256  # blocks
# A store that was refused is tried again when the request fills its next block, this often.
MAX_RETRIES: Final = 3
# An idle engine steps on this long for ranks that hold begins back until their device is past them: longer than
# any forward, and an end if a device hangs.
HOLDING_NS: Final = 1_000_000_000
# An answer to the only request that could run is waited for so long: an empty step instead, with its pauses,
# takes longer and asks again no earlier.
IDLE_WAIT_S: Final = 0.005
# The block that vLLM hands to nobody: padding of block tables.
NULL_BLOCK: Final = 0


class ClientLike(Protocol):
    """What is used of `kvferry.Client`."""

    @property
    def attached(self) -> bool: ...
    def lookup(self, request: str, keys: Sequence[bytes] | bytes, *, group: int = 0) -> None: ...
    def hits(self, request: str, *, idle_s: float = 0.0) -> Hits: ...
    def load(self, request: str, keys: Sequence[bytes] | bytes, blocks: Sequence[int], *, group: int = 0) -> int: ...
    def store(self, request: str, keys: Sequence[bytes] | bytes, blocks: Sequence[int], *, group: int = 0) -> int: ...
    def written(self, blocks: Iterable[int]) -> frozenset[int]: ...
    def forget(self, request: str) -> None: ...
    def finish(self, request: str) -> None: ...
    def abort(self, request: str) -> None: ...
    def preempt(self, request: str) -> None: ...
    def end_step(self) -> Directive: ...
    def load_ended(self, ticket: int, ok: bool) -> None: ...
    def poll(self) -> list[JobEnd]: ...
    def rotate(self, salt: bytes) -> None: ...
    def close(self) -> None: ...


class EngineRequest(Protocol):
    """What is read of vLLM's `Request`."""

    request_id: str
    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_preemptions: int
    block_hashes: list[bytes]
    skip_reading_prefix_cache: bool


@dataclass(slots=True)
class _Live:
    """One request between arrival and finish."""

    request: EngineRequest
    preemptions: int
    is_asked: bool = False  # a lookup of it is known to the client
    is_bypassed: bool = False  # a load of it failed
    is_stale: bool = False  # its blocks were computed before a reset
    local_blocks: int = 0  # found in the engine's own cache, at the last question
    next_store: int = 0  # first block that no store was made for
    retries: int = 0


@dataclass(slots=True)
class _Loading:
    """A load whose ranks have not all spoken."""

    ticket: int
    name: str
    first: int  # index of its first block in the request
    blocks: tuple[int, ...]
    invalid: set[int] = field(default_factory=set)
    is_told: bool = False  # the ranks have been told


@dataclass(frozen=True, slots=True)
class _Pin:
    """A finished request's tail that is being copied."""

    blocks: list[int]
    until_ns: int


class SchedulerHalf:
    """See the module's text. One owner: vLLM's scheduler thread."""

    def __init__(
        self,
        client: ClientLike,
        *,
        block_tokens: int,
        store: str = "all",
        trace: LoadTrace | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
        new_salt: Callable[[], bytes] = lambda: b"",
        may_pause: bool = True,
    ) -> None:
        """`may_pause` False: other engines compute in step with this one, so it is never idle."""
        self._client = client
        self._block_tokens = block_tokens
        self._prompt_only = store == "prompt"
        self._trace = trace if trace is not None else LoadTrace(None)
        self._now_ns = now_ns
        self._new_salt = new_salt
        self._may_pause = may_pause
        self._sensor: ReuseSensor | None = None
        self._live: dict[str, _Live] = {}
        self._loading: dict[str, _Loading] = {}
        self._stores: dict[int, tuple[str, int]] = {}  # ticket -> request, index of the first block
        self._pins: dict[int, _Pin] = {}  # by store ticket
        self._failed: dict[str, tuple[int, ...]] = {}  # loads without a ticket
        self._load_blocks: list[int] = []  # given out for loads in this step; needed without a sensor only
        self._is_waiting = False  # for a lookup's answer, in this step
        self._holding_since_ns: int | None = None
        self._stores_nothing = False
        self.is_off = False

    # ---- setting up and down -------------------------------------------------------------------------

    def bind_pool(self, pool: Any) -> bool:
        """Watch this block pool; False if it cannot be watched."""
        self._sensor = ReuseSensor(pool)
        return self._sensor.is_exact

    def switch_off(self) -> None:
        """Something went wrong in here: no more lookups, loads and stores. Loads that run are still served."""
        self.is_off = True

    def stop_storing(self) -> bool:
        """From now on nothing new is stored; what runs was computed before. Whether this is news."""
        was, self._stores_nothing = self._stores_nothing, True
        return not was

    def close(self) -> None:
        """The engine ends."""
        self._client.close()
        self._trace.close()

    # ---- a request's way -----------------------------------------------------------------------------

    def arrived(self, request: EngineRequest) -> None:
        """A new request: ask for its whole chain at once, so that the answer is there when it is needed."""
        live = self._live[request.request_id] = _Live(request, request.num_preemptions)
        if not self.is_off and not request.skip_reading_prefix_cache:
            self._ask(live)

    def matched(self, request: EngineRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond those computed can be loaded: (None, False) is "ask again next step"."""
        live = self._known(request)
        local = live.local_blocks = num_computed_tokens // self._block_tokens
        if self.is_off or live.is_bypassed or request.skip_reading_prefix_cache:
            return 0, False
        # Never up to the last token: the engine would compute it again inside a block that others share.
        most = (request.num_tokens - 1) // self._block_tokens
        if most <= local:
            return 0, False
        if not live.is_asked:
            self._ask(live)
        hits = self._client.hits(request.request_id, idle_s=IDLE_WAIT_S if self._is_alone(request.request_id) else 0.0)
        if not hits.ready:
            # A key that is on its way helps only if the engine has not got that block itself.
            if hits.next is Next.PENDING and hits.count < local:
                return 0, False
            self._is_waiting = True
            return None, False
        found = max(min(hits.count, most) - local, 0)
        self._trace.answered(request.request_id, hits, found)
        return found * self._block_tokens, found > 0

    def allocated(self, request: EngineRequest, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """The engine gave the request these blocks, `num_external_tokens` of them to be loaded."""
        name = request.request_id
        if num_external_tokens <= 0:
            return  # nothing to load; also the second call, after a load
        live = self._known(request)
        first, count = live.local_blocks, num_external_tokens // self._block_tokens
        blocks = tuple(block_ids[first : first + count])
        self._failed[name] = blocks  # until a ticket stands for it, whatever happens below
        ticket = self._client.load(name, request.block_hashes[first : first + count], blocks)
        self._loading[name] = _Loading(ticket, name, first, blocks)
        del self._failed[name]
        self._load_blocks += blocks
        live.is_asked = False  # the lease went into the load
        live.next_store = max(live.next_store, first + count)
        self._trace.allocated(name, len(blocks))

    def finished(self, request: EngineRequest, block_ids: Sequence[int], *, is_aborted: bool) -> None:
        """The request is over and its blocks are about to be freed: keep its tail. A load of it is cancelled."""
        live = self._live.pop(request.request_id, None)
        if live is not None and not self.is_off and request.request_id not in self._loading:
            if is_aborted:
                known = min(request.num_computed_tokens, request.num_tokens)
            else:
                # The last sampled token was never computed, and its slot may hold a rejected draft.
                known = max(request.num_prompt_tokens, request.num_tokens - 1)
            self._store_tail(live, min(known, request.num_computed_tokens), block_ids)
        self._trace.forget(request.request_id)
        if is_aborted:
            self._client.abort(request.request_id)
        else:
            self._client.finish(request.request_id)

    # ---- a step --------------------------------------------------------------------------------------

    def step(
        self,
        scheduled: Mapping[str, int],
        preempted: Iterable[str],
        block_ids: Callable[[str], Sequence[int]],
        new_blocks: Iterable[int] = (),
    ) -> StepWork:
        """One engine step is planned: `scheduled` tokens by request. What the ranks must do.

        `block_ids` gives a scheduled request's whole block table. `new_blocks` (newly given ones) are needed
        only where the pool cannot be watched.
        """
        self._take_ends()
        for name in preempted:
            if name in self._live:
                self._known(self._live[name].request)
        # First who loses blocks, then who stores: what this step stores, it also writes.
        if self._sensor is not None and self._sensor.is_exact:
            given = self._sensor.take()
        else:
            given = [*new_blocks, *self._load_blocks]
        self._load_blocks = []
        if scheduled:
            self._holding_since_ns = None  # what ranks hold back now is of this step, or older and soon sent
        if given:
            self._client.written(given)
        if not self.is_off and self._client.attached:
            for name, num_tokens in scheduled.items():
                live = self._live.get(name)
                if live is not None:
                    self._store_full(live, num_tokens, block_ids)
        is_idle = self._may_pause and not scheduled and not self._is_computing()
        return self._tell(self._client.end_step(), is_idle=is_idle)

    def failed_step(self) -> StepWork:
        """What the ranks must do in a step whose planning went wrong: fail what they were not told of.

        Every unended store is revoked with it: nobody can say which of them were.
        """
        self._client.rotate(self._new_salt())
        directive = self._client.end_step()
        lost = {load.name: load.blocks for load in self._loading.values() if not load.is_told}
        for name in lost:
            self._loading[name].is_told = True
        failed, self._failed = {**self._failed, **lost}, {}
        return StepWork(replace(directive, loads=(), failed_loads=()), {}, failed)

    def heard(self, received: Collection[str], invalid: Collection[int], times: Mapping[str, LoadTimes]) -> None:
        """The ranks' words: requests that all of them received, and blocks that any of them could not fill."""
        if invalid:
            for load in self._loading.values():
                load.invalid.update(block for block in load.blocks if block in invalid)
        for name in received:
            if (ended := self._loading.pop(name, None)) is None:
                continue  # another connector's
            live = self._live.get(name)
            if ended.invalid and live is not None:
                live.is_bypassed = True
                bad = min(ended.blocks.index(block) for block in ended.invalid)
                live.next_store = min(live.next_store, ended.first + bad)
            self._client.load_ended(ended.ticket, not ended.invalid)
            self._trace.received(name, times.get(name, LoadTimes()), ok=not ended.invalid)

    def holding(self, is_holding: bool) -> None:
        """A rank holds begins back, in the steps so far, or none does any more."""
        if not is_holding:
            self._holding_since_ns = None
        elif self._holding_since_ns is None:
            self._holding_since_ns = self._now_ns()

    def reset(self) -> None:
        """Weights may have changed: a fresh namespace, and nothing computed so far is stored there."""
        self._client.rotate(self._new_salt())
        for live in self._live.values():
            live.is_asked = False
            live.is_stale = live.request.num_computed_tokens > 0

    def wants_steps(self) -> bool:
        """Whether an idle engine should step on: while a tail's blocks are pinned or a begin is held, both short."""
        if self._pins:
            self._take_ends()
        since = self._holding_since_ns
        return bool(self._pins) or (since is not None and self._now_ns() < since + HOLDING_NS)

    # ---- deeds ---------------------------------------------------------------------------------------

    def _known(self, request: EngineRequest) -> _Live:
        """The request's state; one that was preempted since it was last seen begins anew."""
        name = request.request_id
        live = self._live.get(name)
        if live is None:
            live = self._live[name] = _Live(request, request.num_preemptions)
        elif live.preemptions != request.num_preemptions:
            self._client.preempt(name)
            live = self._live[name] = _Live(request, request.num_preemptions, is_bypassed=live.is_bypassed)
            if not self.is_off and not live.is_bypassed and not request.skip_reading_prefix_cache:
                self._ask(live)
        return live

    def _is_alone(self, name: str) -> bool:
        """Whether the engine has nothing to compute but this request: all others wait for their loads."""
        if not self._may_pause or len(self._live) > len(self._loading) + 1:
            return False
        return self._live.keys() <= self._loading.keys() | {name}

    def _is_computing(self) -> bool:
        """Whether an earlier step's tokens are still to come: a pipeline's next step must not find a rank asleep."""
        return any(
            live.request.num_computed_tokens >= live.request.num_tokens and name not in self._loading
            for name, live in self._live.items()
        )

    def _ask(self, live: _Live) -> None:
        request = live.request
        most = (request.num_tokens - 1) // self._block_tokens
        live.is_asked = True
        if most > 0:
            self._trace.asked(request.request_id)
            self._client.lookup(request.request_id, request.block_hashes[:most])

    def _store_full(self, live: _Live, num_tokens: int, block_ids: Callable[[str], Sequence[int]]) -> None:
        """Store the blocks that this step fills and those filled before that are not stored yet."""
        request = live.request
        # Known tokens only: what speculation or asynchronous scheduling counts on top may be taken back.
        known = min(request.num_computed_tokens + num_tokens, request.num_tokens)
        if self._prompt_only:
            known = min(known, request.num_prompt_tokens)
        full = known // self._block_tokens
        if full <= live.next_store or live.is_stale or self._stores_nothing:
            return
        if live.is_asked:
            # The first store of this attempt: what is held already need not be offered again.
            live.is_asked = False
            hits = self._client.hits(request.request_id)
            self._client.forget(request.request_id)
            live.next_store = max(live.next_store, hits.count)
        self._store(live, full, block_ids(request.request_id))

    def _store(self, live: _Live, full: int, block_ids: Sequence[int]) -> int:
        request, first = live.request, live.next_store
        full = min(full, len(request.block_hashes), len(block_ids))
        blocks = list(block_ids[first:full])
        if NULL_BLOCK in blocks:  # a hole in the table: what lies behind it is no chain any more
            full = first + blocks.index(NULL_BLOCK)
            blocks = blocks[: full - first]
        if not blocks:
            return 0
        ticket = self._client.store(request.request_id, request.block_hashes[first:full], blocks)
        if ticket:
            live.next_store = full
            self._stores[ticket] = (request.request_id, first)
            if self._sensor is not None:
                self._sensor.watch(blocks)
        return ticket

    def _store_tail(self, live: _Live, known: int, block_ids: Sequence[int]) -> None:
        """Store what a finished request filled last. Its blocks stay pinned while they are copied."""
        if self._sensor is None or not self._sensor.is_exact or not self._client.attached:
            return
        if live.is_stale or self._stores_nothing:
            return
        if self._prompt_only:
            known = min(known, live.request.num_prompt_tokens)
        full, first = known // self._block_tokens, live.next_store
        pinned = sum(len(pin.blocks) for pin in self._pins.values())
        if not 0 < full - first <= MAX_PINS - pinned:
            return
        ticket = self._store(live, full, block_ids)
        if ticket:
            pins = self._sensor.pin(block_ids[first : live.next_store])
            self._pins[ticket] = _Pin(pins, self._now_ns() + PIN_NS)

    def _take_ends(self) -> None:
        """Learn which jobs ended: unpin tails, and try again what was refused."""
        for end in self._client.poll():
            if end.kind is not Kind.STORE:
                continue
            self._unpin(end.ticket)
            name, first = self._stores.pop(end.ticket, ("", 0))
            live = self._live.get(name)
            is_short = end.outcome is not Outcome.OK or end.reason is not Reason.NONE
            if live is not None and is_short and live.retries < MAX_RETRIES:
                live.retries += 1
                held = end.accepted if end.outcome is Outcome.OK else 0
                live.next_store = min(live.next_store, first + held)
        if self._pins:
            now = self._now_ns()
            for ticket in [ticket for ticket, pin in self._pins.items() if now >= pin.until_ns]:
                self._unpin(ticket)

    def _unpin(self, ticket: int) -> None:
        pin = self._pins.pop(ticket, None)
        if pin is not None and self._sensor is not None:
            self._sensor.unpin(pin.blocks)

    def _tell(self, directive: Directive, *, is_idle: bool) -> StepWork:
        names = {}
        tickets = {ticket for ticket, _ in (*directive.loads, *directive.failed_loads)}
        if tickets:
            for load in self._loading.values():
                if load.ticket in tickets:
                    names[load.ticket] = load.name
                    load.is_told = True
                    self._trace.told(load.name)
        failed, self._failed = self._failed, {}
        is_waiting, self._is_waiting = self._is_waiting, False
        return StepWork(directive, names, failed, is_idle, is_waiting or bool(self._loading))
