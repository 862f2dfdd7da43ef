"""The worker core's only door: events in, actions out. The shell is `loop.py`; the decisions are `core.py`.

One worker serves one rank of one engine incarnation. The core pairs plans (from the daemon) with begins
(from the rank) by ticket, waits for marks, queues copies (loads ahead of stores, bytes in flight
bounded), guards each slot by its generation, asks for revokes after a store's last byte, and says one
word per ticket and one `done` per job.
"""

from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.proto.hot import Cancel, Done, Plan
from kvferry.proto.outcome import Kind
from kvferry.proto.tether import Begin, CancelTickets, Words

# Loads ahead of stores, wherever copies take turns: somebody waits for a load.
ORDER: Final = (Kind.LOAD, Kind.STORE)

U32: TypeAlias = npt.NDArray[np.uint32]
U64: TypeAlias = npt.NDArray[np.uint64]


class SharedPage(Protocol):
    """What the core reads and writes in the rank's shared page (`kvferry.proto.page.PageReader`)."""

    def mark(self) -> int: ...
    def revoked(self, tickets: list[int]) -> set[int]: ...
    def forget(self, tickets: list[int]) -> None: ...
    def copy_ended(self, ticket: int) -> None: ...


class SlotHeaders(Protocol):
    """The generation words of the pool file's slot headers (`pool.py`)."""

    def open(self, slots: U32, generations: U64) -> None:
        """Write gen_open: before the first byte of a store."""

    def close(self, slots: U32, generations: U64) -> None:
        """Write gen_close: after the last byte of a store that may be published."""

    def torn(self, slots: U32, generations: U64) -> U32:
        """Positions (not slots) whose gen_open or gen_close is not the plan's generation."""


# ---- events ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Planned:
    """From the daemon."""

    message: Plan


@dataclass(frozen=True, slots=True)
class JobsCancelled:
    """From the daemon."""

    message: Cancel


@dataclass(frozen=True, slots=True)
class Begun:
    """From the rank."""

    message: Begin


@dataclass(frozen=True, slots=True)
class TicketsCancelled:
    """From the rank."""

    message: CancelTickets


@dataclass(frozen=True, slots=True)
class Copied:
    """The device ended one submitted batch."""

    token: int
    ok: bool


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Look at marks and bounds."""


@dataclass(frozen=True, slots=True)
class RankLost:
    """The tether is at its end: drop what has not begun, report OK for nothing more."""


@dataclass(frozen=True, slots=True)
class DaemonLost:
    """The daemon is gone: no plan will come and nothing is published; loads already begun still get their word."""


@dataclass(frozen=True, slots=True)
class DaemonFound:
    """A daemon, a new one or the old over a new link, is about to serve this rank: its plans count from here.

    To be told at rest, before the rank is attached again: a begin may overtake the daemon's answer.
    """

    boot: int


Event: TypeAlias = (
    Planned | JobsCancelled | Begun | TicketsCancelled | Copied | TimePassed | RankLost | DaemonLost | DaemonFound
)


# ---- actions ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SubmitCopy:
    """Copy these blocks: batch `token` of one job. The shell plans descriptors and hands them to the device."""

    token: int
    kind: Kind
    group: int
    slots: U32  # (n,)
    blocks: U32  # (n,)


@dataclass(frozen=True, slots=True)
class TellDaemon:
    """One `done` for all that ended in this wake-up."""

    message: Done


@dataclass(frozen=True, slots=True)
class TellRank:
    """One `words` for all that ended in this wake-up."""

    message: Words


Action: TypeAlias = SubmitCopy | TellDaemon | TellRank


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What the core is told at its start. Times are nanoseconds."""

    payload_bytes: tuple[int, ...]  # of one block, per group
    num_blocks: int
    num_slots: int  # that fit this rank's pool file
    boot: int = 0  # of the daemon that attached us: jobs of another are refused; 0: taken from anyone
    batch_bytes: int = 32 << 20  # of one submitted batch
    batches_in_flight: int = 2  # per direction
    begin_ns: int = 2_000_000_000  # a begin whose plan never comes ends after this
    unbegun_ns: int = 10_000_000_000  # a plan that nobody begins ends after this
    mark_ns: int = 10_000_000_000  # a begin whose mark never comes ends after this
    orphan_ns: int = 2_000_000_000  # a begun load whose daemon is gone waits this long for its mark
    mark_poll_ns: int = 250_000  # how often marks are looked at while any is awaited
