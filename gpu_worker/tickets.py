"""The life of one ticket in one worker. Decides nothing but which step may follow which.

                     PLAN                BEGIN
              ┌────────────▶ PLANNED ────────────┐
    (nothing) ┤                                  ├──▶ PAIRED ──MARK──▶ READY ──START──▶ COPYING ──OVER──▶ ENDED
              └────────────▶ BEGUN ──────────────┘                                        │
                     BEGIN               PLAN                                           DROP
                                                                                          ▼
    PLANNED, BEGUN, PAIRED, READY ──DROP──▶ ENDED                                     ABANDONED ──OVER──▶ ENDED

Why ABANDONED: a running copy cannot be called back. Until its last batch is over it may still write, so
nobody is told that the ticket has ended, whatever was cancelled or lost meanwhile.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

import numpy as np

from kvferry.gpu_worker.api import U32, U64
from kvferry.proto.outcome import Kind, Outcome


class State(IntEnum):
    """Where a ticket stands."""

    PLANNED = 0  # the daemon's plan is here, the rank's begin is not
    BEGUN = 1  # the other way round
    PAIRED = 2  # both are here; the mark has not been reached
    READY = 3  # may be copied, waits for its turn
    COPYING = 4  # its first batch was submitted
    ABANDONED = 5  # dropped while batches were running
    ENDED = 6


class Move(IntEnum):
    """What happens to a ticket."""

    PLAN = 0
    BEGIN = 1
    MARK = 2  # the mark word reached the begin's mark
    START = 3  # its turn has come
    DROP = 4  # cancelled, out of time, revoked, or the engine is gone
    OVER = 5  # its last running batch is over and no other will follow


NEXT: Final[dict[tuple[State, Move], State]] = {
    (State.PLANNED, Move.BEGIN): State.PAIRED,
    (State.BEGUN, Move.PLAN): State.PAIRED,
    (State.PAIRED, Move.MARK): State.READY,
    (State.READY, Move.START): State.COPYING,
    (State.COPYING, Move.OVER): State.ENDED,
    (State.COPYING, Move.DROP): State.ABANDONED,
    (State.ABANDONED, Move.OVER): State.ENDED,
    (State.PLANNED, Move.DROP): State.ENDED,
    (State.BEGUN, Move.DROP): State.ENDED,
    (State.PAIRED, Move.DROP): State.ENDED,
    (State.READY, Move.DROP): State.ENDED,
}
RUNNING: Final = frozenset({State.COPYING, State.ABANDONED})

_NONE32: Final[U32] = np.empty(0, dtype=np.uint32)
_NONE64: Final[U64] = np.empty(0, dtype=np.uint64)


@dataclass(slots=True, eq=False)
class Transfer:
    """One ticket, with its plan and its begin as far as they have come."""

    ticket: int
    state: State
    due_ns: int  # when its present state ends by itself; 0: never
    # from the plan
    job: int = 0  # 0: no plan yet
    kind: Kind = Kind.LOAD
    group: int = 0
    slots: U32 = field(default_factory=lambda: _NONE32)  # (n,)
    generations: U64 = field(default_factory=lambda: _NONE64)  # (n,)
    blocks: U32 = field(default_factory=lambda: _NONE32)  # (n,)
    # from the begin
    is_begun: bool = False
    mark: int = 0
    begun_ns: int = 0
    # of the copy
    bad: U32 = field(default_factory=lambda: _NONE32)  # positions of a load known to hold what they should not
    to_copy: U32 = field(default_factory=lambda: _NONE32)  # (m,) positions that are copied, in order
    num_submitted: int = 0  # leading positions of `to_copy` handed to the device
    num_running: int = 0  # batches at the device
    submitted_ns: int = 0  # when the first batch was handed over; 0: not yet
    outcome: Outcome = Outcome.OK  # the worst so far
    arrived: list[U32] = field(default_factory=list)  # positions of a load's batches that ended well
    is_orphan: bool = False  # its daemon is gone: nobody is told of its job

    @property
    def is_submitted(self) -> bool:
        """Whether no further batch will follow."""
        return self.num_submitted == len(self.to_copy) or self.state is State.ABANDONED

    def advance(self, move: Move) -> State:
        """Take one step of NEXT. KeyError, and nothing changed, on a step that the table lacks."""
        self.state = NEXT[self.state, move]
        return self.state


@dataclass(frozen=True, slots=True)
class Ending:
    """What is remembered of a ticket that is over."""

    job: int  # 0: it never had a plan (a tombstone: a later plan is refused)
    kind: Kind
    outcome: Outcome
    is_told: bool  # whether the rank has had its word


class Tickets:
    """All live tickets by number, by job and by state, and a bounded memory of those that are over."""

    REMEMBERED: Final = 1 << 16  # endings; about 20 MiB at worst, minutes of work at the highest rate seen

    def __init__(self) -> None:
        self._live: dict[int, Transfer] = {}
        self._ticket_of_job: dict[int, int] = {}
        # Ordered dicts: taken from the front at every wake-up, which a dict does in linear time.
        self._in_state: dict[State, OrderedDict[int, Transfer]] = {state: OrderedDict() for state in State}
        self._endings: OrderedDict[int, Ending] = OrderedDict()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Transfer]:
        return iter(self._live.values())

    def get(self, ticket: int) -> Transfer | None:
        """The live transfer of a ticket."""
        return self._live.get(ticket)

    def of_job(self, job: int) -> Transfer | None:
        """The live transfer of a job."""
        ticket = self._ticket_of_job.get(job)
        return None if ticket is None else self._live[ticket]

    def in_state(self, state: State) -> list[Transfer]:
        """The transfers in `state`, in the order in which they came to it."""
        return list(self._in_state[state].values())

    def count(self, state: State) -> int:
        """How many are in `state`."""
        return len(self._in_state[state])

    def first_due_ns(self, state: State) -> int | None:
        """The earliest bound of those in `state`: all have the same length, so it is the first one's."""
        for transfer in self._in_state[state].values():
            return transfer.due_ns or None
        return None

    def add(self, transfer: Transfer) -> None:
        """Take up a new ticket."""
        self._live[transfer.ticket] = transfer
        self._in_state[transfer.state][transfer.ticket] = transfer
        if transfer.job:
            self._ticket_of_job[transfer.job] = transfer.ticket

    def planned(self, transfer: Transfer) -> None:
        """Note the job that a begun ticket has just been given."""
        self._ticket_of_job[transfer.job] = transfer.ticket

    def move(self, transfer: Transfer, move: Move, due_ns: int = 0) -> None:
        """Take one step of NEXT; the new state ends by itself at `due_ns` (0: never)."""
        del self._in_state[transfer.state][transfer.ticket]
        transfer.advance(move)
        transfer.due_ns = due_ns
        if transfer.state is State.ENDED:
            del self._live[transfer.ticket]
            self._ticket_of_job.pop(transfer.job, None)
        else:
            self._in_state[transfer.state][transfer.ticket] = transfer

    def remember(self, ticket: int, ending: Ending) -> None:
        """Keep how a ticket ended, and forget the oldest ending beyond the bound."""
        self._endings.pop(ticket, None)
        self._endings[ticket] = ending
        if len(self._endings) > self.REMEMBERED:
            self._endings.popitem(last=False)

    def ending(self, ticket: int) -> Ending | None:
        """How a ticket ended, if that is still remembered."""
        return self._endings.get(ticket)
