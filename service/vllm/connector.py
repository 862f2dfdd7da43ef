"""KvferryConnector: vLLM's hooks, one line each. What they mean is in `scheduler.py` and `rank.py`.

    EngineCore process                    worker process, one a rank
    ┌───────────────────────────┐  step   ┌──────────────────────────┐
    │ Scheduler ─▶ SchedulerHalf │ ──────▶ │ runner ─▶ RankHalf       │
    │              └ Client      │ ◀────── │           └ RankClient   │
    └───────────────────────────┘  words  └──────────────────────────┘

vLLM builds the class twice, once for each role; with one process for both, both halves live side by side, so
nothing here is global. No hook raises (`guard.py`), and none waits longer than the lookup's budget, or some
milliseconds where the engine has nothing to compute.
"""

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvferry.client.types import Directive
from kvferry.vllm.fingerprint import KEY_BYTES, block_facts, is_reproducible
from kvferry.vllm.guard import guarded
from kvferry.vllm.options import Options, device_of, why_off
from kvferry.vllm.rank import RankHalf
from kvferry.vllm.scheduler import SchedulerHalf
from kvferry.vllm.siblings import outer_transfer_config, why_off_beside
from kvferry.vllm.trace import LoadTrace
from kvferry.vllm.work import RankWords, StepWork

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vllm.kvferry")
NO_WORK = StepWork(Directive(0))
BLOCK_OUTERMOST = "BLHNC"  # blocks, layers, heads, states, content
START_WAIT_S = 2.0  # of an engine's start, which takes far longer


@dataclass
class KvferryMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's orders, scheduler half to rank halves."""

    work: StepWork


@dataclass
class KvferryWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The ranks' words beside vLLM's own sets, rank halves to scheduler half."""

    words: RankWords

    def aggregate(self, other: "KvferryWorkerMetadata") -> "KvferryWorkerMetadata":
        """Those of two ranks as one."""
        return KvferryWorkerMetadata(self.words.aggregate(other.words))


class KvferryConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Lends vLLM a cache beyond its GPU. See `options.py` for its settings."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: SchedulerHalf | None = None
        self._rank: RankHalf | None = None
        self._failures = 0
        self._options = Options()
        self._why_off: str | None = None
        self._facts: dict[str, str] = {}
        self._start(role)

    # ---- both halves ---------------------------------------------------------------------------------

    @guarded(lambda self: None)
    def _start(self, role: KVConnectorRole) -> None:
        is_scheduler = role == KVConnectorRole.SCHEDULER
        transfer = self._vllm_config.kv_transfer_config
        self._options = Options.read(transfer.kv_connector_extra_config)
        self._why_off = why_off(self._vllm_config, self._kv_cache_config)
        outer = outer_transfer_config()
        if outer is not None and self._why_off is None:
            self._why_off = why_off_beside(outer, tells_of_sync_loads=_tells_of_sync_loads())
        if is_scheduler:
            for line in self._options.complaints:
                logger.warning("kvferry: %s", line)
            # vLLM reads the policy from this object after it has built its connector.
            transfer.kv_load_failure_policy = "recompute"
            if self._why_off is not None:
                logger.warning("kvferry: caching is off: %s", self._why_off)
        if self._why_off is not None:
            return
        device = device_of(self._vllm_config)
        self._facts = block_facts(self._vllm_config, self._kv_cache_config, vllm_version, device)
        if is_scheduler:
            self._start_scheduler()

    def _start_scheduler(self) -> None:
        from kvferry.client import Client

        algorithm = str(self._vllm_config.cache_config.prefix_caching_hash_algo)
        if not is_reproducible(algorithm):
            logger.warning(
                "kvferry: block hashes of %s differ in every process: nothing is found again after a restart or by"
                " another engine. Set PYTHONHASHSEED to one value for all engines, or use sha256.",
                algorithm,
            )
        block_tokens = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        client = Client(
            self._engine_id(),
            world_size=self._vllm_config.parallel_config.world_size,
            key_bytes=KEY_BYTES[algorithm],
            num_blocks=self._kv_cache_config.num_blocks,
            block_tokens=block_tokens,
            run_dir=self._options.run_dir,
            facts=self._facts,
            salt=self._options.salt,
            patience_s=self._options.patience_s,
            on_note=_note,
        )
        if client.describe()["state"] != "off":
            # A sidecar is there and the ranks are attached by now: let the first request find what is held.
            client.wait_attached(START_WAIT_S)
        self._scheduler = SchedulerHalf(
            client,
            block_tokens=block_tokens,
            store=self._options.store,
            trace=LoadTrace(self._options.trace),
            new_salt=lambda: self._options.salt + os.urandom(16),
            # Data-parallel engines of a mixture of experts meet in each forward; all others vLLM tells they are one.
            may_pause=self._vllm_config.parallel_config.data_parallel_size == 1,
        )
        logger.info("kvferry: failed loads are recomputed (kv_load_failure_policy is now 'recompute')")

    def _engine_id(self) -> str:
        """Ties the halves of one engine: random at each start, the same in all its processes."""
        return str(self._vllm_config.kv_transfer_config.engine_id)

    def on_failure(self, hook: str, error: Exception) -> None:
        """A hook failed: caching goes off, what is under way is still answered."""
        self._failures += 1
        if self._failures == 1:
            logger.error("kvferry: %s failed; caching is off from now on", hook, exc_info=error)
        for half in (self._scheduler, self._rank):
            if half is not None:
                half.switch_off()

    @guarded(lambda self: None)
    def shutdown(self) -> None:
        """The engine ends: say goodbye, at most a second."""
        for half in (self._scheduler, self._rank):
            if half is not None:
                half.close()

    @property
    def requires_kv_delivery(self) -> bool:
        """No: a store that is dropped is a miss later, and no output is thrown away for it."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """None: any layout is taken. Where the user opted in, vLLM's name of the one with whole blocks."""
        try:
            options = Options.read(vllm_config.kv_transfer_config.kv_connector_extra_config)
            return _block_outermost() if options.layout == "block" else None
        except Exception as error:  # no engine fails to start for a wish
            logger.warning("kvferry: the KV layout cannot be asked for: %s", error)
            return None

    # ---- the scheduler's hooks -----------------------------------------------------------------------

    @guarded(lambda self: None)
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """The pool tells which blocks get new owners."""
        if self._scheduler is not None and not self._scheduler.bind_pool(gpu_block_pool):
            logger.warning("kvferry: this vLLM cannot tell which blocks are reused; some stores are lost by it")

    @guarded(lambda self: None)
    def on_new_request(self, request: Any) -> None:
        """Ask for its prefix now."""
        if self._scheduler is not None:
            self._scheduler.arrived(request)

    @guarded(lambda self: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond those computed."""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched(request, num_computed_tokens)

    @guarded(lambda self: None)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks for the load are there."""
        if self._scheduler is not None and num_external_tokens > 0:
            self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    @guarded(lambda self: KvferryMetadata(self._scheduler.failed_step() if self._scheduler else NO_WORK))
    def build_connector_meta(self, scheduler_output: Any) -> KvferryMetadata:
        """The step's orders for the ranks."""
        if self._scheduler is None:
            return KvferryMetadata(NO_WORK)
        if getattr(scheduler_output, "has_sync_kv_loads", False) and self._scheduler.stop_storing():
            # None of ours is: a sibling's load may fail after its blocks were used, and what was computed from them
            # would be stored for good.
            logger.warning(
                "kvferry: another connector of this engine loads in the middle of a step: from now on this engine"
                " loads what others stored, and stores nothing"
            )
        work = self._scheduler.step(
            scheduler_output.num_scheduled_tokens,
            scheduler_output.preempted_req_ids or (),
            self._block_ids(scheduler_output),
            _new_blocks(scheduler_output),
        )
        return KvferryMetadata(work)

    @guarded(lambda self: None)
    def update_connector_output(self, connector_output: Any) -> None:
        """The ranks' words came in."""
        if self._scheduler is None:
            return
        received = connector_output.finished_recving or ()
        invalid = connector_output.invalid_block_ids or ()
        said = connector_output.kv_connector_worker_meta
        words = said.words if isinstance(said, KvferryWorkerMetadata) else None
        if words is not None:
            self._scheduler.holding(words.is_holding)
        if received or invalid:
            self._scheduler.heard(received, invalid, words.times if words is not None else {})

    @guarded(lambda self: (False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Its tail is stored; its blocks are free at once (never True: vLLM would wait for a word of ours)."""
        if self._scheduler is not None:
            is_aborted = str(request.status) == "FINISHED_ABORTED"
            self._scheduler.finished(request, block_ids[0], is_aborted=is_aborted)
        return False, None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished_all_groups`, where the hybrid memory allocator is off."""
        return self.request_finished_all_groups(request, (block_ids,))

    @guarded(lambda self: True)
    def reset_cache(self) -> bool:
        """Weights may have changed: this engine moves to a fresh namespace. Always done, at once."""
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    @guarded(lambda self: False)
    def has_pending_push_work(self) -> bool:
        """Whether an idle engine should step on."""
        return self._scheduler is not None and self._scheduler.wants_steps()

    def _block_ids(self, scheduler_output: Any) -> Callable[[str], list[int]]:
        """A request's whole block table, on demand."""
        state = getattr(scheduler_output, "kv_connector_block_state", None)
        if state is not None:
            resolve: Callable[[str], tuple[list[int], ...]] = state.resolve_block_ids
        else:
            resolve = self._kv_cache_manager.get_block_ids
        return lambda name: resolve(name)[0]

    # ---- the ranks' hooks ----------------------------------------------------------------------------

    @guarded(lambda self: None)
    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        """Lend the KV memory to this rank's worker; waits for its verdict, 5 s at most, if a sidecar is there."""
        self._rank = RankHalf(None)
        if self._why_off is None and self._facts:
            from kvferry.vllm.memory import lend_memory

            client = lend_memory(
                kv_caches,
                self._vllm_config,
                self._kv_cache_config,
                rank=_rank(),
                engine_id=self._engine_id(),
                run_dir=self._options.run_dir,
                facts=self._facts,
                note=_note,
            )
            self._rank = RankHalf(client)

    @guarded(lambda self: None)
    def handle_preemptions(self, kv_connector_metadata: KvferryMetadata) -> None:
        """Before anything of this step is launched: revoke stores whose blocks it will overwrite."""
        if self._rank is not None:
            self._rank.revoke(kv_connector_metadata.work)

    @guarded(lambda self: None)
    def bind_connector_metadata(self, connector_metadata: KvferryMetadata) -> None:
        """Fresh blocks are zeroed by now: loads begin."""
        super().bind_connector_metadata(connector_metadata)
        if self._rank is not None:
            self._rank.begin_loads(connector_metadata.work)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: loads have begun, and the forward waits for none."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request runs only when its load is over."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: blocks are stored whole, after the forward."""

    @guarded(lambda self: None)
    def wait_for_save(self) -> None:
        """The forward is launched: stores begin. Nothing is waited for."""
        metadata = self._connector_metadata
        if self._rank is not None and isinstance(metadata, KvferryMetadata):
            self._rank.begin_stores(metadata.work)

    @guarded(lambda self: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Loads that are over at this rank. Sends are never reported: none was promised."""
        return None, (self._rank.finished() or None) if self._rank is not None else None

    @guarded(lambda self: set())
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks to compute, in the same output that names their request."""
        return self._rank.failed_blocks() if self._rank is not None else set()

    @guarded(lambda self: None)
    def build_connector_worker_meta(self) -> KvferryWorkerMetadata | None:
        """How long this rank's loads took."""
        words = self._rank.words() if self._rank is not None else None
        return None if words is None else KvferryWorkerMetadata(words)


def _rank() -> int:
    """This process's rank within its engine, as the sidecar counts them: all tensor ranks of one stage first."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    tensor = get_tp_group()
    return int(get_pp_group().rank_in_group * tensor.world_size + tensor.rank_in_group)


def _tells_of_sync_loads() -> bool:
    from vllm.v1.core.sched.output import SchedulerOutput

    return "has_sync_kv_loads" in SchedulerOutput.__dataclass_fields__


def _block_outermost() -> str | None:
    """What vLLM calls the layout in which a block of all layers is one piece; None if this one has none."""
    try:
        from vllm.v1.kv_cache_layout import KVCacheLayout
    except ImportError:
        names: tuple[str, ...] = ()
    else:
        names = tuple(layout.name for layout in KVCacheLayout)
    if BLOCK_OUTERMOST in names:
        return BLOCK_OUTERMOST
    logger.warning("kvferry: this vLLM has no layout %s; kvferry.layout is left out", BLOCK_OUTERMOST)
    return None


def _note(text: str) -> None:
    logger.warning("kvferry: %s", text)


def _new_blocks(scheduler_output: Any) -> Iterable[int]:
    """Blocks that the step's requests will write, for pools that cannot be watched. Too many, never too few."""
    for fresh in scheduler_output.scheduled_new_reqs:
        yield from fresh.block_ids[0]
    for given in scheduler_output.scheduled_cached_reqs.new_block_ids:
        if given is not None:
            yield from given[0]
