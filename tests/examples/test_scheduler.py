"""Scheduler and model together, one rank in this process: reuse of every kind gives the tokens of computing anew."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from fake_kvferry import FakeClient, FakeKvferry, FakeRank
from reference_engine.config import EngineConfig, ModelConfig
from reference_engine.model import Decoder, make_cache, make_weights
from reference_engine.offload import Offload
from reference_engine.rank import step
from reference_engine.request import Completion
from reference_engine.scheduler import Scheduler

MODEL = ModelConfig(vocab=97, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48, seed=3)
CONFIG = EngineConfig(model=MODEL, tp=1, block_tokens=4, num_blocks=24, chunk_tokens=16, max_running=4)


class OneRank:
    """An engine of one rank without processes; time is the count of its steps."""

    def __init__(self, config: EngineConfig = CONFIG, kvferry: FakeKvferry | None = None) -> None:
        self.cache = list(make_cache(config.model, 1, config.num_blocks, config.block_tokens).values())
        self.decoder = Decoder(config.model, make_weights(config.model, 0, 1), self.cache)
        self.client = FakeClient(kvferry) if kvferry else None
        self.rank = FakeRank(kvferry, self.cache) if kvferry else None
        self.scheduler = Scheduler(config, Offload(self.client))
        self.steps = 0
        self.done: dict[str, Completion] = {}

    def add(self, name: str, prompt: Sequence[int], max_new: int = 6) -> None:
        self.scheduler.add(name, prompt, max_new, float(self.steps))

    def step(self) -> None:
        self.steps += 1
        plan = self.scheduler.schedule()
        result = step(self.decoder, self.rank, plan)
        for completion in self.scheduler.update(plan, [result], float(self.steps)):
            self.done[completion.id] = completion

    def run(self) -> dict[str, Completion]:
        while self.scheduler.busy:
            self.step()
            assert self.steps < 10_000
        return self.done

    def ask(self, prompt: Sequence[int], max_new: int = 6) -> Completion:
        name = f"r{self.steps}"
        self.add(name, prompt, max_new)
        return self.run()[name]


def prompt(count: int, seed: int = 1) -> list[int]:
    return [(seed * 31 + 7 * i + i * i * seed) % MODEL.vocab for i in range(count)]


def cold(tokens: Sequence[int], max_new: int = 6) -> tuple[int, ...]:
    """The answer of an engine that has seen nothing."""
    return OneRank().ask(tokens, max_new).tokens


def test_the_same_prompt_gives_the_same_tokens() -> None:
    assert cold(prompt(50)) == cold(prompt(50))
    assert len(cold(prompt(50), 9)) == 9


def test_a_prefix_in_the_own_cache_is_not_computed_and_changes_no_token() -> None:
    engine = OneRank()
    first = engine.ask(prompt(41))
    again = engine.ask(prompt(41))
    assert (first.computed, first.own) == (41, 0)
    assert (again.computed, again.own) == (1, 40)
    assert again.tokens == first.tokens
    longer = engine.ask([*prompt(41), *first.tokens, 5, 6])
    assert longer.own == 44  # answers are cached too
    assert longer.tokens == cold([*prompt(41), *first.tokens, 5, 6])


def test_a_whole_prompt_that_is_cached_still_computes_its_last_token() -> None:
    engine = OneRank()
    engine.ask(prompt(40))
    assert engine.ask(prompt(40)).computed == 4


def test_requests_side_by_side_give_the_tokens_of_each_alone() -> None:
    engine = OneRank()
    for i in range(6):
        engine.add(f"r{i}", prompt(9 + 5 * i, seed=i))
    done = engine.run()
    assert {name: c.tokens for name, c in done.items()} == {f"r{i}": cold(prompt(9 + 5 * i, seed=i)) for i in range(6)}
    assert engine.scheduler.pool.num_free == CONFIG.num_blocks


def test_a_preempted_request_gives_the_tokens_of_an_undisturbed_one() -> None:
    engine = OneRank(replace(CONFIG, num_blocks=14))
    for i in range(3):
        engine.add(f"r{i}", prompt(15, seed=i), max_new=20)
    done = engine.run()
    assert engine.scheduler.preemptions > 0
    assert [done[f"r{i}"].tokens for i in range(3)] == [cold(prompt(15, seed=i), 20) for i in range(3)]
    assert engine.scheduler.pool.num_free == 14


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="needs 27 blocks; the engine has 24"):
        OneRank().add("r", prompt(100), max_new=6)


# ---- with a kvferry ----------------------------------------------------------------------------------------------


def evict(engine: OneRank) -> None:
    """Two long prompts push everything else out of the engine's own cache."""
    for seed in (50, 51):
        engine.ask(prompt(80, seed=seed))


def test_an_evicted_prefix_comes_back_from_kvferry() -> None:
    engine = OneRank(kvferry=FakeKvferry())
    first = engine.ask(prompt(41))
    evict(engine)
    again = engine.ask(prompt(41))
    assert (again.own, again.kvferry, again.computed) == (0, 40, 1)
    assert again.tokens == first.tokens == cold(prompt(41))


def test_what_the_own_cache_has_is_not_loaded() -> None:
    engine = OneRank(kvferry=FakeKvferry())
    engine.ask(prompt(41))
    again = engine.ask(prompt(41))
    assert (again.own, again.kvferry) == (40, 0)


def test_another_engine_and_a_restarted_one_find_what_was_stored() -> None:
    kvferry = FakeKvferry()
    first = OneRank(kvferry=kvferry).ask(prompt(41))
    other = OneRank(kvferry=kvferry).ask(prompt(41))
    assert other.kvferry == 40
    assert other.tokens == first.tokens


def test_blocks_are_stored_in_the_step_that_fills_them() -> None:
    kvferry = FakeKvferry()
    engine = OneRank(kvferry=kvferry)
    engine.add("r", prompt(41), max_new=8)
    held = []
    for _ in range(5):
        engine.step()
        held.append(len(kvferry.held))
    # Three chunks of 16 prompt tokens, then a token a step: 42 tokens, 43, 44.
    assert held == [4, 8, 10, 10, 10]
    engine.step()
    assert len(kvferry.held) == 11


def test_nothing_is_stored_twice_that_kvferry_holds() -> None:
    kvferry = FakeKvferry()
    OneRank(kvferry=kvferry).ask(prompt(41), max_new=1)
    tickets = len(kvferry.keys)
    OneRank(kvferry=kvferry).ask(prompt(41), max_new=1)
    assert len(kvferry.keys) == tickets + 1  # the load


def test_others_run_while_a_request_waits_for_its_load() -> None:
    kvferry = FakeKvferry()
    OneRank(kvferry=kvferry).ask(prompt(41))
    engine = OneRank(kvferry=kvferry)
    kvferry.hold_words = True
    engine.add("loads", prompt(41))
    engine.add("computes", prompt(20, seed=9))
    for _ in range(20):
        engine.step()
    assert set(engine.done) == {"computes"}
    kvferry.hold_words = False
    assert engine.run()["loads"].kvferry == 40


def test_a_late_answer_lets_the_next_request_pass() -> None:
    kvferry = FakeKvferry()
    OneRank(kvferry=kvferry).ask(prompt(41))
    engine = OneRank(kvferry=kvferry)
    kvferry.hold_answers = 1
    engine.add("late", prompt(41))
    engine.add("next", prompt(10, seed=9), max_new=1)
    engine.step()
    assert set(engine.done) == {"next"}
    assert engine.run()["late"].kvferry == 40


@pytest.mark.parametrize("lost", [1, 3, 10])
def test_blocks_that_a_load_failed_to_bring_are_computed(lost: int) -> None:
    kvferry = FakeKvferry()
    engine = OneRank(kvferry=kvferry)
    first = engine.ask(prompt(41))
    evict(engine)
    kvferry.fail_blocks = lost
    again = engine.ask(prompt(41))
    assert again.kvferry == 40 - 4 * lost
    assert again.tokens == first.tokens
    assert engine.client is not None
    assert list(engine.client.ended.values()) == [False]
    assert engine.scheduler.pool.num_free == CONFIG.num_blocks


def test_an_aborted_request_keeps_its_blocks_until_its_load_is_answered() -> None:
    kvferry = FakeKvferry()
    OneRank(kvferry=kvferry).ask(prompt(41))
    engine = OneRank(kvferry=kvferry)
    kvferry.hold_words = True
    engine.add("gone", prompt(41))
    engine.step()
    engine.scheduler.abort("gone")
    assert kvferry.log[-1] == f"cancel {max(kvferry.keys)}"
    for seed in (50, 51):  # the fake asserts that no block of the load is given away
        engine.add(f"r{seed}", prompt(40, seed=seed))
    for _ in range(40):
        engine.step()
    assert engine.scheduler.pool.num_free == CONFIG.num_blocks - 11
    assert "abort gone" not in kvferry.log
    kvferry.hold_words = False
    engine.run()
    assert engine.scheduler.pool.num_free == CONFIG.num_blocks
    assert "abort gone" in kvferry.log


def test_a_preempted_request_asks_kvferry_again_and_loads_what_it_had_stored() -> None:
    kvferry = FakeKvferry()
    engine = OneRank(replace(CONFIG, num_blocks=14), kvferry)
    for i in range(3):
        engine.add(f"r{i}", prompt(15, seed=i), max_new=20)
    done = engine.run()
    assert engine.scheduler.preemptions > 0
    assert any(c.kvferry > 0 for c in done.values())
    assert [done[f"r{i}"].tokens for i in range(3)] == [cold(prompt(15, seed=i), 20) for i in range(3)]
