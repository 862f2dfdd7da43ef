"""The supervisor core's only door: events in, actions out.

A child is named by a random id; a worker's is its worker id.
"""

from dataclasses import dataclass, field
from typing import Any, TypeAlias

# ---- events ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """The pool stands and the sockets listen: start the children."""


@dataclass(frozen=True, slots=True)
class Spawned:
    """A child that was asked for runs."""

    child: int
    pid: int


@dataclass(frozen=True, slots=True)
class Ready:
    """A child serves: the daemon its sockets, a worker as a spare, which says what its device is."""

    child: int
    device: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Taken:
    """An engine's rank has connected to this worker. `marks` is how it writes its marks: `word` or `host`.

    lent_bytes: of the rank's memory, what its handles show the worker.
    """

    child: int
    engine: str
    marks: str = ""
    lent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """A child cannot start and says why; its end follows."""

    child: int
    why: str


@dataclass(frozen=True, slots=True)
class Exited:
    """A child is reaped. `status` is its exit code, or minus the signal that ended it."""

    child: int
    status: int


@dataclass(frozen=True, slots=True)
class KillWanted:
    """The daemon wants a worker dead: it owes a word and gave none."""

    worker: int
    why: str


@dataclass(frozen=True, slots=True)
class Answered:
    """A child has read that it was asked for a sign of life."""

    child: int


@dataclass(frozen=True, slots=True)
class Vitals:
    """What the kernel says of the thread that owes an answer: a child's first, which reads its control channel."""

    state: str  # one letter, as in /proc/<pid>/stat
    cpu_ticks: int  # that it has used
    page_ins: int  # faults that had to wait for a disk


@dataclass(frozen=True, slots=True)
class Seen:
    """The look at a child that `Look` asked for; None if there was nothing to be seen."""

    child: int
    vitals: Vitals | None


@dataclass(frozen=True, slots=True)
class AtRest:
    """The daemon admits nothing any more and nothing is in flight."""

    child: int


@dataclass(frozen=True, slots=True)
class Stop:
    """A person or the system wants an end: in good order, or at once if it is wanted again."""

    why: str
    keep: bool = True  # the pool, for the next `kvferry up`


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Look at the bounds."""


Event: TypeAlias = (
    Begin | Spawned | Ready | Taken | Failed | Exited | KillWanted | Answered | Seen | AtRest | Stop | TimePassed
)

# ---- actions ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SpawnDaemon:
    """Start the daemon; its events carry `child`."""

    child: int


@dataclass(frozen=True, slots=True)
class SpawnWorker:
    """Start a worker of `rank`; its worker id is `child`.

    is_retry: those before it failed and the reason is logged; this one says only us, should it be the same.
    """

    child: int
    rank: int
    is_retry: bool = False


@dataclass(frozen=True, slots=True)
class Tell:
    """Put a map on a child's control channel."""

    child: int
    message: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Look:
    """Read what the kernel says of a child and give it back as `Seen`, at once."""

    child: int


@dataclass(frozen=True, slots=True)
class Terminate:
    """SIGTERM."""

    child: int


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL."""

    child: int


@dataclass(frozen=True, slots=True)
class TellReady:
    """Everything serves; `again` after the daemon was lost."""

    again: bool


@dataclass(frozen=True, slots=True)
class Note:
    """One line for the log."""

    text: str


@dataclass(frozen=True, slots=True)
class Finish:
    """All that could be reaped is reaped: clean up and exit with this code."""

    code: int
    text: str
    keep: bool = True  # the pool, if anything is in it


Action: TypeAlias = SpawnDaemon | SpawnWorker | Tell | Look | Terminate | Kill | TellReady | Note | Finish
