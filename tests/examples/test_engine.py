"""The engine with its real rank processes, without kvferry."""

import multiprocessing
import os
import signal
from collections.abc import Sequence

import pytest
from reference_engine import Completion, Engine, EngineConfig, EngineDeadError, ModelConfig

MODEL = ModelConfig(vocab=97, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48, seed=3)

pytestmark = [pytest.mark.process, pytest.mark.slow]


def config(tp: int) -> EngineConfig:
    return EngineConfig(model=MODEL, tp=tp, block_tokens=4, num_blocks=40, chunk_tokens=16)


def prompt(count: int, seed: int) -> list[int]:
    return [(seed * 31 + 7 * i + i * i * seed) % MODEL.vocab for i in range(count)]


def answers(engine: Engine) -> Sequence[Completion]:
    """Four requests side by side, two of them with a common prefix, then one of them again."""
    prompts = [prompt(20, 1), prompt(33, 2), prompt(33, 2) + prompt(9, 3), prompt(50, 4)]
    ids = [engine.add(tokens, max_new=8) for tokens in prompts]
    done = engine.run()
    return [*(done[one] for one in ids), engine.generate(prompts[1], max_new=8)]


def test_two_ranks_give_the_tokens_of_one() -> None:
    with Engine(config(tp=1)) as one, Engine(config(tp=2)) as two:
        alone, together = answers(one), answers(two)
        assert one.kv_bytes == two.kv_bytes
    assert [c.tokens for c in alone] == [c.tokens for c in together]
    assert alone[1].tokens == alone[4].tokens
    assert together[4].own == 32
    assert not multiprocessing.active_children()


def test_a_dead_rank_is_an_error_and_not_a_wait() -> None:
    with Engine(config(tp=2)) as engine:
        engine.generate(prompt(9, 1), max_new=1)
        victim = next(child for child in multiprocessing.active_children() if child.name == "rank-1")
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        engine.add(prompt(9, 2), max_new=1)
        with pytest.raises(EngineDeadError):
            engine.run()
    assert not multiprocessing.active_children()
