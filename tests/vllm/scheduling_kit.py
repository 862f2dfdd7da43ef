"""What tests of the connector under vLLM's schedulers share beside `vllm_scheduling`. Imports no vLLM."""

import random
from typing import Any

import pytest
from fake_sidecar import FakeSidecar

BOTH = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


def tokens(seed: int, count: int) -> list[int]:
    """A repeatable prompt."""
    rng = random.Random(seed)
    return [rng.randrange(10, 1000) for _ in range(count)]


def all_content(lab: Any, engine: Any) -> dict[bytes, tuple[int, ...]]:
    """Key -> what a block of that name must hold, for all prefixes any request had."""
    truth = {}
    for prompt, made in engine.asked:
        request = engine.request(prompt + made)
        value, chain = 0, []
        for token in prompt + made:
            value = hash((value, token))
            chain.append(value)
        for i, key in enumerate(request.block_hashes):
            truth[bytes(key)] = tuple(chain[i * lab.BLOCK : (i + 1) * lab.BLOCK])
    return truth


def check_held(lab: Any, engine: Any, sidecar: FakeSidecar) -> None:
    """Everything that is published holds what its key names."""
    truth = all_content(lab, engine)
    for key, parts in sidecar.held.items():
        assert all(part == truth[key] for part in parts), "a published key does not hold what it names"
