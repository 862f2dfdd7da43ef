"""One accepted transfer: who must report, who has, and the table of what each turn brings about.

                 PROGRESS                                 store, any rank FAILED, or VOIDED:
                  ┌───┐                                   TELL, DROP, CANCEL
     accepted ──▶ COPYING ─────────────────────────────▶ VOID ──┐ PROGRESS, FAILED, VOIDED: nothing
                  │                                       │   ◀──┘
                  │ LAST_OK / LAST_FAILED                 │ LAST_OK / LAST_FAILED
                  ▼                                       ▼
                 OVER ◀───────────────────────────────────┘ RELEASE

A store's answer may come before its copies are over (VOID): its keys are dropped and it is never
published, but its slots and fences stay until the last rank's word or reap. A load's answer is the
ranks' words alone and comes with the last of them: its blocks are the engine's only then. The outcome
is set once, when the job's answer is given.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.proto.ids import BootId, JobId, Ticket, make_job_id
from kvferry.proto.outcome import Kind, Outcome
from kvferry.scheduler_daemon.core.index import Entry

if TYPE_CHECKING:
    from kvferry.scheduler_daemon.core.engines import Session, Worker
    from kvferry.scheduler_daemon.core.namespaces import Namespace

U32: TypeAlias = npt.NDArray[np.uint32]


class State(Enum):
    """How far a job is."""

    COPYING = auto()  # accepted; may still end OK
    VOID = auto()  # can end OK no more (a load: unless every rank says OK), words are still owed
    OVER = auto()  # every expected rank has reported or was reaped


class Turn(Enum):
    """What happened to a job."""

    PROGRESS = auto()  # a rank said OK, others owe a word
    FAILED = auto()  # a rank failed, others owe a word
    VOIDED = auto()  # revoked, cancelled, past its deadline, its engine gone
    LAST_OK = auto()  # the last word came; every rank said OK
    LAST_FAILED = auto()  # the last word came; some rank failed


class Effect(Enum):
    """What the daemon must do about it."""

    DROP = auto()  # the keys of a store are misses from now on, its slots in quarantine
    PUBLISH = auto()  # the keys of a store become loadable
    TELL = auto()  # set the outcome and tell the client: the one terminal answer
    CANCEL = auto()  # tell the workers that still owe a word to hurry
    RELEASE = auto()  # fences, pins, quarantined slots and bytes in flight are given back


_S, _L = Kind.STORE, Kind.LOAD
_VOID_STORE = (State.VOID, (Effect.DROP, Effect.TELL, Effect.CANCEL))
_STAY = (State.VOID, ())
# (kind, state, turn) -> (next state, effects in the order in which they are done). OVER takes no turn.
NEXT: Final[dict[tuple[Kind, State, Turn], tuple[State, tuple[Effect, ...]]]] = {
    (_S, State.COPYING, Turn.PROGRESS): (State.COPYING, ()),
    (_S, State.COPYING, Turn.FAILED): _VOID_STORE,
    (_S, State.COPYING, Turn.VOIDED): _VOID_STORE,
    (_S, State.COPYING, Turn.LAST_OK): (State.OVER, (Effect.PUBLISH, Effect.TELL, Effect.RELEASE)),
    (_S, State.COPYING, Turn.LAST_FAILED): (State.OVER, (Effect.DROP, Effect.TELL, Effect.RELEASE)),
    (_S, State.VOID, Turn.PROGRESS): _STAY,
    (_S, State.VOID, Turn.FAILED): _STAY,
    (_S, State.VOID, Turn.VOIDED): _STAY,
    (_S, State.VOID, Turn.LAST_OK): (State.OVER, (Effect.RELEASE,)),
    (_S, State.VOID, Turn.LAST_FAILED): (State.OVER, (Effect.RELEASE,)),
    (_L, State.COPYING, Turn.PROGRESS): (State.COPYING, ()),
    (_L, State.COPYING, Turn.FAILED): (State.VOID, (Effect.CANCEL,)),
    (_L, State.COPYING, Turn.VOIDED): (State.VOID, (Effect.CANCEL,)),
    (_L, State.COPYING, Turn.LAST_OK): (State.OVER, (Effect.TELL, Effect.RELEASE)),
    (_L, State.COPYING, Turn.LAST_FAILED): (State.OVER, (Effect.TELL, Effect.RELEASE)),
    (_L, State.VOID, Turn.PROGRESS): _STAY,
    (_L, State.VOID, Turn.FAILED): _STAY,
    (_L, State.VOID, Turn.VOIDED): _STAY,
    (_L, State.VOID, Turn.LAST_OK): (State.OVER, (Effect.TELL, Effect.RELEASE)),
    (_L, State.VOID, Turn.LAST_FAILED): (State.OVER, (Effect.TELL, Effect.RELEASE)),
}


@dataclass(slots=True, eq=False)
class TransferJobStatus:
    """One job. Ranks are bits: bit r of a bitmap is rank r, in the person of `workers[r]`."""

    id: JobId
    ticket: Ticket
    session: "Session"
    request: int
    kind: Kind
    group: int
    entries: list[Entry]  # of a store: those it writes; of a load: those it has pinned
    slots: U32  # (n,)
    blocks: U32  # (n,)
    workers: "tuple[Worker, ...]"  # expected, by rank: those attached at acceptance
    num_bytes: int  # all ranks together
    accepted_ns: int
    space: "Namespace"  # whose keys it moves
    reported: int = 0
    failed: int = 0
    torn: bool = False  # some rank found a slot that is not what the plan says
    state: State = State.COPYING
    cause: Outcome = Outcome.OK  # the first thing that went wrong
    outcome: Outcome | None = None  # the terminal answer, set once

    @property
    def expected(self) -> int:
        """Bitmap of the ranks that must report: all of the engine."""
        return (1 << len(self.workers)) - 1

    @property
    def pending_count(self) -> int:
        """Ranks that still owe a word."""
        return (self.expected & ~self.reported).bit_count()

    @property
    def owing(self) -> "list[Worker]":
        """The workers that still owe a word, by rank."""
        return [worker for rank, worker in enumerate(self.workers) if not self.reported >> rank & 1]

    def report(self, rank: int, outcome: Outcome) -> Turn | None:
        """Book the word of `rank`; None if it has reported before."""
        bit = 1 << rank
        if self.reported & bit:
            return None
        self.reported |= bit
        if outcome is not Outcome.OK:
            self.failed |= bit
            self.torn = self.torn or outcome is Outcome.TORN
            self.blame(outcome)
        if self.reported == self.expected:
            return Turn.LAST_FAILED if self.failed else Turn.LAST_OK
        return Turn.PROGRESS if outcome is Outcome.OK else Turn.FAILED

    def blame(self, cause: Outcome) -> None:
        """Remember why the job cannot end OK; the first cause stays."""
        if self.cause is Outcome.OK:
            self.cause = cause

    def turn(self, turn: Turn) -> tuple[Effect, ...]:
        """Move on as the table says; what must be done about it, in order."""
        self.state, effects = NEXT[self.kind, self.state, turn]
        if Effect.TELL in effects:
            # A load that was voided and still came whole on every rank is OK: the engine's ranks heard so.
            self.outcome = Outcome.OK if turn is Turn.LAST_OK else self.cause
        return effects


class Jobs:
    """All jobs that are not over, of all engines; stores and loads share one id space."""

    __slots__ = ("_boot", "_by_id", "_given")

    def __init__(self, boot: BootId) -> None:
        self._boot = boot
        self._by_id: dict[int, TransferJobStatus] = {}
        self._given = 0

    def next_id(self) -> JobId:
        """A fresh id, never given before."""
        self._given += 1
        return make_job_id(self._boot, self._given)

    def add(self, job: TransferJobStatus) -> None:
        """Take a job in."""
        self._by_id[job.id] = job

    def get(self, job: int) -> TransferJobStatus | None:
        """The job of this id, unless it is over or never was."""
        return self._by_id.get(job)

    def remove(self, job: TransferJobStatus) -> None:
        """Forget a job that is over."""
        del self._by_id[job.id]

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[TransferJobStatus]:
        return iter(self._by_id.values())
