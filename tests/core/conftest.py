"""Worlds for tests: every one of them must be able to come to rest."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .dummy import World, come_to_rest


@pytest.fixture
def worlds() -> Iterator[Callable[..., World]]:
    """Makes worlds of any shape; the sums are checked after each event and at rest."""
    made: list[World] = []

    def make(**how: Any) -> World:
        made.append(World(**how))
        return made[-1]

    yield make
    for world in made:
        come_to_rest(world)


@pytest.fixture
def world(worlds: Callable[..., World]) -> World:
    """Two ranks, 16 slots."""
    return worlds()
