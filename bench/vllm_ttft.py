"""Time to first token of a returning prefix in a real vLLM on CPU: cold, own cache, after eviction. One command.

    python bench/vllm_ttft.py [--rounds 5] [--json FILE]        (in the environment of `make test-vllm`)

float32, one core for the model, a prefix of 4,096 tokens and 24 MiB of KV. Two engines that differ in nothing
but the connector take turns on the same core, so that both see the same machine; medians are compared. A
prefix is evicted by other prompts of its length. Where the time goes is read from the connector's trace.

Run it alone: on a shared machine it measures the neighbours.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import vllm_lab as lab
from vllm_model import ModelShape, write_model

TOKENS = 4100
BLOCK = 128
NUM_BLOCKS = 50  # one prompt and a half
HELD = TOKENS // BLOCK * BLOCK
GOALS = {"ratio": 0.06, "above_own_ms": 20.0, "own_cost_ms": 2.0}


def ask(engine: lab.Engine, prompt: list[int], cached: int) -> float:
    """Milliseconds to the first token; it must have found so many tokens."""
    answer = engine.generate([prompt], 1)[0]
    if answer["cached"] != cached:
        print(f"  note: {answer['cached']} tokens were found, {cached} expected", flush=True)
    return float(answer["ttft_s"]) * 1e3


def measure(folder: Path, rounds: int, repeats: int) -> dict[str, Any]:
    """All samples, in milliseconds."""
    model = write_model(folder / "model", ModelShape())
    trace = folder / "trace.jsonl"
    samples: dict[str, list[float]] = {name: [] for name in ("cold", "cold_with", "own", "own_with", "evicted")}
    prompt, fillers = lab.prompt(1, TOKENS), [lab.prompt(2, TOKENS), lab.prompt(3, TOKENS)]
    options: dict[str, Any] = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK}
    with (
        lab.running_sidecar(folder / "run", host_memory="512MiB") as sidecar,
        lab.running_engine(folder, model, name="without", **options) as plain,
        lab.running_engine(
            folder, model, name="with", kv_transfer=lab.connector(sidecar.run_dir, trace=str(trace)), **options
        ) as mine,
    ):
        for engine in (plain, mine):  # warm-up: first calls compile and touch memory
            for one in (prompt, *fillers):
                engine.generate([one], 1)
        fresh = 1000
        for _ in range(rounds):
            for engine, cold, own in ((plain, "cold", "own"), (mine, "cold_with", "own_with")):
                time.sleep(0.5)  # let the other engine's processes fall asleep
                fresh += 1
                samples[cold].append(ask(engine, lab.prompt(fresh, TOKENS), 0))
                if engine is plain:
                    engine.generate([prompt], 1)
                else:
                    for filler in fillers:
                        engine.generate([filler], 1)
                    for _ in range(repeats):
                        samples["evicted"].append(ask(engine, prompt, HELD))
                        for filler in fillers:
                            engine.generate([filler], 1)
                    engine.generate([prompt], 1)
                for _ in range(repeats):
                    samples[own].append(ask(engine, prompt, HELD))
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    loads = [line for line in lines if line.get("ok") and line["blocks"] == HELD // BLOCK]
    return {"samples": samples, "loads": loads, "misses": [line for line in lines if line["blocks"] == 0]}


def report(found: dict[str, Any]) -> dict[str, float]:
    """Print the table; the numbers that goals are set for."""
    samples, loads = found["samples"], found["loads"]
    middle = {name: statistics.median(values) for name, values in samples.items()}
    print(f"\n{TOKENS} prompt tokens, {HELD} of them held, {HELD * ModelShape().kv_token_bytes / 2**20:.0f} MiB of KV")
    print(f"{'time to first token, ms':34}{'median':>9}{'least':>9}{'most':>9}{'n':>5}")
    texts = {
        "cold": "cold, without a connector",
        "cold_with": "cold, with kvferry",
        "own": "own cache, without a connector",
        "own_with": "own cache, with kvferry",
        "evicted": "after eviction, from kvferry",
    }
    for name, text in texts.items():
        values = samples[name]
        print(f"{text:34}{middle[name]:9.1f}{min(values):9.1f}{max(values):9.1f}{len(values):5}")
    if loads:
        copy = statistics.median(line["copy_ms"] for line in loads)
        received = statistics.median(line["received_ms"] for line in loads)
        print("\nof the time after eviction, ms")
        print(f"  {'lookup, from sent to answered':40}{statistics.median(x['answered_ms'] for x in loads):8.2f}")
        told = statistics.median(line["told_ms"] - line["answered_ms"] for line in loads)
        print(f"  {'blocks given, orders to the rank':40}{told:8.2f}")
        print(f"  {'rank to first byte':40}{statistics.median(line['wait_ms'] for line in loads):8.2f}")
        print(f"  {'copying':40}{copy:8.2f}")
        seen = statistics.median(
            line["received_ms"] - line["told_ms"] - line["wait_ms"] - line["copy_ms"] for line in loads
        )
        print(f"  {'word to the engine, between its steps':40}{seen:8.2f}")
        print(f"  {'the rest: computing the prompt’s end':40}{middle['evicted'] - received:8.2f}")
        print(f"  waiting {received - copy:.1f}, copying {copy:.1f}, the rest {middle['evicted'] - received:.1f}")
    numbers = {
        "ratio": middle["evicted"] / middle["cold"],
        "above_own_ms": middle["evicted"] - middle["own_with"],
        "own_cost_ms": middle["own_with"] - middle["own"],
    }
    print(f"\n{'goal':46}{'found':>9}{'at most':>9}")
    says = {
        "ratio": "after eviction / cold",
        "above_own_ms": "after eviction above own cache, ms",
        "own_cost_ms": "own cache with a connector above without, ms",
    }
    for name, goal in GOALS.items():
        print(f"{says[name]:46}{numbers[name]:9.3f}{goal:9.2f}  {'met' if numbers[name] <= goal else 'NOT MET'}")
    return numbers


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each engine")
    parser.add_argument("--repeats", type=int, default=8, help="samples of each kind in a turn")
    parser.add_argument("--json", type=Path, help="write all samples here")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kvferry-bench-", dir="/tmp"))
    try:
        found = measure(folder, arguments.rounds, arguments.repeats)
        numbers = report(found)
        if arguments.json:
            arguments.json.write_text(json.dumps({**found, "numbers": numbers}, indent=1))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
