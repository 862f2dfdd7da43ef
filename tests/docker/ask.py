"""Run within an engine's container: ask the engine a few prompts, print its answers as one line of JSON.

    python3 - SEED... < ask.py     a repeatable prompt of 1,000 token ids for each seed, one after the other

Only the standard library: the container has what the engine needs, and no more.
"""

import json
import random
import sys
import time
import urllib.request
from typing import Any

ADDRESS = "http://127.0.0.1:8000"


def get(path: str, body: Any = None) -> bytes:
    """The answer to a GET, or to a POST of JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(ADDRESS + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: bytes = answer.read()
        return found


def metric(name: str) -> float:
    """A counter of the engine, summed over its labels."""
    lines = get("/metrics").decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + "{", name + " ")))


def ask(model: str, seed: int) -> dict[str, Any]:
    """One prompt: the answer's text, how many tokens it had and how many of them were found in a cache."""
    rng = random.Random(seed)
    body = {
        "model": model,
        "prompt": [rng.randrange(10, 2000) for _ in range(1000)],
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
    }
    began = time.monotonic()
    answer = json.loads(get("/v1/completions", body))
    usage = answer["usage"]
    return {
        "text": answer["choices"][0]["text"],
        "prompt": usage["prompt_tokens"],
        "cached": (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        "seconds": round(time.monotonic() - began, 3),
    }


def main() -> None:
    """Ask them all."""
    model = json.loads(get("/v1/models"))["data"][0]["id"]
    external = "vllm:external_prefix_cache_hits_total"
    before = metric(external)
    answers = [ask(model, int(seed)) for seed in sys.argv[1:]]
    print(json.dumps({"answers": answers, "from_outside": metric(external) - before}))


if __name__ == "__main__":
    main()
