"""Who computes what in the next step: admission, prefix hits, chunked prefill, decode, preemption.

    add ─▶ waiting ─▶ schedule() ─▶ StepPlan ─▶ ranks ─▶ StepResult each ─▶ update() ─▶ Completion

Decides only: no processes, no tensors, no clock. Requests are served first come first served and computed side by
side (continuous batching): a step holds one token of each decoding request and prompt chunks up to `chunk_tokens`.
A request whose KV is being loaded holds its blocks and costs no step anything.
"""

from collections.abc import Sequence

from kvferry.client.types import LoadEnd
from reference_engine.blocks import BlockPool, block_keys
from reference_engine.config import EngineConfig
from reference_engine.messages import StepPlan, StepResult, Work
from reference_engine.offload import Offload
from reference_engine.request import Completion, Request, State


class Scheduler:
    """All requests of one engine and the blocks they share."""

    def __init__(self, config: EngineConfig, offload: Offload) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self.offload = offload
        self.preemptions = 0
        self.failed_loads = 0
        self._waiting: list[Request] = []
        self._running: list[Request] = []  # LOADING or RUNNING, in the order of admission
        self._loads: dict[int, tuple[Request, list[LoadEnd]]] = {}  # ticket -> request, words heard so far

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished or any load unanswered."""
        return bool(self._waiting or self._running or self._loads)

    def add(self, request_id: str, prompt: Sequence[int], max_new: int, now_s: float) -> None:
        """Queue a request. ValueError if it can never fit."""
        need = self._blocks_for(len(prompt) + max_new)
        if need > self.config.num_blocks:
            raise ValueError(f"request {request_id} needs {need} blocks; the engine has {self.config.num_blocks}")
        if not prompt or max_new < 1:
            raise ValueError(f"request {request_id}: {len(prompt)} prompt tokens, {max_new} new ones; both must be > 0")
        keys = block_keys(prompt, self.config.block_tokens)
        request = Request(request_id, len(prompt), max_new, now_s, list(prompt), keys)
        self._waiting.append(request)
        self.offload.arrived(request)

    def abort(self, request_id: str) -> None:
        """Forget a request. Blocks that a load still fills are given back when every rank has answered it."""
        for request in [r for r in self._waiting if r.id == request_id]:
            self._waiting.remove(request)
            self.offload.aborted(request)
        for request in [r for r in self._running if r.id == request_id]:
            if request.state is State.LOADING:
                request.aborted = True
                self.offload.cancel(next(t for t, (r, _) in self._loads.items() if r is request))
            else:
                self._leave(request)
                self.offload.aborted(request)

    # ---- before the forward ------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """The next step's work, with kvferry's directive for the ranks."""
        work: list[Work] = []
        room = self.config.chunk_tokens
        for request in list(self._running):
            room -= self._advance(request, room, work)
        for request in list(self._waiting):
            if len(self._running) >= self.config.max_running:
                break
            held = self.offload.held_blocks(request)
            if held is None:
                continue  # the answer is on its way; let the next one pass
            if not self._admit(request, held):
                break  # no blocks: nobody overtakes, or a long prompt would starve
            room -= self._advance(request, room, work)
        return StepPlan(tuple(work), self.offload.end_step())

    def _admit(self, request: Request, held: int) -> bool:
        """Give the request its blocks: shared from the own cache, fresh to load into, fresh to compute."""
        size = self.config.block_tokens
        # The last token is always computed: its logits are the answer's first token.
        most = (len(request.tokens) - 1) // size
        own = self.pool.match(request.keys[:most])
        self.pool.hold(own)  # before `take`, which might take them
        fresh = self.pool.take(self._blocks_for(len(request.tokens)) - len(own))
        if fresh is None:
            self.pool.release(own)
            return False
        self.offload.blocks_taken(fresh)
        self._waiting.remove(request)
        self._running.append(request)
        request.blocks = own + fresh
        request.num_computed = len(own) * size
        request.own_tokens = len(own) * size
        request.kvferry_tokens = 0
        request.num_stored = held
        loadable = min(held, most)
        if loadable > len(own):
            ticket = self.offload.load(request, len(own), loadable)
            self._loads[ticket] = (request, [])
            request.state = State.LOADING
        else:
            self.offload.nothing_to_load(request)
            request.state = State.RUNNING
        return True

    def _advance(self, request: Request, room: int, work: list[Work]) -> int:
        """Put the request's next tokens into this step; how many."""
        if request.state is not State.RUNNING:
            return 0
        start = request.num_computed
        end = min(len(request.tokens), start + room)
        if end <= start or not self._grow(request, end):
            return 0
        # What this forward completes is stored in this very step: the ranks begin it after the forward.
        full = end // self.config.block_tokens
        if self.offload.store(request, request.num_stored, full):
            request.num_stored = full
        sample = end == len(request.tokens)
        work.append(Work(request.id, tuple(request.tokens[start:end]), start, tuple(request.blocks), sample))
        return end - start

    def _grow(self, request: Request, tokens: int) -> bool:
        """Make sure the request has blocks for `tokens`; False: it had to give way itself."""
        missing = self._blocks_for(tokens) - len(request.blocks)
        while missing > 0:
            fresh = self.pool.take(missing)
            if fresh is not None:
                self.offload.blocks_taken(fresh)
                request.blocks += fresh
                return True
            # The youngest gives way. It has no work in this step yet: requests are visited oldest first.
            victim = [r for r in self._running if r.state is State.RUNNING][-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self.preemptions += 1
        self._leave(request)
        request.blocks = []
        request.num_computed = 0
        request.state = State.WAITING
        self._waiting.insert(0, request)
        self.offload.preempted(request)

    # ---- after the forward -------------------------------------------------------------------------------------

    def update(self, plan: StepPlan, results: Sequence[StepResult], now_s: float) -> list[Completion]:
        """Take what the ranks answered (one result per rank); the requests that are finished now."""
        by_id = {request.id: request for request in self._running}
        finished: list[Completion] = []
        for work, token in zip(plan.work, results[0].tokens, strict=True):
            request = by_id[work.request]
            request.num_computed = work.end
            self._commit(request)
            if token is None:
                continue
            request.tokens.append(token)
            request.keys = block_keys(request.tokens, self.config.block_tokens, request.keys)
            if request.first_token_s is None:
                request.first_token_s = now_s
            if request.done:
                self._leave(request)
                self.offload.finished(request)
                finished.append(_completion(request, now_s))
        self._hear_loads(results)
        return finished

    def _hear_loads(self, results: Sequence[StepResult]) -> None:
        """Collect the ranks' words on loads; act on a load when every rank has spoken."""
        for word in (word for result in results for word in result.report.loads):
            request, heard = self._loads[word.ticket]
            heard.append(word)
            if len(heard) < self.config.tp:
                continue
            del self._loads[word.ticket]
            self.offload.load_ended(word.ticket, all(one.ok for one in heard))
            self._loaded(request, all(one.ok for one in heard), {b for one in heard for b in one.failed_blocks})

    def _loaded(self, request: Request, ok: bool, failed: set[int]) -> None:
        """A load is over on every rank: go on behind what it brought. What it failed to bring is computed."""
        size = self.config.block_tokens
        if request.aborted:
            self._leave(request)
            self.offload.aborted(request)
            return
        own = request.own_tokens // size
        good = min(request.num_stored, (len(request.tokens) - 1) // size)
        if not ok:
            self.failed_loads += 1
            good = next((i for i in range(own, good) if request.blocks[i] in failed), own)
            request.num_stored = good
        request.num_computed = good * size
        request.kvferry_tokens = (good - own) * size
        request.state = State.RUNNING
        self._commit(request)

    def _commit(self, request: Request) -> None:
        """Name every full block of the request in the prefix cache."""
        for i in range(request.num_computed // self.config.block_tokens):
            self.pool.commit(request.blocks[i], request.keys[i])

    def _leave(self, request: Request) -> None:
        self._running.remove(request)
        self.pool.release(request.blocks)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_tokens)


def _completion(request: Request, now_s: float) -> Completion:
    first_s = now_s if request.first_token_s is None else request.first_token_s
    cached = request.own_tokens + request.kvferry_tokens
    return Completion(
        id=request.id,
        tokens=tuple(request.tokens[request.prompt_tokens :]),
        prompt_tokens=request.prompt_tokens,
        computed=max(0, request.prompt_tokens - cached),
        own=request.own_tokens,
        kvferry=request.kvferry_tokens,
        ttft_s=first_s - request.arrived_s,
        total_s=now_s - request.arrived_s,
    )
