"""The reference engine with a real sidecar: real processes on both sides, two ranks."""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from reference_engine import Completion, Engine, EngineConfig, KvferryConfig, ModelConfig
from sidecar import Sidecar

MODEL = ModelConfig(vocab=97, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48, seed=3)
CONFIG = EngineConfig(model=MODEL, tp=2, block_tokens=4, num_blocks=48, chunk_tokens=32)
DEMO = Path(__file__).parents[2] / "examples" / "demo.py"

pytestmark = [pytest.mark.process, pytest.mark.slow]


def prompt(count: int, seed: int) -> list[int]:
    return [(seed * 31 + 7 * i + i * i * seed) % MODEL.vocab for i in range(count)]


PROMPTS = [prompt(90, seed) for seed in range(1, 7)]  # each 23 to 25 blocks: two of them fill the engine


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    """What an engine without kvferry answers."""
    with Engine(CONFIG) as engine:
        return [engine.generate(tokens, max_new=8).tokens for tokens in PROMPTS]


@pytest.fixture
def sidecar() -> Iterator[Sidecar]:
    one = Sidecar(tp=2, host_memory="64MiB")
    yield one
    left = one.close()
    assert not left
    assert not multiprocessing.active_children()


def engine(sidecar: Sidecar, engine_id: str) -> Engine:
    one = Engine(CONFIG, KvferryConfig(engine_id, sidecar.run_dir))
    assert one.wait_attached(20.0), one.client and one.client.describe()
    return one


def ask_all(one: Engine) -> list[Completion]:
    """All prompts one after the other: each pushes the others out of the engine's own cache."""
    return [one.generate(tokens, max_new=8) for tokens in PROMPTS]


def test_evicted_prefixes_come_back_in_this_engine_in_its_neighbour_and_after_a_restart(
    sidecar: Sidecar, expected: list[tuple[int, ...]]
) -> None:
    with engine(sidecar, "first") as first:
        cold = ask_all(first)
        warm = ask_all(first)
        with engine(sidecar, "neighbour") as neighbour:
            shared = ask_all(neighbour)
    with engine(sidecar, "first") as again:
        restarted = ask_all(again)
    for answers in (cold, warm, shared, restarted):
        assert [one.tokens for one in answers] == expected
    assert all(one.kvferry == 0 for one in cold)
    for answers in (warm, shared, restarted):
        assert [one.kvferry for one in answers] == [88] * len(PROMPTS)


def test_requests_side_by_side_with_loads_in_flight_give_the_same_tokens(
    sidecar: Sidecar, expected: list[tuple[int, ...]]
) -> None:
    with engine(sidecar, "first") as one:
        for _ in range(3):
            ids = [one.add(tokens, max_new=8) for tokens in PROMPTS]
            done = one.run()
            assert [done[name].tokens for name in ids] == expected
        assert any(c.kvferry for c in done.values())


def test_an_engine_whose_sidecar_stops_goes_on_alone(sidecar: Sidecar, expected: list[tuple[int, ...]]) -> None:
    with engine(sidecar, "first") as one:
        ask_all(one)
        sidecar.close()
        after = ask_all(one)
    assert [c.tokens for c in after] == expected
    assert sum(c.kvferry for c in after[1:]) == 0


def test_an_engine_without_any_sidecar_serves(tmp_path: Path, expected: list[tuple[int, ...]]) -> None:
    with Engine(CONFIG, KvferryConfig("lonely", tmp_path / "none")) as one:
        answers = ask_all(one)
    assert [c.tokens for c in answers] == expected


def leftovers() -> set[str]:
    return {str(path) for place in ("/tmp", "/dev/shm") for path in Path(place).glob("kvferry-*")}


def test_the_demo_tells_its_story_and_leaves_nothing() -> None:
    before = leftovers()
    run = subprocess.run([sys.executable, DEMO, "--quick"], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "All answers are equal" in run.stdout
    assert run.stderr == ""
    assert leftovers() <= before


@pytest.mark.parametrize("word", ["[1/3]", "ready", "turn 1", "[3/3]"])
def test_the_demo_stopped_in_the_middle_leaves_nothing(word: str) -> None:
    """Ctrl-C as a terminal sends it: to every process of the foreground group."""
    before = leftovers()
    demo = subprocess.Popen(
        [sys.executable, DEMO, "--quick"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    )
    assert demo.stdout is not None
    for line in demo.stdout:
        if word in line:
            break
    os.killpg(demo.pid, signal.SIGINT)
    out, err = demo.communicate(timeout=60)
    assert demo.returncode == 130, out + err
    assert err == ""
    with pytest.raises(ProcessLookupError):
        os.killpg(demo.pid, 0)  # nobody of its group is left
    assert leftovers() <= before
