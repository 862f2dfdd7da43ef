"""A daemon core with dummy engines: messages by the handful, answers decoded, all sums checked after each event."""

from collections.abc import Sequence
from typing import Any

from kvferry.proto.columns import pack_u8, pack_u32, pack_u64, u8, u32, u64
from kvferry.proto.control import Attach, Drained, Goodbye, Hello, RankGone, Register, Rotate
from kvferry.proto.hot import Cancel, Done, JobsEnded, Lookup, LookupAnswer, Plan, Renew, Step, StepAnswer
from kvferry.proto.ids import BootId, LinkId, WorkerId
from kvferry.proto.layout import slot_bytes
from kvferry.proto.outcome import Outcome, Reason
from kvferry.scheduler_daemon.core.api import (
    Action,
    CoreSettings,
    KeepEpochs,
    KillWorker,
    LinkLost,
    Note,
    Received,
    Recovered,
    Send,
    TableShape,
    TimePassed,
    WorkerReaped,
    WorkersListed,
)
from kvferry.scheduler_daemon.core.core import Core
from kvferry.scheduler_daemon.core.slots import Table, zeroed_table

KEY_BYTES = 8
PAYLOAD = 4096
MS = 1_000_000
S = 1000 * MS


def key(name: int | str) -> bytes:
    """A key whose first byte spreads over the shards."""
    raw = str(name).encode()
    return (bytes([sum(raw) % 251]) + raw).ljust(KEY_BYTES, b".")


def keys(*names: int | str) -> list[bytes]:
    return [key(name) for name in names]


class Job:
    """A store or load to put into a step."""

    def __init__(
        self,
        ticket: int,
        request: int,
        names: Sequence[int | str],
        blocks: Sequence[int],
        lease: int = 0,
        group: int = 0,
    ) -> None:
        self.ticket, self.request, self.keys, self.blocks = ticket, request, keys(*names), list(blocks)
        self.lease, self.group = lease, group


class Answer:
    """A decoded StepAnswer: by ticket (job, accepted, reason)."""

    def __init__(self, message: StepAnswer) -> None:
        self.message = message
        self.step = message.step
        rows = zip(
            u64(message.tickets).tolist(),
            u64(message.jobs).tolist(),
            u32(message.accepted).tolist(),
            map(Reason, u8(message.reasons).tolist()),
            strict=True,
        )
        self.by_ticket = {ticket: (job, accepted, reason) for ticket, job, accepted, reason in rows}
        self.wait_for = u64(message.wait_for).tolist()

    def job(self, ticket: int) -> int:
        return self.by_ticket[ticket][0]

    def accepted(self, ticket: int) -> int:
        return self.by_ticket[ticket][1]

    def reason(self, ticket: int) -> Reason:
        return self.by_ticket[ticket][2]


class World:
    """One core, a clock of our own, and whatever it said since it was last asked."""

    def __init__(
        self,
        tp: int = 2,
        slots: int = 16,
        boot: int = 0xB007,
        recovered: Recovered | None = None,
        **settings: Any,
    ) -> None:
        self.tp = tp
        self.slots = slots
        self.now = 1 * S
        settings.setdefault(
            "floor_bytes_per_s", 1 << 62
        )  # deadlines to the nanosecond, where a test says nothing of it
        self.settings = {"tp": tp, "slots": slots, **settings}
        self.boot = boot
        self.boots = 1
        self.shape: TableShape | None = recovered.shape if recovered else None
        self.table: Table | None = recovered.table if recovered else None
        self.epochs = recovered.epochs if recovered else ()
        self.core = Core(CoreSettings(boot=BootId(boot), tp_size=tp, **settings), self._make_table, recovered)
        self.said: list[Action] = []
        self._links = 0
        self._workers = 0

    def _make_table(self, shape: TableShape) -> Table:
        self.shape, self.table = shape, zeroed_table(shape.num_slots)
        return self.table

    def restart(self, workers: Sequence[int] | None = (), table: Table | None = None) -> "World":
        """The next daemon, over what this one's file holds; None: the supervisor has said nothing yet."""
        recovered = None
        if self.shape is not None and self.table is not None:
            table = self.table.copy() if table is None else table
            recovered = Recovered(self.shape, table, self.epochs, self.boots + 1)
        fresh = World(boot=self.boot + 1, recovered=recovered, **self.settings)
        fresh.boots = self.boots + 1
        fresh.now = self.now + 1 * S
        fresh._workers = self._workers
        if workers is not None:
            fresh.step(WorkersListed(tuple(WorkerId(worker) for worker in workers)))
        return fresh

    # ---- events ----------------------------------------------------------------------------------

    def step(self, event: Any) -> list[Action]:
        actions = self.core.step(event, self.now)
        self.core.check()
        for action in actions:
            if isinstance(action, KeepEpochs):
                self.epochs = action.epochs
        self.said += actions
        return actions

    def send(self, link: int, message: Any) -> list[Action]:
        return self.step(Received(LinkId(link), message))

    def lose(self, link: int) -> list[Action]:
        return self.step(LinkLost(LinkId(link)))

    def reap(self, worker: int) -> list[Action]:
        return self.step(WorkerReaped(WorkerId(worker)))

    def wait(self, ns: int) -> list[Action]:
        self.now += ns
        return self.step(TimePassed())

    def open(self, role: str, pid: int = 1) -> int:
        self._links += 1
        self.send(self._links, Hello(role=role, pid=pid))  # type: ignore[arg-type]
        return self._links

    def engine(self, name: str = "e", slots: int | None = None, **how: Any) -> "Engine":
        """A registered engine with all ranks attached."""
        engine = Engine(self, name, **how)
        engine.register()
        for rank in range(self.tp):
            engine.attach(rank)
        return engine

    def new_worker(self) -> int:
        self._workers += 1
        return 100 + self._workers

    # ---- what was said ---------------------------------------------------------------------------

    def heard(self, link: int, kind: type[Any]) -> list[Any]:
        """Messages of a type that went to a link since the last call; they are taken out."""
        hits = [a for a in self.said if isinstance(a, Send) and a.link == link and isinstance(a.message, kind)]
        self.said = [a for a in self.said if not any(a is hit for hit in hits)]
        return [hit.message for hit in hits]

    def kills(self) -> list[int]:
        return [a.worker for a in self.said if isinstance(a, KillWorker)]

    def notes(self) -> list[str]:
        return [a.text for a in self.said if isinstance(a, Note)]

    def warnings(self) -> list[str]:
        return [a.text for a in self.said if isinstance(a, Note) and a.warn]

    def drained(self, worker: int, link: int | None = None) -> int:
        """A worker says that it has drained, on a link of its own; the link."""
        link = self.open("worker") if link is None else link
        self.send(link, Drained(worker=worker, boot=self.boot))
        return link

    def sums(self) -> dict[str, int]:
        return dict(self.core.status()["slots"])

    def count(self, name: str) -> int:
        return int(self.core.status()["counters"].get(name, 0))

    @property
    def jobs(self) -> int:
        jobs = self.core.status()["jobs"]
        return int(jobs["stores"] + jobs["loads"])


class Engine:
    """A dummy engine: its client's link and one worker a rank."""

    def __init__(
        self,
        world: World,
        name: str,
        *,
        payload: int | Sequence[int] = PAYLOAD,
        facts: dict[str, str] | None = None,
        salt: bytes = b"",
        key_bytes: int = KEY_BYTES,
        num_blocks: int = 64,
        layout: str = "layout",
        client_facts: dict[str, str] | None = None,
        pid: int = 1,
    ) -> None:
        self.world, self.name = world, name
        self.payload = [payload] * world.tp if isinstance(payload, int) else list(payload)
        self.facts = facts or {"dtype": "bf16"}
        self.client_facts = client_facts or {}
        self.salt, self.key_bytes, self.num_blocks, self.layout = salt, key_bytes, num_blocks, layout
        self.pid = pid
        self.link = 0
        self.worker: dict[int, int] = {}
        self.worker_link: dict[int, int] = {}
        self.epoch = 0
        self.steps = 0
        self.lookups = 0

    def register(self, **change: Any) -> list[Action]:
        self.link = self.world.open("client", self.pid)
        self.steps = 0
        fields: dict[str, Any] = {
            "engine_id": self.name,
            "world_size": self.world.tp,
            "key_bytes": self.key_bytes,
            "num_blocks": self.num_blocks,
            "block_tokens": 16,
            "salt": self.salt,
            "facts": self.client_facts,
        }
        return self.world.send(self.link, Register(**{**fields, **change}))

    def attach(self, rank: int, /, worker: int = 0, link: int = 0, **change: Any) -> list[Action]:
        worker = worker or self.world.new_worker()
        link = link or self.world.open("worker")
        self.worker[rank], self.worker_link[rank] = worker, link
        fields: dict[str, Any] = {
            "worker": worker,
            "engine_id": self.name,
            "rank": rank,
            "world_size": self.world.tp,
            "layout_digest": self.layout,
            "payload_bytes": (self.payload[rank],),
            "block_tokens": (16,),
            "num_blocks": self.num_blocks,
            "pool_bytes": self.world.slots * slot_bytes(self.payload[rank]),
            "facts": self.facts,
        }
        return self.world.send(link, Attach(**{**fields, **change}))

    def lookup(
        self,
        request: int,
        names: Sequence[int | str],
        group: int = 0,
        epoch: int | None = None,
        keep: bool = False,  # leave the answer among what was said
    ) -> LookupAnswer:
        self.lookups += 1
        ask = Lookup(
            lookup=self.lookups,
            request=request,
            epoch=self.epoch if epoch is None else epoch,
            group=group,
            key_bytes=KEY_BYTES,
            keys=b"".join(keys(*names)),
        )
        kept = list(self.world.said)
        actions = self.world.send(self.link, ask)
        [answer] = self.world.heard(self.link, LookupAnswer)
        if keep:
            self.world.said = [*kept, *actions]
        assert answer.lookup == self.lookups
        return answer  # type: ignore[no-any-return]

    def message(
        self,
        stores: Sequence[Job] = (),
        loads: Sequence[Job] = (),
        ends: Sequence[int] = (),
        written: Sequence[int] = (),
        revoked: Sequence[int] = (),
        cancelled: Sequence[int] = (),
        released: Sequence[int] = (),
        number: int | None = None,
        epoch: int | None = None,
        key_bytes: int = KEY_BYTES,
    ) -> Step:
        if number is None:
            self.steps += 1
            number = self.steps
        step = Step(
            step=number,
            epoch=self.epoch if epoch is None else epoch,
            key_bytes=key_bytes,
            store_tickets=pack_u64([j.ticket for j in stores]),
            store_requests=pack_u64([j.request for j in stores]),
            store_groups=pack_u8([j.group for j in stores]),
            store_counts=pack_u32([len(j.keys) for j in stores]),
            store_keys=b"".join(k for j in stores for k in j.keys),
            store_blocks=pack_u32([b for j in stores for b in j.blocks]),
            load_tickets=pack_u64([j.ticket for j in loads]),
            load_requests=pack_u64([j.request for j in loads]),
            load_leases=pack_u64([j.lease for j in loads]),
            load_groups=pack_u8([j.group for j in loads]),
            load_counts=pack_u32([len(j.keys) for j in loads]),
            load_keys=b"".join(k for j in loads for k in j.keys),
            load_blocks=pack_u32([b for j in loads for b in j.blocks]),
            end_requests=pack_u64(list(ends)),
            end_reasons=pack_u8([0] * len(ends)),
            written=pack_u32(list(written)),
            revoked=pack_u64(list(revoked)),
            cancelled=pack_u64(list(cancelled)),
            released=pack_u64(list(released)),
        )
        step.check()
        return step

    def step(self, **what: Any) -> Answer:
        self.world.send(self.link, self.message(**what))
        [answer] = self.world.heard(self.link, StepAnswer)
        answer.check()
        return Answer(answer)

    def store(self, ticket: int, request: int, names: Sequence[int | str], blocks: Sequence[int]) -> int:
        """Store in a step of its own; the job's id."""
        return self.step(stores=[Job(ticket, request, names, blocks)]).job(ticket)

    def load(self, ticket: int, request: int, names: Sequence[int | str], blocks: Sequence[int], lease: int = 0) -> int:
        """Load in a step of its own; the job's id."""
        return self.step(loads=[Job(ticket, request, names, blocks, lease)]).job(ticket)

    def done(self, rank: int, *jobs: int, outcome: Outcome = Outcome.OK) -> list[Action]:
        """The worker of `rank` says that its part of these jobs is over."""
        n = len(jobs)
        words = Done(jobs=pack_u64(list(jobs)), outcomes=pack_u8([outcome] * n), copy_us=pack_u32([0] * n))
        return self.world.send(self.worker_link[rank], words)

    def finish(self, *jobs: int) -> None:
        """All ranks report these jobs OK."""
        for rank in range(self.world.tp):
            self.done(rank, *jobs)

    def hold(self, names: Sequence[int | str], ticket: int, blocks: Sequence[int] | None = None) -> None:
        """Store these and let all ranks report: they are loadable."""
        self.finish(self.store(ticket, 900_000 + ticket, names, blocks or range(len(names))))

    def ended(self) -> dict[int, Outcome]:
        """Tickets that ended since the last call, with their outcomes."""
        return {
            ticket: Outcome(outcome)
            for message in self.world.heard(self.link, JobsEnded)
            for ticket, outcome in zip(u64(message.tickets).tolist(), u8(message.outcomes).tolist(), strict=True)
        }

    def plans(self, rank: int = 0) -> list[Plan]:
        return self.world.heard(self.worker_link[rank], Plan)

    def cancels(self, rank: int = 0) -> list[int]:
        return [job for c in self.world.heard(self.worker_link[rank], Cancel) for job in u64(c.jobs).tolist()]

    def renew(self, *leases: int) -> list[Action]:
        return self.world.send(self.link, Renew(leases=pack_u64(list(leases))))

    def rotate(self, salt: bytes) -> list[Action]:
        return self.world.send(self.link, Rotate(salt=salt))

    def rank_gone(self, rank: int) -> list[Action]:
        return self.world.send(self.worker_link[rank], RankGone())

    def goodbye(self) -> list[Action]:
        return self.world.send(self.link, Goodbye())

    def die(self, rank: int) -> None:
        """The worker of `rank` dies: its link ends, then it is reaped."""
        self.world.lose(self.worker_link[rank])
        self.world.reap(self.worker[rank])


def come_to_rest(world: World) -> None:
    """All links end, all workers are reaped: nothing may be left but the cache (I6)."""
    for link in range(1, world._links + 1):
        world.lose(link)
    for worker in [*range(101, 101 + world._workers), *(int(name, 16) for name in world.core.status()["awaited"])]:
        world.reap(worker)
    left = {name: count for name, count in world.core.at_rest().items() if count}
    assert not left, f"left at rest: {left}"
    assert world.core.next_due_ns() is None, "something is due though nothing is left"
    sums = world.sums()
    assert sums["free"] + sums["ready"] == sums["total"]
