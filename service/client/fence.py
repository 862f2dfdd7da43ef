"""The client's own fence: which unended stores read which blocks. It never waits and never asks.

    store(t, [7, 8]) ──▶ 7: {t}, 8: {t}        written([8]) ──▶ {t}: revoke or withdraw t
    end(t)           ──▶ all of t's entries go, once

The daemon keeps the index that counts; this mirror lets a step name its revokes without a round trip. An
entry is a set per block, so a job that names a block twice is still ended once.
"""

from collections.abc import Iterable, Sequence


class FenceMirror:
    """Block id -> tickets of unended stores that read it."""

    def __init__(self) -> None:
        self._readers: dict[int, set[int]] = {}
        self._blocks: dict[int, tuple[int, ...]] = {}

    def __len__(self) -> int:
        """Unended stores."""
        return len(self._blocks)

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._blocks

    def tickets(self) -> list[int]:
        """Unended stores, in ticket order."""
        return sorted(self._blocks)

    def add(self, ticket: int, blocks: Sequence[int]) -> None:
        """From now on `ticket` reads `blocks`."""
        self._blocks[ticket] = tuple(blocks)
        for block in blocks:
            self._readers.setdefault(block, set()).add(ticket)

    def keep_first(self, ticket: int, count: int) -> None:
        """Only the first `count` blocks of `ticket` were accepted: the others are not read."""
        blocks = self._blocks.get(ticket)
        if blocks is not None and count < len(blocks):
            kept = blocks[:count]
            self._drop(ticket, set(blocks[count:]) - set(kept))
            self._blocks[ticket] = kept

    def end(self, ticket: int) -> bool:
        """`ticket` reads nothing any more; False if it was not known."""
        blocks = self._blocks.pop(ticket, None)
        if blocks is None:
            return False
        self._drop(ticket, set(blocks))
        return True

    def readers(self, blocks: Iterable[int]) -> set[int]:
        """Tickets of unended stores that read any of `blocks`."""
        found: set[int] = set()
        if self._readers:
            for block in blocks:
                found |= self._readers.get(block, set())
        return found

    def _drop(self, ticket: int, blocks: set[int]) -> None:
        for block in blocks:
            readers = self._readers[block]
            readers.discard(ticket)
            if not readers:
                del self._readers[block]
