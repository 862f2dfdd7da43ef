"""Planting a bug and looking for it: what both tests of planted bugs share."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from .voyage import Voyage, sail

MOST_SEEDS = 800
MOST_DRAWN = 12000
Plant = Callable[[pytest.MonkeyPatch], Any]


def kinds_of(seed: int) -> set[str]:
    """The kinds of faults that a seed has, without sailing it."""
    return set(Voyage(seed).faults.kinds)


def find(plant: Plant, promise: str, patch: pytest.MonkeyPatch, needs: Iterable[Iterable[str]] = ()) -> None:
    """Sail until the bug shows; its failure must speak of `promise`, or of one of them: `a|b`.

    needs: the seed must have one kind of each of these groups: a bug that only a crash shows is looked for where
    daemons crash.
    """
    groups = [set(group) for group in needs]
    seeds = iter(range(MOST_DRAWN))
    chosen = (seed for seed in seeds if all(group & kinds_of(seed) for group in groups)) if groups else seeds
    sailed = 0
    patched = False
    for seed in chosen:
        if not patched:
            plant(patch)
            patched = True
        outcome = sail(seed)
        sailed += 1
        if outcome.failure:
            print(f"{plant.__name__}: seed {seed}, the {sailed}th: {outcome.failure}")
            assert any(word in outcome.failure for word in promise.split("|"))
            return
        if sailed == MOST_SEEDS:
            break
    pytest.fail(f"{sailed} seeds and no failure")
