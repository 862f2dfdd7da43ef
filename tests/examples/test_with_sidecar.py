"""The reference engine with a real sidecar: real processes on both sides, two ranks."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from reference_engine import Completion, Engine, EngineConfig, KvferryConfig, ModelConfig
from sidecar import Sidecar

from kvferry.net.paths import RunDir

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
    """An engine that kvferry serves; patient, because a busy machine must not turn a hit into a miss here."""
    one = Engine(CONFIG, KvferryConfig(engine_id, sidecar.run_dir, patience_s=10.0))
    assert one.wait_attached(60.0), one.client and one.client.describe()
    return one


def settle(one: Engine) -> None:
    """Wait until no store is on its way: what was computed so far is then held, busy machine or not."""
    end = time.monotonic() + 30.0
    while one.client and one.client.storing(range(CONFIG.num_blocks)):
        assert time.monotonic() < end, "stores do not end"
        one.client.poll()
        time.sleep(0.005)


def ask_all(one: Engine) -> list[Completion]:
    """All prompts one after the other: each pushes the others out of the engine's own cache."""
    answers = []
    for tokens in PROMPTS:
        answers.append(one.generate(tokens, max_new=8))
        settle(one)
    return answers


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


@pytest.mark.parametrize("module", ["kvferry.gpu_worker", "kvferry.scheduler_daemon"])
def test_a_killed_process_of_the_sidecar_changes_no_token_and_the_engine_is_served_again(
    sidecar: Sidecar, expected: list[tuple[int, ...]], module: str
) -> None:
    """The process dies while loads and stores are on their way. The engine goes on, and re-attaches by itself."""
    with engine(sidecar, "first") as one:
        ask_all(one)
        ids = [one.add(tokens, max_new=8) for tokens in PROMPTS]
        for _ in range(3):
            done = {completion.id: completion for completion in one.step()}
        for victim in children(sidecar.pid, module):
            os.kill(victim, signal.SIGKILL)
        done |= one.run()
        assert [done[name].tokens for name in ids] == expected
        client = one.client
        assert client is not None
        # A dead worker leaves the cache as it was; a dead daemon takes it along, and the next one starts empty.
        wait_until(lambda: client.counters.attaches > 1 or module == "kvferry.gpu_worker")
        assert client.wait_attached(60.0)
        ask_all(one)
        assert client.wait_attached(60.0)  # a worker's death may have been noticed only by now
        again = ask_all(one)
        assert [c.tokens for c in again] == expected
        assert all(c.kvferry for c in again)


def children(parent: int, module: str) -> list[int]:
    """Living child processes of `parent` that run `module`."""
    found = []
    for process in processes():
        try:
            state, of = (process / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if state != "Z" and int(of) == parent and module.encode() in command:
            found.append(int(process.name))
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_an_engine_without_any_sidecar_serves(tmp_path: Path, expected: list[tuple[int, ...]]) -> None:
    with Engine(CONFIG, KvferryConfig("lonely", tmp_path / "none")) as one:
        answers = ask_all(one)
    assert [c.tokens for c in answers] == expected


@pytest.fixture
def temporary() -> Iterator[Path]:
    """The demo's TMPDIR, short enough for unix sockets; empty again at the end."""
    with tempfile.TemporaryDirectory(prefix="kvd") as name:
        yield Path(name)
        assert list(Path(name).iterdir()) == []


def start_demo(temporary: Path) -> subprocess.Popen[str]:
    """The quick demo in a process group of its own, as a shell starts it."""
    return subprocess.Popen(
        [sys.executable, DEMO, "--quick"],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


def assert_nothing_left(group: int, output: str) -> None:
    """No living process of the demo's, of its sidecar's run dir; none of its pool files."""
    run_dir = re.search(r"run dir (\S+),", output)
    mine = [run_dir[1].encode()] if run_dir else []
    end = time.monotonic() + 10.0
    while living := [pid for pid in processes() if belongs(pid, group, mine)]:
        assert time.monotonic() < end, living
        time.sleep(0.02)
    if run_dir:
        where = RunDir.at(run_dir[1])
        assert not [path for path in (where.path, where.pool(0), where.pool(1), where.table) if path.exists()]


def processes() -> list[Path]:
    return [path for path in Path("/proc").iterdir() if path.name.isdigit()]


def belongs(process: Path, group: int, marks: list[bytes]) -> bool:
    """Whether it lives and is of this process group or names one of the marks in its command line."""
    try:
        state, _, of_group = (process / "stat").read_text().rpartition(")")[2].split()[:3]
        command = (process / "cmdline").read_bytes()
    except OSError:
        return False
    return state != "Z" and (int(of_group) == group or any(mark in command for mark in marks))


def test_the_demo_tells_its_story_and_leaves_nothing(temporary: Path) -> None:
    demo = start_demo(temporary)
    out, err = demo.communicate(timeout=300)
    assert demo.returncode == 0, out + err
    assert "All answers are equal" in out
    assert err == ""
    assert_nothing_left(demo.pid, out)


@pytest.mark.parametrize("word", ["[1/3]", "kvferry ready"])
def test_the_demo_stopped_in_the_middle_leaves_nothing(temporary: Path, word: str) -> None:
    """Ctrl-C as a terminal sends it, to every process of the foreground group, and twice, as people do."""
    demo = start_demo(temporary)
    assert demo.stdout is not None
    seen = ""
    for line in demo.stdout:
        seen += line
        if word in line:
            break
    os.killpg(demo.pid, signal.SIGINT)
    time.sleep(0.1)  # or the two would be one
    os.killpg(demo.pid, signal.SIGINT)
    out, err = demo.communicate(timeout=60)
    assert demo.returncode == 130, seen + out + err
    assert err == ""
    assert_nothing_left(demo.pid, seen + out)
