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
from kvferry.scheduler_daemon.core.slots import Table

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
class WorkersListed:
    """The supervisor's list of all workers that live and may have served an earlier daemon; said once, first of all.

    No slot is given away until each of them has said `drained` or was reaped. A daemon that was started
    together with its supervisor is given an empty list. One that recovered a table awaits this event.
    """

    workers: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class DrainBegun:
    """Stop admitting and come to rest: AtRest says when. What `drain.ask` does, for the shell's own use."""

    budget_ns: int  # for running stores; running loads run to their end


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing happened but time: deadlines and leases are looked at."""


Event: TypeAlias = Received | LinkLost | WorkerReaped | WorkersListed | DrainBegun | TimePassed


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
    warn: bool = False  # something was lost that the operator may have wanted to keep


@dataclass(frozen=True, slots=True)
class KeepEpochs:
    """Write these epochs into the table's header before the actions that follow this one are carried out."""

    epochs: tuple[tuple[bytes, int], ...]  # (namespace digest, 16 bytes; epoch), all that must be kept, newest last


@dataclass(frozen=True, slots=True)
class AtRest:
    """What DrainBegun asked for is reached: nothing is in flight, nothing is admitted."""


Action: TypeAlias = Send | CloseLink | KillWorker | Note | KeepEpochs | AtRest


# ---- what the core is built with -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TableShape:
    """How the pool is cut: what a slot table is made for. Tuples are by rank."""

    num_slots: int
    slot_bytes: tuple[int, ...]
    pool_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Recovered:
    """The slot table of an earlier daemon on the same machine boot, and what its header says.

    `table` is the live, writable mapping, shape (num_slots,): the core goes on with it. Reading it makes
    millions of objects: the shell turns the garbage collector off first.
    """

    shape: TableShape
    table: Table
    epochs: tuple[tuple[bytes, int], ...] = ()
    boots: int = 2  # daemons that have held the table, this one included: on record before the core is built


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """What the core is told at its start. Times are nanoseconds."""

    boot: BootId
    tp_size: int  # pool files, and the world size an engine must have
    lease_ns: int = 10_000_000_000
    lease_share: float = 0.5  # of all slots, that leases may hold (rule 9)
    job_ns: int = 30_000_000_000  # an accepted job's deadline, beside the time that its bytes take
    floor_bytes_per_s: int = 50_000_000  # no worker is reckoned to copy slower
    load_ns: int = 5_000_000_000  # the same for a load, if shorter: a request stands still for it
    grace_ns: int = 2_000_000_000  # from cancel to kill
    awaited_ns: int = 10_000_000_000  # for workers of an earlier daemon to drain, then they are killed
    retry_ms: int = 5  # what a PENDING lookup is told
    max_in_flight_bytes: int = 1 << 30  # per engine and direction, all ranks together
