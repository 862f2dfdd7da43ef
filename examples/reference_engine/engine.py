"""The engine: starts one process per rank, runs the scheduler in the caller's thread, step by step.

with Engine(EngineConfig(), KvferryConfig("engine-a")) as engine:
    print(engine.generate(prompt, max_new=16))
"""

from __future__ import annotations

import itertools
import multiprocessing
import signal
import time
from collections.abc import Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from reference_engine.blocks import KEY_BYTES
from reference_engine.config import EngineConfig, KvferryConfig
from reference_engine.messages import RankFailed, RankReady, StepPlan, StepResult
from reference_engine.offload import Offload
from reference_engine.rank import facts, rank_main
from reference_engine.request import Completion
from reference_engine.scheduler import Scheduler

if TYPE_CHECKING:
    from kvferry.client import Client

Message = TypeVar("Message", RankReady, StepResult)

# With nothing to compute (all requests wait for loads) a step is only a poll; this keeps it from spinning.
IDLE_STEP_S = 0.0003


class EngineDeadError(RuntimeError):
    """A rank is gone; the engine cannot go on."""


class Engine:
    """A tensor-parallel engine. Not thread-safe: one caller drives it."""

    def __init__(self, config: EngineConfig, kvferry: KvferryConfig | None = None) -> None:
        config.model.check(config.tp)
        self.config = config
        self.kv_bytes = 0  # of all ranks
        self._ids = itertools.count()
        self._processes: list[BaseProcess] = []
        self._ranks: list[Connection] = []
        self._client: Client | None = None
        try:
            self._start_ranks(kvferry)
            self._client = _make_client(config, kvferry) if kvferry else None
            self.scheduler = Scheduler(config, Offload(self._client))
            for ready in self._receive(RankReady):
                self.kv_bytes += ready.kv_bytes
        except BaseException:
            self.close()
            raise

    def wait_attached(self, timeout_s: float) -> bool:
        """Whether kvferry serves this engine, after waiting at most so long. No need to wait: until then it misses."""
        return self._client is not None and self._client.wait_attached(timeout_s)

    @property
    def client(self) -> Client | None:
        """The kvferry client, for its counters and `describe`."""
        return self._client

    def add(self, prompt: Sequence[int], max_new: int) -> str:
        """Queue a request; its id. Drive it with `step`."""
        request_id = f"request-{next(self._ids)}"
        self.scheduler.add(request_id, prompt, max_new, time.perf_counter())
        return request_id

    def step(self) -> list[Completion]:
        """One engine step over all requests; those that it finished."""
        plan = self.scheduler.schedule()
        for rank in self._ranks:
            self._send(rank, plan)
        results = self._receive(StepResult)
        if not plan.work:
            time.sleep(IDLE_STEP_S)
        return self.scheduler.update(plan, results, time.perf_counter())

    def generate(self, prompt: Sequence[int], max_new: int) -> Completion:
        """One request from beginning to end, on its own."""
        request_id = self.add(prompt, max_new)
        return self.run()[request_id]

    def run(self) -> dict[str, Completion]:
        """Step until every request is finished; their completions by id."""
        done: dict[str, Completion] = {}
        while self.scheduler.busy:
            done |= {completion.id: completion for completion in self.step()}
        return done

    def close(self) -> None:
        """End the ranks (the end of their pipe tells them) and say goodbye to kvferry. Safe to call twice."""
        for rank in self._ranks:
            rank.close()
        for process in self._processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._ranks, self._processes = [], []
        if self._client is not None:
            self._client.close()
            self._client = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start_ranks(self, kvferry: KvferryConfig | None) -> None:
        # Ctrl-C in a terminal goes to every process of the group. It is ours to handle: ranks are born with it
        # blocked, and end when their pipe does.
        resource_tracker.ensure_running()  # started by the first spawn, it would lift the mask
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._spawn_ranks(kvferry)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)

    def _spawn_ranks(self, kvferry: KvferryConfig | None) -> None:
        spawn = multiprocessing.get_context("spawn")  # nothing inherited: a rank is a process of its own
        spokes = [spawn.Pipe() for _ in range(1, self.config.tp)]  # rank 0's end, the other rank's end
        for rank in range(self.config.tp):
            ours, theirs = spawn.Pipe()
            self._ranks.append(ours)
            peers = [hub for hub, _ in spokes] if rank == 0 else [spokes[rank - 1][1]]
            process = spawn.Process(
                target=rank_main, args=(rank, self.config, kvferry, theirs, peers), name=f"rank-{rank}", daemon=True
            )
            process.start()
            self._processes.append(process)
            theirs.close()  # the rank's copy must be the only one, or its death would be no EOF here
        for hub, spoke in spokes:
            hub.close()
            spoke.close()

    def _send(self, rank: Connection, plan: StepPlan) -> None:
        try:
            rank.send(plan)
        except OSError as error:
            raise EngineDeadError(f"a rank is gone: {error}") from error

    def _receive(self, kind: type[Message]) -> list[Message]:
        """One message of each rank, in rank order."""
        messages: list[Message] = []
        for number, rank in enumerate(self._ranks):
            try:
                message = rank.recv()
            except (EOFError, OSError) as error:
                raise EngineDeadError(f"rank {number} is gone") from error
            if isinstance(message, RankFailed):
                raise EngineDeadError(f"rank {message.rank}: {message.error}")
            messages.append(message)
        return messages


def _make_client(config: EngineConfig, kvferry: KvferryConfig) -> Client:
    from kvferry.client import Client  # only an engine that wants kvferry needs it

    return Client(
        kvferry.engine_id,
        world_size=config.tp,
        key_bytes=KEY_BYTES,
        num_blocks=config.num_blocks,
        block_tokens=config.block_tokens,
        run_dir=kvferry.run_dir,
        facts=facts(config),
        patience_s=kvferry.patience_s,
    )
