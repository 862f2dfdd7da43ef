"""What tests with a real engine on CPU share: a cache that prompts overflow, and how answers are compared. No vLLM."""

from typing import Any, Final

import numpy as np
import vllm_lab as lab
from vllm_model import ModelShape

SHAPE: Final = ModelShape(layers=4)
BLOCK: Final = 32
CACHE: Final = {"num_blocks": 100, "block_size": BLOCK}  # 3168 tokens
PROMPT: Final = 1000
WHOLE: Final = (PROMPT - 1) // BLOCK
PROMPTS: Final = {f"p{n}": lab.prompt(n, PROMPT) for n in range(2)}
FILLERS: Final = [lab.prompt(100 + n, 900) for n in range(4)]  # more than the cache holds
NOISE: Final = 1e-3  # float32 noise in log probabilities is about 1e-5; a wrong block moves them by 0.1 and more

# On a crowded machine an answer may come late; then a request is rightly computed, and these tests prove nothing.
PATIENCE_MS: Final = 5000


def difference(mine: dict[str, Any], due: dict[str, Any]) -> float:
    """The largest one of two answers' log probabilities."""
    return float(np.abs(np.subtract(mine["logprobs"], due["logprobs"])).max())


def same(mine: dict[str, Any], due: dict[str, Any]) -> None:
    """Tokens equal, log probabilities equal but for float32 noise."""
    assert mine["tokens"] == due["tokens"]
    assert difference(mine, due) < NOISE


def evict(engine: lab.Engine) -> None:
    """Push everything out of the engine's own cache."""
    engine.generate(FILLERS, 1)


def held(answer: dict[str, Any]) -> int:
    """Blocks of the prompt that were not computed."""
    return int(answer["cached"]) // BLOCK


def returned(engine: lab.Engine, prompt: list[int], due: dict[str, Any]) -> int:
    """Blocks of a stored prompt that came back, in the best of three tries; the answer is right in each.

    A load that a crowded machine makes late is a miss and no fault: the prompt is evicted and asked for again.
    """
    found = 0
    for _ in range(3):
        answer = engine.generate([prompt])[0]
        same(answer, due)
        found = max(found, held(answer))
        if found == WHOLE:
            break
        evict(engine)
    return found
