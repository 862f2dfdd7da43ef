"""One rank: a process with its share of the model and of the KV cache, obeying the scheduler's plans.

Attaching it to kvferry is `_attach` and the four lines in `step`; the rest is any engine.

    plan ─▶ revoke ─▶ begin_loads ─▶ forward ─▶ begin_stores ─▶ poll ─▶ result

The order is the contract: revokes before anything overwrites a block, stores after the forward that filled
theirs. Nothing here waits for kvferry, and a rank ends when its scheduler's pipe does.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvferry.client.types import RankReport
from reference_engine.collective import StarSum
from reference_engine.config import EngineConfig, KvferryConfig
from reference_engine.messages import RankFailed, RankReady, StepPlan, StepResult
from reference_engine.model import Decoder, make_cache, make_weights

if TYPE_CHECKING:
    from kvferry.client import RankClient


def rank_main(
    rank: int,
    config: EngineConfig,
    kvferry: KvferryConfig | None,
    scheduler: Connection,
    peers: Sequence[Connection],
) -> None:
    """The process: serve plans until the scheduler's end of the pipe is closed."""
    torch.set_num_threads(1)
    kv: RankClient | None = None
    try:
        cache = make_cache(config.model, config.tp, config.num_blocks, config.block_tokens)
        weights = make_weights(config.model, rank, config.tp)
        decoder = Decoder(config.model, weights, list(cache.values()), StarSum(rank, peers))
        kv = _attach(rank, config, kvferry, cache) if kvferry else None
        kv_bytes = sum(view.nbytes for view in cache.values())
        scheduler.send(RankReady(rank, os.getpid(), kv_bytes, kv is not None and kv.attached))
        while True:
            scheduler.send(step(decoder, kv, scheduler.recv()))
    except (EOFError, ConnectionError):
        pass  # the scheduler or a peer is gone: the engine is over
    except Exception as error:
        with contextlib.suppress(OSError):
            scheduler.send(RankFailed(rank, f"{type(error).__name__}: {error}"))
    finally:
        if kv:
            kv.close()


def _attach(rank: int, config: EngineConfig, kvferry: KvferryConfig, cache: dict[str, Tensor]) -> RankClient:
    """Export this rank's KV memory, in place, and introduce the rank to its worker."""
    # Only an engine that wants kvferry needs it; and the exporter imports torch, which the rest of the client does not.
    from kvferry.client import RankClient
    from kvferry.client.torch_memory import export_cpu

    return RankClient(
        kvferry.engine_id,
        rank,
        world_size=config.tp,
        memory=export_cpu(cache, block_dim=0, block_tokens=config.block_tokens),
        facts=facts(config),
        run_dir=kvferry.run_dir,
        attach_timeout_s=kvferry.attach_timeout_s,
    )


def facts(config: EngineConfig) -> dict[str, str]:
    """What makes KV interchangeable: engines that agree in all of this share what they store."""
    return {"model": repr(config.model), "tokenizer": "none"}


def step(decoder: Decoder, kv: RankClient | None, plan: StepPlan) -> StepResult:
    """One plan carried out. The order of the calls is the contract."""
    if kv:
        kv.revoke(plan.directive)  # before anything below overwrites a block
        kv.begin_loads(plan.directive)
    tokens = []
    for work in plan.work:
        logits = decoder.forward(work.tokens, work.start, work.blocks)
        tokens.append(int(logits.argmax()) if work.sample else None)
    if kv:
        kv.begin_stores(plan.directive)  # the forward has written what they read
    return StepResult(tuple(tokens), kv.poll() if kv else RankReport())
