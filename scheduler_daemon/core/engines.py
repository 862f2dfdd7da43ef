"""Who is there: engines, the seats of their ranks, the workers in them, and the client's sessions.

    Engine "e"      seats: rank -> Worker (live: told of new jobs; not live: its words are still awaited)
        └ session   the client's registration with this boot: an incarnation. Closed ones admit nothing.

A worker's place outlives its seat: a rank that re-attaches sits down as a new worker, while jobs of the
old one wait for the old one's word or reap.
"""

import hashlib
from collections import OrderedDict

from kvferry.proto.control import Attach, Register
from kvferry.proto.errors import RefusedError
from kvferry.proto.hot import StepAnswer
from kvferry.proto.ids import BootId, Incarnation, LinkId
from kvferry.proto.outcome import Kind, Reason
from kvferry.scheduler_daemon.core.fence import FenceIndex
from kvferry.scheduler_daemon.core.jobs import TransferJobStatus
from kvferry.scheduler_daemon.core.namespaces import Namespace, identity
from kvferry.scheduler_daemon.core.pace import Pace
from kvferry.scheduler_daemon.core.requests import Requests


class Worker:
    """One worker process that serves, or served, one rank of one engine."""

    __slots__ = ("attach", "engine", "id", "killed", "leaving", "link", "live", "pace", "rank", "served")

    def __init__(self, attach: Attach, link: LinkId, engine: "Engine") -> None:
        self.id = attach.worker
        self.rank = attach.rank
        self.attach = attach
        self.link: LinkId | None = link
        self.engine = engine
        self.live = True  # attached: expected by new jobs
        self.leaving = False  # it said so: its rank is gone, it drains and exits
        self.killed = False  # its kill has been asked for
        self.served = False  # under a client that is gone
        self.pace = Pace()

    @property
    def payload_bytes(self) -> int:
        """Of one block at this rank."""
        return self.attach.payload_bytes[0]


class Session:
    """One registration of an engine's client: everything that must not outlive it."""

    __slots__ = (
        "answers",
        "closed",
        "engine",
        "fence",
        "in_flight_bytes",
        "incarnation",
        "last_step",
        "link",
        "minor",
        "register",
        "requests",
        "salt",
        "tickets",
        "told",
        "top_ticket",
    )

    def __init__(
        self, incarnation: Incarnation, link: LinkId, engine: "Engine", register: Register, minor: int
    ) -> None:
        self.incarnation = incarnation
        self.link = link
        self.engine = engine
        self.register = register
        self.minor = minor  # of the protocol that the client speaks
        self.salt = register.salt
        self.closed = False
        self.requests = Requests()
        self.fence = FenceIndex(register.num_blocks)
        self.tickets: dict[int, TransferJobStatus] = {}  # unended jobs by the client's name
        self.top_ticket = 0  # all up to this one are decided
        self.last_step: int | None = None
        self.answers: OrderedDict[int, StepAnswer] = OrderedDict()  # the latest, for repeats
        self.in_flight_bytes = {Kind.STORE: 0, Kind.LOAD: 0}
        self.told: tuple[int, str, int, int] = (0, "", 0, 0)  # attached, namespace, epoch, slots

    def spoken(self, reason: Reason) -> Reason:
        """`reason`, or what stands for it to a client that does not know it."""
        newer = self.minor < 1 and reason in (Reason.RESTARTING, Reason.DRAINING)
        return Reason.RANKS_AWAY if newer else reason


class Engine:
    """One engine id: its client, if there is one, and its ranks."""

    __slots__ = ("client_pid", "id", "namespace", "seats", "session", "world_size")

    def __init__(self, engine_id: str, world_size: int) -> None:
        self.id = engine_id
        self.world_size = world_size
        self.session: Session | None = None
        self.seats: dict[int, Worker] = {}
        self.namespace: Namespace | None = None  # known once all ranks and the client are there
        self.client_pid = 0  # of the last client

    @property
    def live(self) -> list[Worker]:
        """The attached workers, by rank."""
        return [worker for _, worker in sorted(self.seats.items()) if worker.live]

    @property
    def num_attached(self) -> int:
        """Ranks attached now."""
        return sum(worker.live for worker in self.seats.values())

    @property
    def is_whole(self) -> bool:
        """Whether every rank is attached and the client registered: only then anything hits."""
        return self.session is not None and self.num_attached == self.world_size

    @property
    def block_bytes(self) -> int:
        """Payload of one block, all attached ranks together."""
        return sum(worker.payload_bytes for worker in self.live)

    @property
    def num_blocks(self) -> int:
        """Block ids below this exist on every rank and for the client."""
        counts = [worker.attach.num_blocks for worker in self.live]
        if self.session is not None:
            counts.append(self.session.register.num_blocks)
        return min(counts, default=0)

    def identity(self) -> str:
        """The name of the namespace this engine is in; the engine must be whole."""
        session = self.session
        assert session is not None and self.is_whole
        return identity(
            world_size=self.world_size,
            key_bytes=session.register.key_bytes,
            rank_facts=self.live[0].attach.facts,
            rank_layouts=[worker.attach.layout_digest for worker in self.live],
            client_facts=session.register.facts,
            salt=session.salt,
        )

    def check_rank(self, attach: Attach) -> None:
        """RefusedError if this rank may not sit down beside those that are attached."""
        taken = self.seats.get(attach.rank)
        if taken is not None and taken.live:
            raise RefusedError(
                "register.rank_taken",
                f"rank {attach.rank} of engine {self.id!r} is served by worker {taken.id:x} already",
                "give each engine an engine id of its own, or wait until the old rank is gone",
            )
        for other in self.live:
            if other.attach.facts != attach.facts:
                raise RefusedError(
                    "register.facts",
                    f"engine {self.id!r}: {differing(other.attach.facts, attach.facts, other.rank, attach.rank)}",
                    "start all ranks of one engine with the same model, dtype and settings",
                )
        if self.session is not None:
            check_blocks(self.session.register, attach)

    def check_client(self, register: Register) -> None:
        """RefusedError if this client may not register beside the ranks that are attached."""
        if self.session is not None:
            raise RefusedError(
                "register.engine_taken",
                f"engine {self.id!r} is registered by a live client (pid {self.client_pid})",
                "give each engine an engine id of its own",
            )
        for worker in self.live:
            check_blocks(register, worker.attach)


def half(rank: int) -> str:
    """How the half of an engine is called that registers as `rank`, or as its client: -1."""
    return f"rank {rank}" if rank >= 0 else "scheduler"


def differing(one: dict[str, str], two: dict[str, str], rank_one: int, rank_two: int) -> str:
    """The first fact that two ranks disagree on, with both values."""
    for name in sorted({*one, *two}):
        if one.get(name) != two.get(name):
            return f"rank {rank_one} says {name}={one.get(name)!r}, rank {rank_two} says {name}={two.get(name)!r}"
    return "equal facts"


def check_blocks(register: Register, attach: Attach) -> None:
    """RefusedError if a client and a rank of one engine mean different blocks."""
    if attach.block_tokens and attach.block_tokens[0] != register.block_tokens:
        raise RefusedError(
            "register.facts",
            f"rank {attach.rank} has blocks of {attach.block_tokens[0]} tokens;"
            f" the engine's scheduler has blocks of {register.block_tokens}",
            "the scheduler and all ranks must use one block size",
        )
    if attach.num_blocks < register.num_blocks:
        raise RefusedError(
            "layout.geometry",
            f"rank {attach.rank} has {attach.num_blocks} blocks;"
            f" the engine's scheduler gives out {register.num_blocks}",
            "export all of the rank's KV cache, or register the smaller number of blocks",
        )


def incarnation_number(boot: BootId, counter: int) -> Incarnation:
    """The number of the `counter`-th registration with a boot: unlike any other boot's, and not guessed from it."""
    raw = hashlib.sha256(f"kvferry incarnation {boot} {counter}".encode()).digest()
    return Incarnation(int.from_bytes(raw[:8], "little") or 1)
