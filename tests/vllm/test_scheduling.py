"""The connector under vLLM's own schedulers, with a runner in the GPU runner's order and a sidecar of seeds."""

import random
from pathlib import Path
from typing import Any

import pytest
from fake_sidecar import FakeSidecar, HoldingRankClient
from scheduling_kit import BOTH, all_content, check_held, tokens

from kvferry.vllm.rank import RankHalf

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@BOTH
def test_an_evicted_prefix_comes_back_from_the_sidecar(lab: Any, model: Path, is_async: bool) -> None:
    sidecar = FakeSidecar(1)
    engine = lab.Engine(model, sidecar, num_blocks=20, is_async=is_async)
    prompt = tokens(1, 100)
    assert engine.answer(prompt) == lab.expected(prompt, 8)
    sidecar.settle()
    engine.answer(tokens(2, 120))  # pushes it out
    before = engine.computed
    assert engine.answer(prompt) == lab.expected(prompt, 8)
    assert engine.computed - before <= 8 + 4 + 1  # 96 of 100 tokens were loaded
    assert sidecar.loaded == 1


@BOTH
def test_a_whole_prompt_that_is_held_still_leaves_its_last_token_to_compute(
    lab: Any, model: Path, is_async: bool
) -> None:
    sidecar = FakeSidecar(2)
    engine = lab.Engine(model, sidecar, num_blocks=20, is_async=is_async)
    prompt = tokens(1, 96)  # 12 whole blocks
    engine.answer(prompt, 16)
    sidecar.settle()
    engine.answer(tokens(2, 120))
    before = engine.computed
    assert engine.answer(prompt, 1) == lab.expected(prompt, 1)
    assert engine.computed - before == 8


def test_blocks_are_loadable_while_their_request_still_runs(lab: Any, model: Path) -> None:
    """Case 1: one engine's running request, another engine's hit."""
    sidecar = FakeSidecar(3)
    first = lab.Engine(model, sidecar, num_blocks=60, is_async=True)
    prompt = tokens(1, 100)
    name = first.add(prompt, 64)
    for _ in range(4):
        first.step()
    sidecar.settle()
    assert len(first.outputs[name]) < 64
    second = lab.Engine(model, sidecar, num_blocks=60, is_async=True)
    assert second.answer(prompt) == lab.expected(prompt, 8)
    assert second.computed < 20
    first.run()
    assert first.outputs[name] == lab.expected(prompt, 64)


@BOTH
def test_a_failed_load_is_computed_and_not_offered_again(lab: Any, model: Path, is_async: bool) -> None:
    sidecar = FakeSidecar(4)
    engine = lab.Engine(model, sidecar, num_blocks=20, is_async=is_async)
    prompt = tokens(1, 100)
    engine.answer(prompt)
    sidecar.settle()
    engine.answer(tokens(2, 120))
    sidecar.fail_one_in = 1
    assert engine.answer(prompt) == lab.expected(prompt, 8)
    assert sidecar.failed == 1
    assert list(engine.client.told.values()) == [False]


@BOTH
def test_a_load_whose_blocks_all_failed_is_computed_from_the_start(lab: Any, model: Path, is_async: bool) -> None:
    sidecar = FakeSidecar(4)
    engine = lab.Engine(model, sidecar, num_blocks=20, is_async=is_async)
    prompt = tokens(1, 100)
    engine.answer(prompt)
    sidecar.settle()
    engine.answer(tokens(2, 120))
    sidecar.fail_one_in = 1
    sidecar.rng.randrange = lambda *_: 0  # type: ignore[method-assign]  # not one block is good
    assert engine.answer(prompt) == lab.expected(prompt, 8)
    assert sidecar.failed == 1


def test_two_ranks_and_one_fails(lab: Any, model: Path) -> None:
    sidecar = FakeSidecar(5, num_ranks=2)
    engine = lab.Engine(model, sidecar, num_blocks=20, is_async=False)
    prompt = tokens(1, 100)
    engine.answer(prompt)
    sidecar.settle()
    engine.answer(tokens(2, 120))
    sidecar.fail_one_in = 2
    for _ in range(4):
        assert engine.answer(prompt) == lab.expected(prompt, 8)
        sidecar.settle()
        engine.answer(tokens(2, 120))
    assert sidecar.failed >= 1


def test_an_abort_with_a_load_on_its_way_frees_the_blocks_only_at_the_ranks_word(lab: Any, model: Path) -> None:
    sidecar = FakeSidecar(6)
    engine = lab.Engine(model, sidecar, num_blocks=20, is_async=False)
    prompt = tokens(1, 100)
    engine.answer(prompt)
    sidecar.settle()
    engine.answer(tokens(2, 120))
    sidecar.rng.random = lambda: 1.0  # type: ignore[method-assign]  # no copy happens
    name = engine.add(prompt)
    engine.step()
    free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    engine.abort(name)
    engine.step()
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
    sidecar.settle()
    engine.run()
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 19
    assert name not in engine.scheduler.requests


@BOTH
def test_a_reset_moves_the_engine_to_a_namespace_of_its_own(lab: Any, model: Path, is_async: bool) -> None:
    sidecar = FakeSidecar(7)
    engine = lab.Engine(model, sidecar, num_blocks=40, is_async=is_async)
    prompt = tokens(1, 100)
    engine.answer(prompt)
    sidecar.settle()
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    before = engine.computed
    assert engine.answer(prompt) == lab.expected(prompt, 8)
    assert engine.computed - before >= 100
    assert sidecar.loaded == 0


@BOTH
def test_a_reset_with_running_requests_stores_nothing_that_was_computed_before(
    lab: Any, model: Path, is_async: bool
) -> None:
    sidecar = FakeSidecar(8)
    engine = lab.Engine(model, sidecar, num_blocks=60, is_async=is_async)
    prompts = [tokens(n, 60) for n in range(3)]
    names = [engine.add(prompt, 40) for prompt in prompts]
    for _ in range(5):
        engine.step()
    engine.drain()  # as vLLM's pause does
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    for memory in sidecar.memories:  # the weights changed: what was computed before is worthless
        for block in memory:
            memory[block] = (-7,) * 8
    engine.run()
    sidecar.settle()
    assert any(-7 not in content[0] for content in sidecar.held.values())
    assert all(-7 not in content[0] for content in sidecar.held.values())
    for name, prompt in zip(names, prompts, strict=True):
        assert engine.outputs[name] == lab.expected(prompt, 40)


def test_prompt_only_keeps_no_generated_tokens(lab: Any, model: Path) -> None:
    sidecar = FakeSidecar(9)
    engine = lab.Engine(model, sidecar, num_blocks=40, is_async=True, **{"kvferry.store": "prompt"})
    engine.answer(tokens(1, 44), 40)
    sidecar.settle()
    assert len(sidecar.held) == 5


@BOTH
def test_everything_a_request_computed_is_stored_at_its_end(lab: Any, model: Path, is_async: bool) -> None:
    """With asynchronous scheduling the last full block is known only when the request has ended: its tail."""
    sidecar = FakeSidecar(10)
    engine = lab.Engine(model, sidecar, num_blocks=40, is_async=is_async)
    engine.answer(tokens(1, 41), 24)  # 64 tokens have KV: the last sampled one has none
    engine.step()
    sidecar.settle()
    assert len(sidecar.held) == 8


@pytest.mark.parametrize("is_exact", [True, False], ids=["exact", "lists"])
@pytest.mark.parametrize("seed", range(12))
@BOTH
def test_nothing_wrong_is_ever_attended_to_or_published(
    lab: Any, model: Path, is_async: bool, seed: int, is_exact: bool
) -> None:
    """Case 20: a cache too small for its requests, so that blocks change hands while they are being copied."""
    rng = random.Random(seed)
    sidecar = FakeSidecar(seed, num_ranks=1 + seed % 2, fail_one_in=rng.choice([0, 5]))
    sidecar.lateness = rng.choice([0, 30])
    engine = lab.Engine(model, sidecar, num_blocks=rng.choice([24, 40]), is_async=is_async, is_exact=is_exact)
    roots = [tokens(n, rng.randrange(20, 90)) for n in range(4)]
    due: dict[str, list[int]] = {}
    aborted: set[str] = set()
    for _ in range(40):
        prompt = rng.choice(roots) + tokens(rng.randrange(6), rng.randrange(0, 30))
        count = rng.randrange(1, 24)
        name = engine.add(prompt, count)
        due[name] = lab.expected(prompt, count)
        for _ in range(rng.randrange(6)):
            engine.step()
        if rng.random() < 0.1:
            victim = rng.choice(sorted(engine.scheduler.requests) or [name])
            aborted.add(victim)
            engine.abort(victim)
        if rng.random() < 0.3:
            roots[rng.randrange(len(roots))] = (prompt + engine.outputs[name])[:90]
    engine.run()
    sidecar.settle()
    assert {n: o for n, o in engine.outputs.items() if n not in aborted} == {
        n: o for n, o in due.items() if n not in aborted
    }
    check_held(lab, engine, sidecar)
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def test_the_control_without_revokes_publishes_wrong_blocks(lab: Any, model: Path) -> None:
    """If revokes are left out, the search above must find it: else it would prove nothing."""
    wrong = 0
    for seed in range(12):
        sidecar = FakeSidecar(seed)
        engine = lab.Engine(model, sidecar, num_blocks=24, is_async=True)
        engine.client.written = lambda blocks: frozenset()
        rng = random.Random(seed)
        try:
            for _ in range(30):
                engine.add(tokens(rng.randrange(100), rng.randrange(20, 90)), rng.randrange(1, 24))
                for _ in range(rng.randrange(6)):
                    engine.step()
            engine.run()
            sidecar.settle()
        except AssertionError as error:
            assert "attends to wrong KV" in str(error)
            wrong += 1
            continue
        truth = all_content(lab, engine)
        wrong += any(part != truth.get(key) for key, parts in sidecar.held.items() for part in parts)
    assert wrong > 0


@pytest.mark.parametrize("speculates", [False, True])
@BOTH
def test_the_last_stores_of_an_engine_that_goes_idle_are_begun_by_steps_that_it_makes_for_them(
    lab: Any, model: Path, is_async: bool, speculates: bool
) -> None:
    """Case 17: where the device cannot write marks, a begin waits for a later step, and one comes."""
    sidecar = FakeSidecar(12)
    engine = lab.Engine(model, sidecar, num_blocks=40, is_async=is_async)
    for rank, runner in enumerate(engine.runners):
        runner.connector._rank = RankHalf(HoldingRankClient(sidecar, rank))
        runner.speculates = speculates
    engine.answer(tokens(1, 41), 24)
    assert not engine.scheduler.has_requests()
    assert all(job.begun for job in sidecar.jobs.values())
    sidecar.settle()
    assert len(sidecar.held) == 8


@pytest.mark.parametrize("seed", range(6))
@BOTH
def test_nothing_wrong_is_attended_to_or_published_where_begins_wait_for_later_steps(
    lab: Any, model: Path, is_async: bool, seed: int
) -> None:
    """Case 20, in host order."""
    rng = random.Random(seed)
    speculates = seed in (1, 4)
    sidecar = FakeSidecar(seed, num_ranks=1 + seed % 2, fail_one_in=rng.choice([0, 5]))
    engine = lab.Engine(model, sidecar, num_blocks=rng.choice([24, 40]), is_async=is_async)
    for rank, runner in enumerate(engine.runners):
        runner.connector._rank = RankHalf(HoldingRankClient(sidecar, rank))
        runner.speculates = speculates
    roots = [tokens(n, rng.randrange(20, 90)) for n in range(4)]
    due = {}
    for _ in range(30):
        name = engine.add(rng.choice(roots) + tokens(rng.randrange(6), rng.randrange(0, 30)), rng.randrange(1, 24))
        due[name] = engine.asked[-1][1]
        for _ in range(rng.randrange(6)):
            engine.step()
    engine.run()
    sidecar.settle()
    assert engine.outputs == due
    assert sidecar.published > 0
    check_held(lab, engine, sidecar)
