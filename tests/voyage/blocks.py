"""An engine's blocks: who holds them, and the engine's own prefix cache over those that nobody holds any more.

Blocks are given away early and often, mostly while stores still read them: each time the client core is told, as a real
engine's connector tells it.
"""

import random
from collections import deque

from kvferry.client.core import ClientCore

from .requests import Habits, Request


class Blocks:
    """A block is free, or held by as many requests as share it. A free one keeps its key until it is given away."""

    def __init__(self, habits: Habits, core: ClientCore, rng: random.Random) -> None:
        self.cached: dict[bytes, int] = {}
        self._habits = habits
        self._core = core
        self._rng = rng
        self._free: deque[int] = deque(range(habits.num_blocks))
        self._refs = [0] * habits.num_blocks
        self._key_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int, zeros: list[int], *, is_load: bool = False, loaded: int = 0) -> list[int] | None:
        """Blocks for a new owner, or None; the first `loaded` of them will be filled by a load."""
        if len(self._free) < count:
            return None
        rng, habits = self._rng, self._habits
        chosen: list[int] = []
        if rng.random() < habits.p_wait:
            chosen = [block for block in self._free if not self._core.storing([block])][:count]
            if len(chosen) < count and rng.random() < 0.5:
                return None  # wait: perhaps a store ends
        chosen += [block for block in self._free if block not in chosen][: count - len(chosen)]
        for block in chosen:
            self.take(block)
            key = self._key_of.pop(block, None)
            if key is not None:
                del self.cached[key]
        is_zeroed = rng.random() < habits.p_zero
        if is_zeroed:
            zeros += chosen
        told = chosen if is_zeroed or habits.tells_load_blocks or not is_load else chosen[loaded:]
        self._core.written(told)
        return chosen

    def take(self, block: int) -> None:
        if self._refs[block] == 0:
            self._free.remove(block)
        self._refs[block] += 1

    def give(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            if self._habits.reuses_newest:
                self._free.appendleft(block)
            else:
                self._free.append(block)

    def release(self, request: Request) -> None:
        for block in reversed(request.blocks):
            self.give(block)
        request.blocks = []

    def cache(self, request: Request, upto: int) -> None:
        if not self._habits.has_cache:
            return
        for at in range(upto):
            key, block = request.keys[at], request.blocks[at]
            if key not in self.cached and block not in self._key_of:
                self.cached[key] = block
                self._key_of[block] = key

    def uncache(self, block: int) -> None:
        """What the block was to hold was never computed."""
        if block in self._key_of:
            del self.cached[self._key_of.pop(block)]

    def uncache_all(self) -> None:
        """What blocks hold means nothing any more."""
        for key, block in list(self.cached.items()):
            del self.cached[key], self._key_of[block]
