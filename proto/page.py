"""The shared page of one rank: 4 KiB that the engine's side writes and its worker reads.

    byte    0  magic, u64
    byte   64  mark, u64: a step counter, moved on by the engine's stream (on CPU: by the engine itself)
    byte  128  revoke_count, u64: revokes ever written
    byte  192  ended_count, u64: store copies ever ended (the worker writes this one and its ring)
    byte  256  revoke_floor, u64: the highest ticket whose revoke has left the ring
    byte 1024  ring of the last 256 revoked tickets, u64
    byte 3072  ring of the last 128 tickets whose store copy ended, u64

A ticket is written before its count is raised, so a reader that sees the count sees the ticket. A count
that moved further than the ring is long means that tickets were missed: all of them are at or below the
floor, which is raised before a ticket leaves the ring, so the reader takes every ticket up to there as
revoked from then on. That costs stores and never bytes.

Both classes work on a `memoryview` of a shared mapping (the owner keeps the mapping alive) and are
plain aligned 8-byte loads and stores.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from kvferry.proto import limits

MAGIC: Final = 0x3147_4150_5259_564B  # "KVYRPAG1"
MARK: Final = 64 // 8
REVOKE_COUNT: Final = 128 // 8
ENDED_COUNT: Final = 192 // 8
REVOKE_FLOOR: Final = 256 // 8
REVOKE_RING: Final = 1024 // 8
REVOKE_SLOTS: Final = 256
ENDED_RING: Final = 3072 // 8
ENDED_SLOTS: Final = 128
WORDS: Final = limits.PAGE_BYTES // 8
# Revoked tickets a reader keeps before it lets the older half count as revoked for good.
REMEMBERED: Final = 16 * REVOKE_SLOTS


class PageWriter:
    """The engine's side, on the host: marks and revokes are plain stores."""

    def __init__(self, view: memoryview) -> None:
        self._words = np.frombuffer(view, dtype=np.uint64, count=WORDS)
        self._words[0] = MAGIC

    def signal(self) -> int:
        """Move the mark on; the new mark, > 0. Everything done before this call lies before the mark."""
        mark = int(self._words[MARK]) + 1
        self._words[MARK] = mark
        return mark

    def mark(self) -> int:
        """The present mark."""
        return int(self._words[MARK])

    def revoke(self, tickets: Iterable[int]) -> None:
        """Tell the worker that these stores may now read mixed bytes. Before anything overwrites the blocks."""
        count = int(self._words[REVOKE_COUNT])
        for ticket in tickets:
            at = REVOKE_RING + count % REVOKE_SLOTS
            leaves = int(self._words[at])
            if leaves > int(self._words[REVOKE_FLOOR]):
                self._words[REVOKE_FLOOR] = leaves
            self._words[at] = ticket
            count += 1
            self._words[REVOKE_COUNT] = count

    def copies_ended(self, tickets: Sequence[int]) -> set[int]:
        """Those of `tickets` whose store copy is known to be over (recent ones only)."""
        ring = self._words[ENDED_RING : ENDED_RING + ENDED_SLOTS]
        return set(tickets) & set(ring.tolist())


class PageReader:
    """The worker's side. `revoked` is asked after the last byte of a store and before its report."""

    def __init__(self, view: memoryview) -> None:
        self._words = np.frombuffer(view, dtype=np.uint64, count=WORDS)
        self._seen = int(self._words[REVOKE_COUNT])
        self._revoked: set[int] = set()
        self._floor = 0  # every ticket up to here counts as revoked
        self.overflows = 0

    def is_sound(self) -> bool:
        """Whether a writer of this format has set the page up."""
        return int(self._words[0]) == MAGIC

    def mark(self) -> int:
        """The present mark."""
        return int(self._words[MARK])

    def revoked(self, tickets: Iterable[int]) -> set[int]:
        """Those of `tickets` that are revoked by now; after an overrun also all up to the floor.

        Ticket 0, which no store has, comes back from the call that met an overrun and from no other.
        """
        count = int(self._words[REVOKE_COUNT])
        for at in range(max(self._seen, count - REVOKE_SLOTS), count):
            self._revoked.add(int(self._words[REVOKE_RING + at % REVOKE_SLOTS]))
        # Looked at after the ring: the writer may have overrun it while it was read, and what it drove
        # out then is below the floor of now.
        floor, overrun = int(self._words[REVOKE_FLOOR]), False
        if int(self._words[REVOKE_COUNT]) - self._seen > REVOKE_SLOTS:
            self.overflows += 1
            overrun = True
            self._floor = max(self._floor, floor)
        self._seen = count
        if len(self._revoked) > REMEMBERED:
            self._raise_floor()
        return {t for t in tickets if (t <= self._floor if t else overrun) or t in self._revoked}

    def forget(self, tickets: Iterable[int]) -> None:
        """Drop the memory of tickets that have been reported."""
        self._revoked.difference_update(tickets)

    def copy_ended(self, ticket: int) -> None:
        """Say that no byte of this store is read any more."""
        count = int(self._words[ENDED_COUNT])
        self._words[ENDED_RING + count % ENDED_SLOTS] = ticket
        self._words[ENDED_COUNT] = count + 1

    def _raise_floor(self) -> None:
        # Revokes of stores that were reported already are never forgotten by name. Tickets rise, so the
        # older half is over; a store that is not counts as revoked.
        kept = sorted(self._revoked)
        self._floor = max(self._floor, kept[len(kept) // 2])
        self._revoked = {ticket for ticket in kept if ticket > self._floor}
