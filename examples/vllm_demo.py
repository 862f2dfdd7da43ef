"""The main job with a real vLLM on CPU, in about two minutes: `make demo-vllm`.

    1. vLLM alone      conversations beyond its cache; each turn computes again what was evicted
    2. vLLM + kvferry  the same conversations; what was evicted comes back
    3. a second vLLM   started beside it: its first turn finds what the other one stored

No download: a small Llama with seeded weights is written to disk. All answers must be equal, token for token.
"""

import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "bench"))

import vllm_lab as lab  # noqa: E402
from vllm_model import ModelShape, write_model  # noqa: E402

from kvferry.net.paths import RunDir  # noqa: E402

TALKS, TURNS, FIRST, LATER, ANSWER = 8, 4, 1500, 60, 8
BLOCK, NUM_BLOCKS = 128, 34  # 4,224 tokens of cache for 8 conversations of about 1,750


def say(text: str) -> None:
    """A line with the time it came."""
    print(f"[{time.monotonic() - STARTED:5.1f} s] {text}", flush=True)


STARTED = time.monotonic()


def play(engine: lab.Engine, name: str) -> dict[str, Any]:
    """Play all conversations, turn by turn, and show progress."""
    talks = [[lab.prompt(100 * n + t, LATER if t else FIRST) for t in range(TURNS)] for n in range(TALKS)]
    engine.generate([lab.prompt(999_999, 2000)], 1)  # warm-up
    started = time.monotonic()
    played = engine.ask(op="talk", talks=talks, max_tokens=ANSWER)
    say(f"{name}: {TALKS} conversations of {TURNS} turns in {time.monotonic() - started:.1f} s")
    return played


def table(rows: dict[str, dict[str, Any]]) -> None:
    """Per turn: how many tokens were computed, and the time to the first token."""
    print(f"\n{'':6}{'prompt':>8}", end="")
    for name in rows:
        print(f" | {name:>24}", end="")
    print(f"\n{'turn':6}{'tokens':>8}" + " |   computed   first token" * len(rows))
    for turn in range(TURNS):
        cells = []
        for played in rows.values():
            turns = [talk[turn] for talk in played["talks"] if turn < len(talk)]
            if not turns:
                cells.append(f" | {'':>24}")
                continue
            computed = sum(one["prompt"] - one["cached"] for one in turns) / len(turns)
            ttft = sum(one["ttft_s"] for one in turns) / len(turns)
            cells.append(f" | {computed:10.0f} {ttft * 1e3:10.0f} ms")
        prompt = next(iter(rows.values()))["talks"][0][turn]["prompt"]
        print(f"{turn + 1:<6}{prompt:8}" + "".join(cells))


def main() -> int:
    """Tell the story; 0 if all answers are equal and nothing is left behind."""
    folder = Path(tempfile.mkdtemp(prefix="kvferry-demo-", dir="/tmp"))
    rows: dict[str, dict[str, Any]] = {}
    options: dict[str, Any] = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK}
    try:
        shape = ModelShape()
        model = write_model(folder / "model", shape)
        say(f"a Llama with seeded weights: {shape.layers} layers, {shape.kv_token_bytes} bytes of KV a token, float32")
        say("starting vLLM alone (20 s)")
        with lab.running_engine(folder, model, name="alone", **options) as engine:
            say(f"it holds {(NUM_BLOCKS - 1) * BLOCK} tokens")
            rows["vLLM alone"] = play(engine, "alone")
        say("starting kvferry")
        with lab.running_sidecar(folder / "run", host_memory="512MiB") as sidecar:
            say(next((line for line in reversed(sidecar.lines) if "ready" in line), "kvferry is ready"))
            say("starting vLLM with kvferry (20 s)")
            given = lab.connector(sidecar.run_dir)
            with lab.running_engine(folder, model, name="with", kv_transfer=given, **options) as engine:
                rows["vLLM + kvferry"] = play(engine, "with kvferry")
            say("that engine has ended; kvferry keeps what it stored. Starting a new one (20 s)")
            with lab.running_engine(folder, model, name="second", kv_transfer=given, **options) as engine:
                engine.generate([lab.prompt(999_998, 2000)], 1)
                firsts = [[lab.prompt(100 * n, FIRST)] for n in range(TALKS)]
                rows["a new vLLM + kvferry"] = engine.ask(op="talk", talks=firsts, max_tokens=ANSWER)
                say("the new engine was asked every conversation's first question")
            slots = sidecar.status()["slots"]
            say(f"kvferry holds {slots['ready']} blocks of {slots['total']}; {slots['pinned']} pinned")
        pool = RunDir.at(folder / "run").pool(0)
        left = [str(path) for path in (pool, *(folder / "run").glob("*.sock")) if path.exists()]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    table(rows)
    alone, mine = rows["vLLM alone"]["talks"], rows["vLLM + kvferry"]["talks"]
    new = rows["a new vLLM + kvferry"]["talks"]
    pairs = [(a, b) for x, y in zip(alone, mine, strict=True) for a, b in zip(x, y, strict=True)]
    pairs += [(a[0], b[0]) for a, b in zip(alone, new, strict=True)]
    equal = all(a["tokens"] == b["tokens"] for a, b in pairs)
    ratio = rows["vLLM + kvferry"]["seconds"] / rows["vLLM alone"]["seconds"]
    print(f"\ntotal time with kvferry: {ratio:.2f} of without")
    print(f"answers equal, token for token: {'yes, all ' + str(len(pairs)) if equal else 'NO'}")
    if left:
        print(f"left behind: {left}")
    return 0 if equal and not left else 1


if __name__ == "__main__":
    sys.exit(main())
