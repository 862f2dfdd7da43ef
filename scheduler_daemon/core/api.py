"""The daemon core's only door: events in, actions out.

The shell (`../loop.py`) turns sockets, death notices and time into events, and carries actions out.
Messages are those of `kvferry.proto`; the link numbers, the frames and the retransmits are the shell's
(`kvferry.proto.link`). `Core.step(event, now_ns)` is deterministic: same events and times, same actions.
"""

from dataclasses import dataclass
from typing import TypeAlias

from kvferry.proto.control import Control
from kvferry.proto.hot import Cancel, Done, JobsEnded, Lookup, LookupAnswer, Plan, Renew, Step, StepAnswer
from kvferry.proto.ids import BootId, LinkId, WorkerId

Incoming: TypeAlias = Control | Lookup | Step | Renew | Done
Outgoing: TypeAlias = Control | LookupAnswer | StepAnswer | JobsEnded | Plan | Cancel


# ---- events ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Received:
    """A decoded message came in on a link. The first one of a link is its hello."""

    link: LinkId
    message: Incoming


@dataclass(frozen=True, slots=True)
class LinkLost:
    """A link is over: its tether ended, it was given up, or its peer said goodbye.

    For a worker this is a notice of death, not its proof: nothing of its jobs is freed by it.
    """

    link: LinkId


@dataclass(frozen=True, slots=True)
class WorkerReaped:
    """The worker's process is gone, seen by waitpid: no copy of its can write any more. The proof."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing happened but time: deadlines and leases are looked at."""


Event: TypeAlias = Received | LinkLost | WorkerReaped | TimePassed


# ---- actions ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Put this message on this link."""

    link: LinkId
    message: Outgoing


@dataclass(frozen=True, slots=True)
class CloseLink:
    """Send what is queued (a Refused usually precedes this), then forget the link."""

    link: LinkId


@dataclass(frozen=True, slots=True)
class KillWorker:
    """This worker owes a word and gave none within its grace: kill and reap it, then say WorkerReaped."""

    worker: WorkerId
    why: str


@dataclass(frozen=True, slots=True)
class Note:
    """One line for the log: something an operator wants to know."""

    text: str


Action: TypeAlias = Send | CloseLink | KillWorker | Note


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """What the core is told at its start. Times are nanoseconds."""

    boot: BootId
    tp_size: int  # pool files, and the world size an engine must have
    lease_ns: int = 10_000_000_000
    lease_share: float = 0.5  # of all slots, that leases may hold (rule 9)
    job_ns: int = 30_000_000_000  # an accepted job's deadline
    grace_ns: int = 5_000_000_000  # from cancel to kill
    retry_ms: int = 5  # what a PENDING lookup is told
    max_in_flight_bytes: int = 1 << 30  # per engine and direction, all ranks together
