"""Simulated time: one queue of events, run in order of their time and then of their entry.

A fault is an event like any other: whoever wants a crash at some moment puts it into the queue.
"""

import heapq
from collections.abc import Callable
from typing import Any

US = 1_000
MS = 1_000_000
S = 1_000_000_000


class Clock:
    """The queue and its present moment."""

    def __init__(self) -> None:
        self.now_ns = 1 * S  # not 0: a zero is "none" in many fields
        self.num_run = 0
        self._queue: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._entered = 0

    def at(self, when_ns: int, deed: Callable[..., None], *args: Any) -> None:
        """Run `deed(*args)` at `when_ns`, or now if that is over."""
        self._entered += 1
        heapq.heappush(self._queue, (max(when_ns, self.now_ns), self._entered, deed, args))

    def after(self, delay_ns: int, deed: Callable[..., None], *args: Any) -> None:
        """Run `deed(*args)` in `delay_ns`."""
        self.at(self.now_ns + delay_ns, deed, *args)

    def run_one(self) -> bool:
        """Run the next event; False if there is none."""
        if not self._queue:
            return False
        self.now_ns, _, deed, args = heapq.heappop(self._queue)
        self.num_run += 1
        deed(*args)
        return True
