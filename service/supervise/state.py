"""What the supervisor keeps of itself and of each child, and its bounds. `core.py` moves it."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from kvferry.supervise.pulse import Pulse


class Phase(Enum):
    """Where the sidecar is."""

    IDLE = "idle"
    STARTING = "starting"
    SERVING = "serving"
    RESTARTING = "restarting"  # the daemon is lost, another one is on its way; the workers stay
    DRAINING = "draining"
    STOPPING = "stopping"
    OVER = "over"


# Looks in a row, one a second, that saw no work of whoever owes an answer: then it is hung.
LOOKS: Final = 5
ALIVE: Final = (Phase.STARTING, Phase.SERVING, Phase.RESTARTING)


class Life(Enum):
    """Where one child is. The daemon is starting, then ready; a worker may be taken after that."""

    STARTING = "starting"
    SPARE = "spare"  # ready; for the daemon too
    TAKEN = "taken"


@dataclass(slots=True)
class Child:
    """One living process."""

    id: int
    rank: int  # -1: the daemon
    pid: int = 0
    life: Life = Life.STARTING
    engine: str = ""
    marks: str = ""  # of the engine's rank
    lent_bytes: int = 0  # of its memory: what the worker is shown
    device: dict[str, Any] = field(default_factory=dict)  # what the worker says of it
    kill_why: str = ""
    failed_why: str = ""  # why it cannot start, in its own words
    answered: bool = False  # it has given a sign of life
    pulse: Pulse = field(default_factory=Pulse)


@dataclass(frozen=True, slots=True)
class Rules:
    """The bounds. Times are nanoseconds."""

    tp_size: int
    restarts: int = 5
    window_ns: int = 30_000_000_000
    drain_ns: int = 3_000_000_000  # from the wish to stop to the stop itself, at most
    store_budget_ms: int = 2_000  # of that, what running stores are given
    term_ns: int = 2_000_000_000  # from stop to SIGTERM; workers drain for at most one second
    kill_ns: int = 4_000_000_000  # from stop to SIGKILL
    leave_ns: int = 9_000_000_000  # from stop to leaving an unkillable child behind
    retry_ns: int = 1_000_000_000  # wait for the next spare or daemon after one that did not start; doubled each time
    retry_most_ns: int = 30_000_000_000
    beat_ns: int = 1_000_000_000
    late_ns: int = 1_000_000_000  # a beat that comes this much late says more of us than of others
    looks: int = LOOKS
    looks_starting: int = 30  # it reads its channel only when all is imported, perhaps from a slow disk
    looks_serving: int = LOOKS + 2  # of a worker that is stopped: as long as its daemon would give it, and those five
    spin_s: int = 30  # CPU without an answer; a daemon's longest turn takes a few


@dataclass(slots=True)
class Ending:
    """How far an end of children has got."""

    since: int
    terminated: bool = False
    killed: bool = False


def name_of(one: Child) -> str:
    """For people."""
    return "daemon" if one.rank < 0 else f"rank {one.rank} worker {one.id:016x}"


def how_ended(status: int, why: str = "") -> str:
    """An exit status in words, and why it was killed if we did it."""
    told = f" ({why})" if why else ""
    return f"ended by signal {-status}{told}" if status < 0 else f"exited with code {status}{told}"
