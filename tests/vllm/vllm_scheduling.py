"""vLLM's own scheduler with our connector, and a runner that computes nothing but keeps the GPU runner's order.

    handle_preemptions ─ bind ─ forward ─ start_load_kv ─ wait_for_save ─ results ─ clear        (runner V2)

Its KV cache is the fake sidecar's memory: for each token the hash of the prefix up to it. Each forward checks
that everything it attends to is what it must be. Imports vLLM: only tests that are marked so import this.
"""

import os
from collections import deque
from pathlib import Path
from typing import Any

import torch
from fake_sidecar import FakeClient, FakeRankClient, FakeSidecar
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvferry.vllm.connector import KvferryConnector
from kvferry.vllm.rank import RankHalf
from kvferry.vllm.scheduler import SchedulerHalf

BLOCK = 8


def make_config(model: Path, num_blocks: int, *, is_async: bool, **extra: Any) -> tuple[VllmConfig, KVCacheConfig]:
    """Configuration of an engine with one full-attention group.

    `siblings`: configurations of other connectors beside ours, which is then the last child of a MultiConnector;
    `outer`: what stands in its own.
    """
    # Without Triton this vLLM refuses to be built for runner V2; it does not look again afterwards.
    os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    ours = {
        "kv_connector": "KvferryConnector",
        "kv_connector_module_path": "kvferry.vllm",
        "kv_role": extra.pop("kv_role", "kv_both"),
    }
    siblings, outer = extra.pop("siblings", []), extra.pop("outer", {})
    if siblings:
        children = {"connectors": [*siblings, {**ours, "kv_connector_extra_config": extra}]}
        transfer = KVTransferConfig(
            kv_connector="MultiConnector", kv_connector_extra_config=children, **{"kv_role": "kv_both", **outer}
        )
    else:
        transfer = KVTransferConfig(**ours, kv_connector_extra_config=extra)
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
    config = VllmConfig(
        model_config=ModelConfig(model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=4096),
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=256,
            max_model_len=4096,
            is_encoder_decoder=False,
            watermark=0.0,
        ),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=transfer,
    )
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    config.scheduler_config.async_scheduling = is_async  # the CPU platform turns it off
    cache.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return config, KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])


class FakeRunner:
    """One rank: its KV cache and the requests it runs."""

    def __init__(self, connector: Any, sidecar: FakeSidecar, rank: int) -> None:
        self.connector, self.sidecar = connector, sidecar
        self.memory = sidecar.memories[rank]
        self.tokens: dict[str, list[int]] = {}
        self.tables: dict[str, list[int]] = {}
        self.tolerates = False  # wrong KV: of another connector's load that will be told failed
        self.speculates = False  # as runner V1: stores begin behind the draft, when the step's results are made

    def execute(self, step: Any) -> ModelRunnerOutput:
        """One step in runner V2's order."""
        for name in step.finished_req_ids:
            self.tokens.pop(name, None)
            self.tables.pop(name, None)
        self.sidecar.tick()
        self.connector.handle_preemptions(step.kv_connector_metadata)
        self.sidecar.tick()
        self.connector.bind_connector_metadata(step.kv_connector_metadata)
        self.sidecar.tick()  # a load may write before the forward
        sampled = self._forward(step)
        self.connector.start_load_kv(None)
        has_draft = self.speculates and bool(step.num_scheduled_tokens)
        if not has_draft:
            self.connector.wait_for_save()
        self.sidecar.tick()
        output = KVConnectorOutput()
        results = self.connector.get_transfer_results(step.finished_req_ids)
        output.finished_sending = results.finished_sending or None
        output.finished_recving = results.finished_recving or None
        output.invalid_block_ids = self.connector.get_block_ids_with_load_errors()
        output.failed_recving = results.failed_recving
        output.kv_connector_worker_meta = self.connector.build_connector_worker_meta()
        if has_draft:
            self.connector.wait_for_save()
        self.connector.clear_connector_metadata()
        names = list(step.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[sampled[name] for name in names],
            kv_connector_output=output,
        )

    def _forward(self, step: Any) -> dict[str, list[int]]:
        computed: dict[str, int] = {}
        for new in step.scheduled_new_reqs:
            self.tokens[new.req_id] = list(new.prefill_token_ids or new.prompt_token_ids)
            self.tables[new.req_id] = list(new.block_ids[0])
            computed[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for name, given, done in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            if name in cached.resumed_req_ids:
                self.tables[name] = list(given[0])
            elif given is not None:
                self.tables[name] += given[0]
            computed[name] = done
        return {n: self._compute(n, computed[n], count) for n, count in step.num_scheduled_tokens.items()}

    def _compute(self, name: str, done: int, count: int) -> list[int]:
        """Check what is attended to, write what is computed, sample if the end is reached."""
        tokens, table = self.tokens[name], self.tables[name]
        chain, value = [], 0
        for token in tokens[: done + count]:
            value = hash((value, token))
            chain.append(value)
        for start in range(0, done, BLOCK):
            held, due = self.memory.get(table[start // BLOCK], ()), tuple(chain[start : min(start + BLOCK, done)])
            assert self.tolerates or held[: len(due)] == due, (
                f"{name} attends to wrong KV in block {table[start // BLOCK]} at {start}"
            )
        for at in range(done, done + count):
            block = table[at // BLOCK]
            held = self.memory.get(block, ())
            self.memory[block] = (*held[: at % BLOCK], chain[at])
        if done + count < len(tokens):
            return []
        token = value % 1000 + 10
        tokens.append(token)
        return [token]


class Engine:
    """Scheduler, runners and the loop between them; `depth` 2 is asynchronous scheduling."""

    def __init__(
        self, model: Path, sidecar: FakeSidecar, *, num_blocks: int, is_async: bool, is_exact: bool = True, **extra: Any
    ) -> None:
        init_none_hash(sha256)
        self.sidecar = sidecar
        self.config, kv_cache = make_config(model, num_blocks, is_async=is_async, **extra)
        kind = AsyncScheduler if is_async else Scheduler
        self.scheduler = kind(
            vllm_config=self.config,
            kv_cache_config=kv_cache,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        self.client = FakeClient(sidecar)
        self.connector: Any = ours_of(self.scheduler.connector)
        salts = iter(range(1, 1000))
        half = SchedulerHalf(
            self.client,
            block_tokens=BLOCK,
            store=extra.get("kvferry.store", "all"),
            new_salt=lambda: b"%d" % next(salts),
        )
        self.is_on = self.connector._scheduler is not None
        if self.is_on:
            self.connector._scheduler.close()
        if self.is_on or not extra.get("siblings"):
            self.connector._scheduler = half
        if is_exact:
            half.bind_pool(self.scheduler.kv_cache_manager.block_pool)
        self.runners = []
        for rank in range(sidecar.num_ranks):
            worker = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, kv_cache)
            ours_of(worker)._rank = RankHalf(FakeRankClient(sidecar, rank))
            self.runners.append(FakeRunner(worker, sidecar, rank))
        self.aggregator = KVOutputAggregator(sidecar.num_ranks)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.depth = 2 if is_async else 1
        self.queue: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self.outputs: dict[str, list[int]] = {}
        self.asked: list[tuple[list[int], list[int]]] = []  # prompt, answer due
        self.num_requests = 0
        self.computed = 0  # tokens

    def add(self, prompt: list[int], max_tokens: int = 8, **options: Any) -> str:
        """Queue a request."""
        self.num_requests += 1
        name = f"r{self.num_requests}"
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self.scheduler.add_request(Request(name, prompt, params, None, block_hasher=self.hasher, **options))
        self.asked.append((prompt, expected(prompt, max_tokens)))
        self.outputs[name] = []
        return name

    def step(self) -> None:
        """Schedule and execute one batch; hear the oldest one when the queue is full or nothing else is to do."""
        if self.scheduler.has_requests():
            planned = self.scheduler.schedule()
            self.computed += planned.total_num_scheduled_tokens
            outputs = [runner.execute(planned) for runner in self.runners]
            self.queue.append((planned, self.aggregator.aggregate(outputs)))
            if len(self.queue) < self.depth and planned.total_num_scheduled_tokens:
                return
        self._hear()

    def drain(self) -> None:
        """Hear all batches that are under way."""
        while self.queue:
            self._hear()

    def _hear(self) -> None:
        if self.queue:
            planned, output = self.queue.popleft()
            for made in self.scheduler.update_from_output(planned, output).values():
                for one in made.outputs:
                    self.outputs[one.request_id] += one.new_token_ids

    def run(self, max_steps: int = 3000) -> None:
        """Until all requests have ended."""
        for _ in range(max_steps):
            if not (self.scheduler.has_requests() or self.queue):
                return
            self.step()
        raise AssertionError(f"requests stand still: {list(self.scheduler.requests)}")

    def request(self, tokens: list[int]) -> Request:
        """A request over these tokens that nobody runs: for its block hashes."""
        return Request("none", tokens, SamplingParams(max_tokens=1), None, block_hasher=self.hasher)

    def abort(self, name: str) -> None:
        """As a user who disconnects."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def answer(self, prompt: list[int], max_tokens: int = 8, **options: Any) -> list[int]:
        """One request from start to end."""
        name = self.add(prompt, max_tokens, **options)
        self.run()
        return self.outputs[name]


def ours_of(connector: Any) -> Any:
    """Our connector: the one that vLLM has, or a child of it."""
    children = [connector, *getattr(connector, "_connectors", ())]
    return next(child for child in children if isinstance(child, KvferryConnector))


def expected(prompt: list[int], max_tokens: int) -> list[int]:
    """What any engine must answer."""
    value, made = 0, []
    for token in prompt:
        value = hash((value, token))
    for _ in range(max_tokens):
        made.append(value % 1000 + 10)
        value = hash((value, made[-1]))
    return made
