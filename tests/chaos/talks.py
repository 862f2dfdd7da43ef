"""What the users ask and what must come back: repeatable conversations and the answers of an engine alone.

A conversation's later prompts hold the answers that came before. They are always the baseline's, so that one
wrong answer is counted once and does not make all later ones differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_lab import prompt

# Float32 noise in a log probability is about 1e-5: sums in another order. A wrong block moves it by 0.1 and more.
NOISE = 1e-3
# Where the best two tokens are nearer than this, noise might choose between them: such talks are not used.
CLEAR = 1e-3


@dataclass(frozen=True, slots=True)
class Answer:
    """What came for one turn: tokens and their log probabilities, as many of each."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int = 0  # tokens of the prompt that were not computed


@dataclass(frozen=True, slots=True)
class Talk:
    """One conversation: each turn's own tokens, and how long each answer is to be."""

    number: int
    turns: tuple[tuple[int, ...], ...]
    answer_tokens: int

    def prompt(self, turn: int, answers: Sequence[Answer]) -> list[int]:
        """Everything said before `turn`, and what is asked in it."""
        said: list[int] = []
        for earlier in range(turn):
            said += [*self.turns[earlier], *answers[earlier].tokens]
        return [*said, *self.turns[turn]]


def make_talks(count: int, seed: int, lengths: Sequence[int], answer_tokens: int) -> list[Talk]:
    """Conversations whose turns have these many tokens of their own."""
    made = []
    for number in range(count):
        turns = (tuple(prompt(seed * 100_003 + number * 101 + at, length)) for at, length in enumerate(lengths))
        made.append(Talk(number, tuple(turns), answer_tokens))
    return made


def difference(mine: Answer, due: Answer) -> str:
    """What is wrong with an answer, in words; empty if nothing is."""
    if mine.tokens != due.tokens:
        pairs = zip(mine.tokens, due.tokens, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(mine.tokens), len(due.tokens)))
        return f"token {at} of {len(due.tokens)} differs"
    far = max((abs(a - b) for a, b in zip(mine.logprobs, due.logprobs, strict=True)), default=0.0)
    return f"a log probability is off by {far:.4g}" if far > NOISE else ""
