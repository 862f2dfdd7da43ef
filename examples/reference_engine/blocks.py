"""The block allocator with its prefix cache: which block holds what, and who may have it next.

    taken (ref > 0) ──release──▶ free, still cached (LRU) ──take──▶ taken by another: its old key is forgotten
          ▲                             │
          └────────── hold ─────────────┘  a prompt with the same prefix came back in time

Pure bookkeeping: no tensors, no kvferry. What `take` forgets is gone for this engine; a sidecar that was told of
it in time still has it.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

KEY_BYTES = 32


def block_keys(tokens: Sequence[int], block_tokens: int, parents: Sequence[bytes] = ()) -> list[bytes]:
    """One key per full block of `tokens`: sha256 over the key before it and the block's own tokens.

    A key thus names the whole prefix up to and including its block, on every machine and in every process alike.
    `parents`: the keys of the first blocks, where they are known already.
    """
    keys = list(parents)
    parent = keys[-1] if keys else b""
    for begin in range(len(keys) * block_tokens, len(tokens) - block_tokens + 1, block_tokens):
        piece = b"".join(token.to_bytes(4, "little") for token in tokens[begin : begin + block_tokens])
        parent = hashlib.sha256(parent + piece).digest()
        keys.append(parent)
    return keys


class BlockPool:
    """Blocks 0..num_blocks-1, each free or taken, each with the key of what it holds or none.

    Invariant: a block is in the free list exactly if nobody holds it.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.evictions = 0  # cached blocks given to another owner
        self._holders = [0] * num_blocks
        self._key: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # next to be taken first

    @property
    def num_free(self) -> int:
        """Blocks nobody holds, cached or not."""
        return len(self._free)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the leading keys that are cached here. Nothing is held yet."""
        blocks: list[int] = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """Share these blocks: they are not taken away until as many releases."""
        for block in blocks:
            self._free.pop(block, None)
            self._holders[block] += 1

    def take(self, count: int) -> list[int] | None:
        """`count` blocks for a new owner, the longest unused first; None, and nothing taken, if too few are free."""
        if count > len(self._free):
            return None
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._holders[block] = 1
            self._forget(block)
        return blocks

    def commit(self, block: int, key: bytes) -> None:
        """The block now holds the KV that `key` names, complete. The first block of a key keeps the name."""
        if self._key[block] is None and key not in self._by_key:
            self._key[block] = key
            self._by_key[key] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Give blocks up, in chain order. They stay cached until taken; a chain is taken from its tail."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None
                if self._key[block] is None:  # nothing worth keeping: taken first
                    self._free.move_to_end(block, last=False)

    def forget_all(self) -> None:
        """Drop every name (the engine's reset of its prefix cache); who holds what is unchanged."""
        self._by_key.clear()
        self._key = [None] * self.num_blocks

    def _forget(self, block: int) -> None:
        key = self._key[block]
        if key is not None:
            self._key[block] = None
            del self._by_key[key]
            self.evictions += 1
