"""What memory holds in a voyage: one number for each half of a block or slot, on each rank.

Stamps      (meaning, key, rank) -> the number that this block must hold. A meaning is what a namespace
            stands for: model and salt. Equal keys under different meanings have different numbers.
RankMemory  a rank's blocks                 PoolFile   a rank's slots, with their generation words
Copier      carries out one batch: each half of each block at a moment of its own, so that whoever
            writes meanwhile really mixes the bytes
"""

import random
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from kvferry.gpu_worker.api import SubmitCopy
from kvferry.proto.outcome import Kind

from .clock import US, Party

ZERO = 0


class Stamps:
    """Numbers for contents, given at first sight; readable again in a failure's text."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Hashable, bytes], int] = {}
        self._names: list[tuple[Hashable, bytes]] = []

    def of(self, meaning: Hashable, key: bytes, rank: int) -> int:
        """What a block of `key` holds on `rank`."""
        name = (meaning, key)
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self._names) + 1
            self._names.append(name)
        return number << 8 | rank

    def text(self, stamp: int) -> str:
        """What a number stands for."""
        if stamp == ZERO:
            return "zeros"
        if not 0 < stamp >> 8 <= len(self._names):
            return f"junk {stamp}"
        meaning, key = self._names[(stamp >> 8) - 1]
        return f"{meaning}/{key.hex()}@rank{stamp & 255}"


class Halves:
    """Contents of n places, two halves each."""

    def __init__(self, count: int) -> None:
        self.half: tuple[list[int], list[int]] = ([ZERO] * count, [ZERO] * count)

    def write(self, place: int, stamp: int) -> None:
        """Both halves at once."""
        self.half[0][place] = self.half[1][place] = stamp

    def holds(self, place: int, stamp: int) -> bool:
        """Whether both halves hold `stamp`."""
        return self.half[0][place] == stamp == self.half[1][place]

    def text(self, place: int, stamps: Stamps) -> str:
        """What lies at a place, for people."""
        return f"[{stamps.text(self.half[0][place])} | {stamps.text(self.half[1][place])}]"


class PoolFile(Halves):
    """One rank's pool file: slots and the generation words of their headers. Is a `SlotHeaders`."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self.gen_open = [0] * num_slots
        self.gen_close = [0] * num_slots

    def open(self, slots: Any, generations: Any) -> None:
        """Before the first byte of a store."""
        for slot, generation in zip(slots.tolist(), generations.tolist(), strict=True):
            self.gen_open[slot] = generation

    def close(self, slots: Any, generations: Any) -> None:
        """After the last byte of a store."""
        for slot, generation in zip(slots.tolist(), generations.tolist(), strict=True):
            self.gen_close[slot] = generation

    def torn(self, slots: Any, generations: Any) -> Any:
        """Positions whose words are not the plan's generation."""
        bad = [
            at
            for at, (slot, generation) in enumerate(zip(slots.tolist(), generations.tolist(), strict=True))
            if not self.gen_open[slot] == self.gen_close[slot] == generation
        ]
        return np.asarray(bad, dtype=np.uint32)


class Copier:
    """One worker's device."""

    def __init__(
        self,
        party: Party,
        rng: random.Random,
        blocks: Halves,
        pool: PoolFile,
        on_touch: Callable[[SubmitCopy, int, int], None],
        on_copied: Callable[[int, bool], None],
        slow_ns: int,
        fail: float,
    ) -> None:
        self.busy: dict[int, SubmitCopy] = {}  # token -> batch
        self._party = party
        self._rng = rng
        self._blocks = blocks
        self._pool = pool
        self._on_touch = on_touch
        self._on_copied = on_copied
        self._slow_ns = slow_ns
        self.fail = fail

    def submit(self, batch: SubmitCopy) -> None:
        """Start one batch; it ends by `on_copied(token, ok)`."""
        self.busy[batch.token] = batch
        rng = self._rng
        length_ns = rng.randrange(10 * US, self._slow_ns)
        good = not (self.fail and rng.random() < self.fail)
        for slot, block in zip(batch.slots.tolist(), batch.blocks.tolist(), strict=True):
            for half in (0, 1):
                if good or rng.random() < 0.5:
                    self._party.after(rng.randrange(length_ns), self._move, batch, slot, block, half)
        self._party.after(length_ns, self._end, batch.token, good)

    def _move(self, batch: SubmitCopy, slot: int, block: int, half: int) -> None:
        self._on_touch(batch, slot, block)
        if batch.kind == Kind.STORE:
            self._pool.half[half][slot] = self._blocks.half[half][block]
        else:
            self._blocks.half[half][block] = self._pool.half[half][slot]

    def _end(self, token: int, good: bool) -> None:
        del self.busy[token]
        self._on_copied(token, good)
