"""The one desk on which the core's rooms lie, and the tray of actions that one event fills.

Holds no decisions: modules named after what comes in (`people`, `lookups`, `steps`, `ending`) make them.
Cancels and ended jobs gather in trays of their own and leave at the end of the event: one message a
worker, one a client, behind the answer to what caused them.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.proto.columns import pack_u8, pack_u64
from kvferry.proto.control import Hello
from kvferry.proto.errors import KvferryError
from kvferry.proto.hot import Cancel, JobsEnded
from kvferry.proto.ids import LinkId
from kvferry.proto.limits import MAX_JOBS
from kvferry.scheduler_daemon.core.api import Action, CoreSettings, Outgoing, Send, TableShape
from kvferry.scheduler_daemon.core.counters import Counters
from kvferry.scheduler_daemon.core.engines import Engine, Session, Worker
from kvferry.scheduler_daemon.core.geometry import Geometry
from kvferry.scheduler_daemon.core.index import KeyIndex
from kvferry.scheduler_daemon.core.jobs import Jobs, TransferJobStatus
from kvferry.scheduler_daemon.core.leases import Lease, Leases
from kvferry.scheduler_daemon.core.namespaces import Namespaces
from kvferry.scheduler_daemon.core.pool import HostPool
from kvferry.scheduler_daemon.core.slots import Table


@dataclass(slots=True)
class Drain:
    """A drain under way (`drain.py`)."""

    end_ns: int  # of the budget of running stores
    cut: bool = False  # the budget is over: they were cancelled
    dropped: int = 0  # stores so cancelled
    announced: bool = False  # in the log, that all is at rest
    shell_waits: bool = False  # for AtRest
    links: list[tuple[LinkId, int]] = field(default_factory=list)  # that wait for an answer, and since when


class Desk:
    """All state of the daemon."""

    __slots__ = (
        "awaited",
        "awaited_due_ns",
        "cancels",
        "counters",
        "deadlines",
        "drain",
        "drained",
        "dying",
        "ended",
        "engines",
        "generation",
        "geometry",
        "graces",
        "hellos",
        "jobs",
        "leases",
        "list_awaited",
        "make_table",
        "namespaces",
        "noted",
        "now_ns",
        "num_registrations",
        "out",
        "partings",
        "pool",
        "reaped",
        "recovered_only",
        "sessions",
        "settings",
        "worker_links",
        "workers",
    )

    def __init__(self, settings: CoreSettings, make_table: Callable[[TableShape], Table]) -> None:
        self.settings = settings
        self.make_table = make_table
        self.now_ns = 0
        self.counters = Counters()
        self.geometry = Geometry(settings.tp_size)
        self.pool: HostPool | None = None  # until the geometry is fixed
        self.generation = 0  # the highest that an earlier geometry's table gave
        self.jobs = Jobs(settings.boot)
        self.leases = Leases(settings.lease_ns)
        self.namespaces = Namespaces()
        self.engines: dict[str, Engine] = {}
        self.num_registrations = 0
        self.hellos: dict[LinkId, Hello] = {}  # of open links
        self.sessions: dict[LinkId, Session] = {}  # of open links
        self.worker_links: dict[LinkId, Worker] = {}  # of open links
        self.workers: dict[int, Worker] = {}  # attached once and not yet reaped
        self.reaped: set[int] = set()  # a worker's attach may come after its death
        # What ended meanwhile is skipped when its turn comes.
        self.deadlines: list[tuple[int, int]] = []  # a heap of (due, job): its deadline
        self.graces: deque[tuple[int, int]] = deque()  # (due, job): then those that owe a word are killed
        self.partings: deque[tuple[int, Worker]] = deque()  # (due, worker): it should be gone by then
        # Rule 10: what an earlier boot's workers may still be writing is given to nobody.
        self.list_awaited = False  # the supervisor has yet to say which workers outlived the last daemon
        self.awaited: set[int] = set()  # those that have neither drained nor been reaped
        self.awaited_due_ns: int | None = None  # then they are killed
        self.drained: set[int] = set()  # said so to this boot
        self.recovered_only = False  # nothing in the pool is of this boot
        self.dying: deque[KeyIndex] = deque()  # of ended epochs: emptied some keys a step
        self.drain: Drain | None = None  # while one is asked for nothing is admitted
        self.noted: dict[tuple[str, int], tuple[KvferryError, int]] = {}  # (engine, rank or -1) -> last refusal, when
        self.out: list[Action] = []
        self.cancels: dict[int, list[int]] = {}  # worker -> jobs
        self.ended: dict[LinkId, list[TransferJobStatus]] = {}

    @property
    def is_restarting(self) -> bool:
        """Whether a worker of an earlier boot may still write somewhere."""
        return self.list_awaited or bool(self.awaited)

    # ---- out -----------------------------------------------------------------------------------------

    def send(self, link: LinkId, message: Outgoing) -> None:
        """Put a message on a link."""
        self.out.append(Send(link, message))

    def take_actions(self) -> list[Action]:
        """Everything that this event brought about, in order."""
        for worker_id, jobs in self.cancels.items():
            worker = self.workers.get(worker_id)
            if worker is not None and worker.link is not None:
                for start in range(0, len(jobs), MAX_JOBS):
                    self.send(worker.link, Cancel(jobs=pack_u64(jobs[start : start + MAX_JOBS])))
        self.cancels.clear()
        for link, ended in self.ended.items():
            if link in self.sessions:
                for start in range(0, len(ended), MAX_JOBS):
                    self.send(link, _jobs_ended(ended[start : start + MAX_JOBS]))
        self.ended.clear()
        actions, self.out = self.out, []
        return actions

    # ---- leases --------------------------------------------------------------------------------------

    def end_lease(self, lease: Lease) -> None:
        """The one way out of a lease."""
        assert self.pool is not None
        self.leases.remove(lease)
        self.pool.unlease(lease.entries)
        lease.owner.requests.unlease(lease.request, lease.group, lease.id)

    def lease_of(self, lease: int, session: Session) -> Lease | None:
        """A lease that stands and is this session's; another's, or one that is over, is counted."""
        found = self.leases.get(lease)
        if found is None:
            self.counters.add("leases_unknown")
        elif found.owner is not session:
            self.counters.add("leases_foreign")
            found = None
        return found


def _jobs_ended(ended: list[TransferJobStatus]) -> JobsEnded:
    return JobsEnded(
        tickets=pack_u64([job.ticket for job in ended]),
        jobs=pack_u64([job.id for job in ended]),
        outcomes=pack_u8([job.outcome or 0 for job in ended]),
    )
