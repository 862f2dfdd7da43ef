"""Knows which blocks get a new owner, exactly, through vLLM's block pool.

    watch([7]) ── 7 still owned ──▶ ... freed, kept in the prefix cache, hit again ... ──▶ handed out anew: fired
                                                                                             │
    take() ◀─────────────────────────────────────────────────────────────────────────────────┘  [7]

A block is written by a new owner only after the pool has handed it out (`get_new_blocks`); a prefix hit is
no new owner. `touch` followed by `unpin_blocks(on_reuse)` leaves the reference count as it was and puts a
one-shot watcher there. It also fires when the engine's prefix cache is reset.

A pool without `unpin_blocks` cannot be watched; then `is_exact` is False, and the caller takes every newly
given block for a new owner's.
"""

from collections.abc import Iterable
from typing import Any


class ReuseSensor:
    """Watches and pins blocks of one pool. All calls come from the scheduler's thread."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._fired: list[int] = []
        self.is_exact = all(hasattr(pool, name) for name in ("unpin_blocks", "touch", "blocks"))

    def watch(self, block_ids: Iterable[int]) -> None:
        """From now on `take` tells when one of these blocks is handed out anew. They must be owned now."""
        if self.is_exact:
            owned = self._owned(block_ids)
            self._pool.touch(owned)
            self._pool.unpin_blocks(owned, self._on_reuse)

    def take(self) -> list[int]:
        """Watched blocks that were handed out since the last call."""
        fired, self._fired = self._fired, []
        return fired

    def pin(self, block_ids: Iterable[int]) -> list[int]:
        """Keep these blocks from being handed out; those pinned."""
        if not self.is_exact:
            return []
        owned = self._owned(block_ids)
        self._pool.touch(owned)
        return [block.block_id for block in owned]

    def unpin(self, block_ids: Iterable[int]) -> None:
        """End of a pin; the blocks stay watched."""
        self._pool.unpin_blocks([self._pool.blocks[block_id] for block_id in block_ids], self._on_reuse)

    def _owned(self, block_ids: Iterable[int]) -> list[Any]:
        # A free block must not be touched here: it would lose its place in the order of eviction.
        blocks = [self._pool.blocks[block_id] for block_id in block_ids]
        return [block for block in blocks if block.ref_cnt > 0 and not block.is_null]

    def _on_reuse(self, block: Any) -> None:
        self._fired.append(block.block_id)
