"""Which store jobs may still read which GPU blocks: from acceptance to the end of the job's last copy.

    counts[block] ── 0: nobody reads it (the fast answer, one gather a step)
                  └─ else readers[block] = ids of the jobs (the rare answer)

One index an engine incarnation, since block ids are the engine's own. Loads never enter it: the engine
holds a load's blocks until the load is answered. Entries are a set per (block, job): a job that names a
block twice is fenced once and released once.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

U32: TypeAlias = npt.NDArray[np.uint32]


class FenceIndex:
    """Blocks being read by stores of one engine of `num_blocks` blocks."""

    __slots__ = ("_counts", "_readers", "num_entries")

    def __init__(self, num_blocks: int) -> None:
        self._counts = np.zeros(num_blocks, dtype=np.uint32)
        # Almost every block has one reader: the tuple of one id is shared by all blocks of a job.
        self._readers: dict[int, tuple[int, ...]] = {}
        self.num_entries = 0  # (block, job) pairs

    def add(self, job: int, blocks: U32) -> None:
        """Fence these blocks for `job`. All are below num_blocks; a repeated one counts once."""
        mine = (job,)
        fresh = dict.fromkeys(blocks.tolist(), mine)
        if len(fresh) < len(blocks):
            blocks = np.fromiter(fresh, dtype=np.uint32, count=len(fresh))
        counts = self._counts[blocks]
        if counts.any():
            for block in fresh:
                self._readers[block] = self._readers.get(block, ()) + mine
        else:
            self._readers.update(fresh)
        self._counts[blocks] = counts + 1
        self.num_entries += len(fresh)

    def remove(self, job: int, blocks: U32) -> None:
        """Lift the fence of `job`, which was added with the same blocks."""
        ids = dict.fromkeys(blocks.tolist())
        if len(ids) < len(blocks):
            blocks = np.fromiter(ids, dtype=np.uint32, count=len(ids))
        readers = self._readers
        for block in ids:
            left = readers[block]
            if len(left) == 1:
                del readers[block]
            else:
                readers[block] = tuple(other for other in left if other != job)
        self._counts[blocks] -= np.uint32(1)
        self.num_entries -= len(ids)

    def hit(self, blocks: U32) -> list[int]:
        """The jobs that may still read any of these blocks, each once, oldest first: the least to wait for."""
        if not self.num_entries or not len(blocks):
            return []
        met = blocks[self._counts[blocks] > 0]
        return sorted({job for block in met.tolist() for job in self._readers[block]})

    def pairs(self) -> set[tuple[int, int]]:
        """All (block, job) pairs; for checks."""
        return {(block, job) for block, jobs in self._readers.items() for job in jobs}
