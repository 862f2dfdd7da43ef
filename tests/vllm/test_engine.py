"""A real vLLM on CPU beside a real sidecar: everything it answers must be what it answers alone.

Engine starts take most of the time (15 to 25 s each), so one story is told for each world size, in the order
of the tests: an engine alone, an engine with a sidecar, a second one beside it, the first one again.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vllm_lab as lab
from engine_kit import (
    BLOCK,
    CACHE,
    FILLERS,
    NOISE,
    PATIENCE_MS,
    PROMPT,
    PROMPTS,
    SHAPE,
    WHOLE,
    difference,
    evict,
    held,
    returned,
    same,
)
from vllm_model import write_mla_model, write_model

from kvferry.net.paths import RunDir
from kvferry.proto.layout import slot_bytes

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TALKS = [[lab.prompt(1000 + 10 * talk + turn, (220, 90, 60)[turn]) for turn in range(3)] for talk in range(24)]


@dataclass
class World:
    """What the tests of one world size share."""

    tp_size: int
    folder: Path
    model: Path
    run_dir: Path
    stack: ExitStack
    alone: dict[str, Any] = field(default_factory=dict)
    sidecar: Any = None
    engine: Any = None

    def start(self, name: str, **kv_transfer: Any) -> lab.Engine:
        """Start an engine with the sidecar's connector."""
        trace = str(self.folder / f"{name}.trace")
        made = lab.connector(self.run_dir, trace=trace, patience_ms=PATIENCE_MS, **kv_transfer)
        engine = lab.start_engine(self.folder, self.model, name=name, kv_transfer=made, **self.options())
        engine.answer(240.0)
        return engine

    def options(self) -> dict[str, Any]:
        return {"tp_size": self.tp_size, **CACHE}


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    folder = Path(tempfile.mkdtemp(prefix="kvferry-vllm-", dir="/tmp"))
    model = write_model(folder / "model", SHAPE)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        made = World(request.param, folder, model, folder / "run", stack)
        with lab.running_engine(folder, model, name="alone", **made.options()) as engine:
            answers = engine.generate(list(PROMPTS.values()))
            made.alone = dict(zip(PROMPTS, answers, strict=True))
            made.alone["talks"] = engine.ask(op="talk", talks=TALKS, max_tokens=16)
        made.sidecar = stack.enter_context(
            lab.running_sidecar(made.run_dir, tp_size=made.tp_size, host_memory="256MiB")
        )
        made.engine = made.start("first")
        stack.callback(lambda: lab.stop_engine(made.engine))
        yield made
        assert "failed; caching is off" not in (folder / "first.log").read_text()


def test_an_evicted_prefix_comes_back_and_the_answer_is_the_same(world: World) -> None:
    for name, prompt in PROMPTS.items():
        same(world.engine.generate([prompt])[0], world.alone[name])
    evict(world.engine)
    for name in PROMPTS:
        assert returned(world.engine, PROMPTS[name], world.alone[name]) == WHOLE


def test_a_second_engine_finds_what_the_first_one_stored(world: World) -> None:
    engine = world.start("second", by_name=True)
    try:
        for name in PROMPTS:
            assert returned(engine, PROMPTS[name], world.alone[name]) == WHOLE
    finally:
        lab.stop_engine(engine)


def test_an_engine_that_was_killed_finds_everything_again(world: World) -> None:
    lab.stop_engine(world.engine, kill=True)
    world.engine = world.start("third")
    for name in PROMPTS:
        assert returned(world.engine, PROMPTS[name], world.alone[name]) == WHOLE


def test_24_conversations_beyond_the_engines_capacity(world: World) -> None:
    alone, mine = world.alone["talks"], world.engine.ask(op="talk", talks=TALKS, max_tokens=16)
    for my_talk, talk in zip(mine["talks"], alone["talks"], strict=True):
        for my_turn, turn in zip(my_talk, talk, strict=True):
            same(my_turn, turn)

    def computed(talks: list[list[dict[str, Any]]]) -> int:
        return sum(turn["prompt"] - turn["cached"] for talk in talks for turn in talk)

    print(
        f"computed {computed(mine['talks'])} of {computed(alone['talks'])}; {mine['seconds']} s, {alone['seconds']} s"
    )
    # Where each rank has a core and spins, lookups are answered late, beyond a request's patience: how much less is
    # computed there is no promise.
    most = 0.75 if world.tp_size == 1 else 1.0
    assert computed(mine["talks"]) < most * computed(alone["talks"])
    slowest = max(turn["ttft_s"] for talk in mine["talks"] for turn in talk)
    assert slowest < max(turn["ttft_s"] for talk in alone["talks"] for turn in talk) + 5, "a request stood still"


def test_aborts_and_preemptions_leave_the_engine_right(world: World) -> None:
    engine = world.engine
    for steps in (1, 2, 3, 6):
        engine.ask(op="abort", prompts=[*PROMPTS.values(), *FILLERS[:2]], max_tokens=40, steps=steps)
        evict(engine)
        for name, prompt in PROMPTS.items():
            same(engine.generate([prompt])[0], world.alone[name])
    # Each of these fits, all of them together with their answers do not: some are preempted.
    crowd = [lab.prompt(300 + n, 480) for n in range(6)]
    answers = engine.generate(crowd, 64)
    evict(engine)
    for answer, again in zip(answers, engine.generate(crowd, 64), strict=True):
        same(again, answer)


def test_a_reset_finds_nothing_again_and_the_answers_stay_right(world: World) -> None:
    engine = world.engine
    assert engine.ask(op="reset", connector=True)["ok"] is not False
    answer = engine.generate([PROMPTS["p0"]])[0]
    assert held(answer) == 0
    same(answer, world.alone["p0"])
    evict(engine)
    assert returned(engine, PROMPTS["p0"], world.alone["p0"]) == WHOLE, "what was stored since the reset is found"


def test_the_control_wrong_bytes_in_the_pool_would_be_noticed(world: World) -> None:
    """Last of its world: it spoils the pool. Without this, equal answers would prove nothing."""
    engine = world.engine
    name, prompt = "p1", PROMPTS["p1"]
    engine.generate([prompt])
    evict(engine)
    payload = BLOCK * SHAPE.kv_token_bytes // world.tp_size
    for rank in range(world.tp_size):
        spoil(RunDir.at(world.run_dir).pool(rank), payload)
    for _ in range(3):
        answer = engine.generate([prompt])[0]
        if held(answer) == WHOLE:
            break
        evict(engine)
    assert held(answer) == WHOLE
    assert difference(answer, world.alone[name]) > 100 * NOISE


def spoil(pool: Path, payload: int) -> None:
    """Other numbers of ordinary size into one 32-token block in eight; headers stay as they are."""
    page, rng = 4096, np.random.default_rng(0)
    values = np.memmap(pool, dtype=np.uint8, mode="r+")
    for at in range(page, len(values) - slot_bytes(payload), 8 * slot_bytes(payload)):
        noise = rng.standard_normal(payload // 4).astype(np.float32)
        values[at + page : at + page + payload] = noise.view(np.uint8)


def test_a_model_with_latent_attention_is_served() -> None:
    """MLA: vLLM on CPU has no prefix cache of its own for it, so whatever is not computed came from the sidecar."""
    folder = Path(tempfile.mkdtemp(prefix="kvferry-vllm-", dir="/tmp"))
    try:
        model = write_mla_model(folder / "model")
        made = lab.connector(folder / "run", patience_ms=PATIENCE_MS)
        with (
            lab.running_sidecar(folder / "run", host_memory="64MiB"),
            lab.running_engine(folder, model, name="mla", kv_transfer=made, num_blocks=200, block_size=16) as engine,
        ):
            due = engine.generate([PROMPTS["p0"]])[0]
            assert due["cached"] == 0
            again = engine.generate([PROMPTS["p0"]])[0]
            assert again["cached"] == (PROMPT - 1) // 16 * 16
            # What follows a held prefix is computed by kernels that vLLM on CPU otherwise never uses for MLA (it
            # turns its prefix cache and chunked prefill off); they differ by 0.06 from those for whole prompts.
            assert again["tokens"] == due["tokens"]
            assert difference(again, due) < 0.15
            same(engine.generate([PROMPTS["p0"]])[0], again)
            spoil(RunDir.at(folder / "run").pool(0), 16 * 576 * 4 * 2)
            wrong = engine.generate([PROMPTS["p0"]])[0]
            assert wrong["cached"] == again["cached"]
            assert wrong["tokens"] != due["tokens"]
            assert difference(wrong, again) > 0.3
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_an_engine_without_a_sidecar_serves_and_finds_one_that_comes_later(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="kvferry-vllm-", dir="/tmp"))
    model = write_model(folder / "model", SHAPE)
    made = lab.connector(folder / "run", patience_ms=PATIENCE_MS)
    try:
        with lab.running_engine(folder, model, name="early", kv_transfer=made, **CACHE) as engine:
            before = engine.generate([PROMPTS["p0"]])[0]
            with lab.running_sidecar(folder / "run", host_memory="128MiB") as sidecar:
                for _ in range(100):
                    evict(engine)
                    answer = engine.generate([PROMPTS["p0"]])[0]
                    same(answer, before)
                    if held(answer) == WHOLE:
                        break
                assert held(answer) == WHOLE, "\n".join(sidecar.lines)
            evict(engine)
            same(engine.generate([PROMPTS["p0"]])[0], before)  # and without one again
    finally:
        shutil.rmtree(folder, ignore_errors=True)
