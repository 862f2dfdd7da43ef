"""Bugs to plant in the workers and copiers of a check: each is one that a GPU would hide from every other test."""

from collections.abc import Callable
from typing import Any

import numpy as np

from kvferry.gpu_worker import layout
from kvferry.gpu_worker.guards import Guards
from kvferry.gpu_worker.pool import PoolHeaders
from kvferry.proto.page import PageReader


def marks_are_ignored() -> None:
    PageReader.mark = lambda self: 1 << 60  # type: ignore[method-assign]


def revokes_are_ignored() -> None:
    Guards.is_revoked = lambda self, transfer: False  # type: ignore[method-assign]


def generations_are_ignored() -> None:
    PoolHeaders.torn = lambda self, slots, generations: np.empty(0, np.uint32)  # type: ignore[method-assign]


def neighbours_are_joined_too_eagerly() -> None:
    """Joined where they touch on one side only."""
    coalesce = layout.coalesce

    def eager(src: Any, dst: Any, size: Any) -> Any:
        if len(size) < 2 or (src[:-1] + size[:-1] == src[1:]).all():
            return coalesce(src, dst, size)
        return coalesce(src, np.concatenate([dst[:1], dst[:1] + np.cumsum(size[:-1])]).astype(np.uint64), size)

    layout.coalesce = eager


BUGS: dict[str, Callable[[], None]] = {
    bug.__name__: bug
    for bug in (marks_are_ignored, revokes_are_ignored, generations_are_ignored, neighbours_are_joined_too_eagerly)
}
