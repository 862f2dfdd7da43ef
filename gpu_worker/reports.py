"""What one wake-up has to say: rows gathered into one `done` for the daemon and one `words` for the rank."""

from collections.abc import Sequence

import numpy as np

from kvferry.gpu_worker.api import Action, TellDaemon, TellRank
from kvferry.proto.columns import pack_u8, pack_u32, pack_u64
from kvferry.proto.hot import Done
from kvferry.proto.ids import U32_MAX
from kvferry.proto.outcome import Kind, Outcome
from kvferry.proto.tether import Words


def microseconds(from_ns: int, to_ns: int) -> int:
    """A span as a u32 of microseconds; 0 if it has not begun."""
    return min(max((to_ns - from_ns) // 1000, 0), U32_MAX) if from_ns else 0


class Reports:
    """The rows of one wake-up."""

    def __init__(self) -> None:
        self._done: list[tuple[int, Outcome, int]] = []
        self._words: list[tuple[int, Kind, Outcome, int, int, Sequence[int]]] = []

    def done(self, job: int, outcome: Outcome, copy_us: int = 0) -> None:
        """One row for the daemon."""
        self._done.append((job, outcome, copy_us))

    def word(
        self,
        ticket: int,
        kind: Kind,
        outcome: Outcome,
        wait_us: int = 0,
        copy_us: int = 0,
        failed_blocks: Sequence[int] = (),
    ) -> None:
        """One row for the rank. A failed load that names no block means all of its blocks."""
        self._words.append((ticket, kind, outcome, wait_us, copy_us, failed_blocks))

    def actions(self) -> list[Action]:
        """At most one message each way."""
        actions: list[Action] = []
        if self._words:
            tickets, kinds, outcomes, wait_us, copy_us, failed = zip(*self._words, strict=True)
            blocks = [block for row in failed for block in row]
            actions.append(
                TellRank(
                    Words(
                        tickets=pack_u64(tickets),
                        kinds=pack_u8(kinds),
                        outcomes=pack_u8(outcomes),
                        wait_us=pack_u32(wait_us),
                        copy_us=pack_u32(copy_us),
                        failed_counts=pack_u32([len(row) for row in failed]),
                        failed_blocks=pack_u32(np.asarray(blocks, dtype=np.uint32)),
                    )
                )
            )
        if self._done:
            jobs, ends, spans = zip(*self._done, strict=True)
            actions.append(TellDaemon(Done(jobs=pack_u64(jobs), outcomes=pack_u8(ends), copy_us=pack_u32(spans))))
        return actions
