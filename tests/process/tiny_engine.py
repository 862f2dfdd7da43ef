"""The smallest engine that can use kvferry: numbers for a KV cache, one process, any number of ranks."""

import hashlib
import time
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from kvferry import Client, Directive, KVMemory, LoadEnd, Outcome, RankClient, shared_array
from kvferry.client.memory import from_arrays
from tests.process.sidecar import Sidecar, until


def keys_of(text: str, count: int) -> list[bytes]:
    """A chain of block keys."""
    return [hashlib.sha256(f"{text}/{i}".encode()).digest() for i in range(count)]


class TinyEngine:
    """Blocks of one layer per rank, and the calls an engine makes in a step."""

    def __init__(
        self, sidecar: Sidecar, name: str = "tiny", *, ranks: int = 2, blocks: int = 32, block_bytes: int = 16384
    ) -> None:
        self.num_blocks = blocks
        self.notes: list[str] = []
        self.arrays = []
        self.ranks = []
        for rank in range(ranks):
            array, memory = self.memory(blocks, block_bytes)
            self.arrays.append(array)
            self.ranks.append(
                RankClient(
                    name, rank, world_size=ranks, memory=memory, run_dir=sidecar.run_dir, on_note=self.notes.append
                )
            )
        self.client = Client(
            name,
            world_size=ranks,
            key_bytes=32,
            num_blocks=blocks,
            block_tokens=16,
            run_dir=sidecar.run_dir,
            patience_s=5.0,  # a busy test machine is not what these tests are about
            on_note=self.notes.append,
        )

    def memory(self, blocks: int, block_bytes: int) -> tuple[npt.NDArray[np.uint8], KVMemory]:
        """A rank's KV cache: how the engine sees it, and how it is shown."""
        array, fd = shared_array((blocks, block_bytes), np.uint8)
        return array, from_arrays({"layer": array}, array, fd, block_tokens=16)

    def fill(self, blocks: list[int], seed: int) -> None:
        """Write what `seed` makes into these blocks, other bytes on each rank."""
        for rank, array in enumerate(self.arrays):
            rng = np.random.default_rng([seed, rank])
            for block in blocks:
                array[block] = rng.integers(0, 256, array.shape[1], dtype=np.uint8)

    def bytes_of(self, blocks: list[int]) -> list[bytes]:
        """What the blocks hold, for each rank."""
        return [array[blocks].tobytes() for array in self.arrays]

    def step(self) -> Directive:
        """End the engine's step: every rank obeys its directive."""
        directive = self.client.end_step()
        for rank in self.ranks:
            rank.revoke(directive)
            rank.begin_loads(directive)
            rank.begin_stores(directive)
        return directive

    def store(self, request: str, keys: list[bytes], blocks: list[int], timeout_s: float = 10.0) -> Outcome:
        """Store and wait for the job's end."""
        ticket = self.client.store(request, keys, blocks)
        assert ticket, f"not taken: {self.client.describe()}"
        self.step()
        ended: list[Outcome] = []

        def is_over() -> bool:
            for rank in self.ranks:
                rank.poll()
            ended.extend(end.outcome for end in self.client.poll() if end.ticket == ticket)
            return bool(ended)

        until(is_over, timeout_s, f"store {ticket} has no end; {self.client.describe()}")
        return ended[0]

    def hits(self, request: str, keys: list[bytes]) -> int:
        """How many leading keys are held, asking as often as the client says "not yet"."""
        self.client.lookup(request, keys)
        while not (hits := self.client.hits(request)).ready:
            time.sleep(0.001)
        return hits.count

    def load(self, request: str, keys: list[bytes], blocks: list[int], timeout_s: float = 10.0) -> list[LoadEnd]:
        """Load, and each rank's word."""
        ticket = self.client.load(request, keys, blocks)
        self.step()
        words: dict[int, LoadEnd] = {}

        def is_over() -> bool:
            self.client.poll()
            for number, rank in enumerate(self.ranks):
                for end in rank.poll().loads:
                    assert end.ticket == ticket
                    assert number not in words, "a second word on one load"
                    words[number] = end
            return len(words) == len(self.ranks)

        until(is_over, timeout_s, f"load {ticket} has words of {sorted(words)}")
        self.client.load_ended(ticket, all(end.ok for end in words.values()))
        return [words[number] for number in range(len(self.ranks))]

    def close(self) -> None:
        """Leave politely."""
        self.client.close()
        for rank in self.ranks:
            rank.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            print(self.notes, self.client.describe(), [rank.describe() for rank in self.ranks])
        self.close()
