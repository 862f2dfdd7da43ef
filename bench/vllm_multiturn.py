"""Many conversations in a real vLLM on CPU whose cache holds few of them: total time with and without kvferry.

    python bench/vllm_multiturn.py [--talks 24] [--turns 4] [--json FILE]   (in the environment of `make test-vllm`)

float32, one core for the model. Each conversation starts with a long prompt and goes on by short questions;
all run side by side, each turn as soon as the one before has ended. The same engine, without and with the
connector, plays the same conversations; all answers must be equal.

Run it alone: on a shared machine it measures the neighbours.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import vllm_lab as lab
from vllm_model import ModelShape, write_model

BLOCK = 128
NUM_BLOCKS = 60  # 7,552 tokens
GOAL = 0.5


def talks(count: int, turns: int, first: int, later: int) -> list[list[list[int]]]:
    """Conversations: a long first prompt, then questions."""
    return [[lab.prompt(100 * n + t, later if t else first) for t in range(turns)] for n in range(count)]


def summary(played: dict[str, Any]) -> dict[str, float]:
    """Sums over all turns."""
    turns = [turn for talk in played["talks"] for turn in talk]
    later = [turn["ttft_s"] for talk in played["talks"] for turn in talk[1:]]
    return {
        "seconds": played["seconds"],
        "prompt": sum(turn["prompt"] for turn in turns),
        "computed": sum(turn["prompt"] - turn["cached"] for turn in turns),
        "ttft_s": sum(later) / max(len(later), 1),
        "slowest_s": max(turn["ttft_s"] for turn in turns),
    }


def main() -> None:
    """Play, compare and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--talks", type=int, default=24)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--first", type=int, default=1400, help="tokens of a first prompt")
    parser.add_argument("--later", type=int, default=60, help="tokens of each later question")
    parser.add_argument("--answer", type=int, default=8, help="tokens of an answer")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write all answers' times here")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kvferry-bench-", dir="/tmp"))
    wanted = talks(arguments.talks, arguments.turns, arguments.first, arguments.later)
    options: dict[str, Any] = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK, "tp_size": arguments.tp}
    played: dict[str, dict[str, Any]] = {}
    try:
        model = write_model(folder / "model", ModelShape())
        warm = [[lab.prompt(9_000_000, 2000)]]
        with lab.running_engine(folder, model, name="without", **options) as engine:
            engine.ask(op="talk", talks=warm, max_tokens=2)
            played["without"] = engine.ask(600, op="talk", talks=wanted, max_tokens=arguments.answer)
        with (
            lab.running_sidecar(folder / "run", tp_size=arguments.tp, host_memory="1GiB") as sidecar,
            lab.running_engine(
                folder, model, name="with", kv_transfer=lab.connector(sidecar.run_dir), **options
            ) as engine,
        ):
            engine.ask(op="talk", talks=warm, max_tokens=2)
            played["with"] = engine.ask(600, op="talk", talks=wanted, max_tokens=arguments.answer)
            status = sidecar.status()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    wrong = sum(
        mine["tokens"] != due["tokens"]
        for my_talk, talk in zip(played["with"]["talks"], played["without"]["talks"], strict=True)
        for mine, due in zip(my_talk, talk, strict=True)
    )
    found = {name: summary(one) for name, one in played.items()}
    holds = (NUM_BLOCKS - 1) * BLOCK
    print(f"\n{arguments.talks} conversations of {arguments.turns} turns, the engine holds {holds} tokens")
    print(f"{'':12}{'total s':>9}{'prompt':>9}{'computed':>10}{'later TTFT s':>14}{'slowest s':>11}")
    for name, one in found.items():
        print(
            f"{name:12}{one['seconds']:9.2f}{one['prompt']:9}{one['computed']:10}{one['ttft_s']:14.3f}"
            f"{one['slowest_s']:11.2f}"
        )
    ratio = found["with"]["seconds"] / found["without"]["seconds"]
    print(f"total time ratio {ratio:.3f}, at most {GOAL}: {'met' if ratio <= GOAL else 'NOT MET'}")
    print(f"answers that differ: {wrong}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"found": found, "ratio": ratio, "wrong": wrong, "status": status}))
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
