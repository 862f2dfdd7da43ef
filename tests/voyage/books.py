"""The ledger's books: what every key and slot holds, which jobs run, how they ended. Apart from the daemon's own.

    name (meaning, key) ──▶ (slot, generation) that is READY        slot ──▶ jobs whose copies may touch it
    job ──▶ its ranks' words, its end; live until its copies are over on every rank; an orphan when its daemon died

They know nothing of messages: `ledger.py` hears them at the daemon's door and turns to these.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvferry.proto.hot import Step, StepAnswer
from kvferry.proto.outcome import Kind, Outcome

from .journal import Journal
from .memory import PoolFile, Stamps
from .table import TableBytes

Meaning = tuple[str, bytes]
Name = tuple[Meaning, bytes]


class Broken(Exception):  # noqa: N818  what happened, not what kind of error
    """A promise did not hold."""


@dataclass(slots=True)
class Wish:
    """One ticket of a step: what the client asked for."""

    kind: Kind
    keys: list[bytes]
    blocks: list[int]
    meaning: Meaning
    voided: bool = False  # revoked, cancelled or written over: it may not end OK from here on
    answered: bool = False
    refused: bool = False


@dataclass(slots=True)
class Job:
    """One accepted job."""

    job: int
    ticket: int
    kind: Kind
    engine: "Engine"
    wish: Wish
    names: list[Name]
    slots: list[int]
    generations: list[int]
    blocks: list[int]
    expected: set[int]  # workers
    reports: dict[int, Outcome] = field(default_factory=dict)  # worker -> its word
    gone: set[int] = field(default_factory=set)  # reaped workers
    ended: Outcome | None = None

    @property
    def copies_over(self) -> bool:
        """Whether no rank can touch a byte for this job any more."""
        return self.expected <= self.reports.keys() | self.gone


@dataclass(slots=True)
class Engine:
    """One registration, as the daemon has heard it."""

    name: str
    link: int
    facts: str
    meaning: Meaning
    key_bytes: int
    closed: bool = False  # its link is over: it hears of nothing any more
    wishes: dict[int, Wish] = field(default_factory=dict)
    jobs: dict[int, Job] = field(default_factory=dict)  # by ticket
    steps: dict[int, Step] = field(default_factory=dict)
    answers: dict[int, StepAnswer] = field(default_factory=dict)
    owed_waits: dict[int, set[int]] = field(default_factory=dict)  # step -> store tickets its writes met
    lookups: dict[int, tuple[Meaning, list[bytes]]] = field(default_factory=dict)


class Books:
    """Every deed here is a check as well: it raises `Broken` where what happens may not be."""

    def __init__(self, stamps: Stamps, pools: list[PoolFile], table: TableBytes, journal: Journal) -> None:
        self.jobs: dict[int, Job] = {}
        self.live: dict[int, Job] = {}  # not ended, or a copy still runs
        self.ready: dict[Name, tuple[int, int]] = {}  # -> (slot, generation)
        self.pending: dict[Name, int] = {}  # -> the store that may still bring it
        self.slots: dict[int, Name] = {}  # READY slots
        self.users: dict[int, set[int]] = {}  # slot -> live jobs that touch it
        self.ended_ok = self.ended_badly = 0
        self.awaited: set[int] = set()  # workers of earlier boots that have neither drained nor died
        self.spoiled: set[tuple[int, int]] = set()  # (slot, generation) that somebody has scribbled on
        self.evicted: set[Name] = set()  # by the present step
        self.orphans: dict[int, Job] = {}  # of dead daemons, while a copy may still run
        self.meanings: dict[bytes, Meaning] = {}  # namespace digest -> what it stands for
        self.pools = pools
        self.table = table
        self.journal = journal
        self._stamps = stamps

    @property
    def namespaces(self) -> list[bytes]:
        """Digests of all namespaces that anybody has stored in."""
        return list(self.meanings)

    def tell(self, job: int, text: str, *items: Any) -> None:
        """A line for the job's story."""
        self.journal.tell(job, text, *items)

    # ---- jobs ---------------------------------------------------------------------------------------

    def reserve(self, job: Job) -> None:
        """A store is given its slots: nobody touches them, none of its ancestors goes for them."""
        if self.awaited:
            raise Broken(f"rule 10: job {job.job:x} is given slots; not drained are {[f'{w:x}' for w in self.awaited]}")
        for name, slot, generation in zip(job.names, job.slots, job.generations, strict=True):
            if users := self.users.get(slot):
                raise Broken(
                    f"law 1: slot {slot} is given to job {job.job:x} while {[f'{u:x}' for u in users]} still touch it"
                )
            old = self.slots.pop(slot, None)
            if old is not None:
                keys = job.wish.keys
                if old[0] == name[0] and old[1] in keys[: keys.index(name[1])]:
                    raise Broken(f"store {job.job:x} of {name} evicts {old}, which comes before it in its chain")
                del self.ready[old]
                self.evicted.add(old)
            if name in self.ready:
                raise Broken(f"job {job.job:x} stores {name} again, which is held in slot {self.ready[name]}")
            if generation <= max(pool.gen_open[slot] for pool in self.pools):
                raise Broken(f"rule 4: job {job.job:x} does not raise the generation of slot {slot}")
            if name in self.pending:
                raise Broken(f"job {job.job:x} stores {name}, which job {self.pending[name]:x} is storing")
            digest = self.table.digest(slot)
            if self.meanings.setdefault(digest, name[0]) != name[0]:
                raise Broken(f"I8: {name[0]} and {self.meanings[digest]} are one namespace, {digest.hex()}")
            self.pending[name] = job.job
            self.users[slot] = {job.job}

    def pin(self, job: Job) -> None:
        """A load is given the slots that hold its keys."""
        for name, slot, generation in zip(job.names, job.slots, job.generations, strict=True):
            if self.ready.get(name) != (slot, generation):
                raise Broken(f"I1: load {job.job:x} of {name} is sent to slot {slot}; it is {self.ready.get(name)}")
            self.users.setdefault(slot, set()).add(job.job)

    def end(self, number: int, outcome: Outcome) -> None:
        """A job has its one answer; what an OK store brought is READY from here on."""
        job = self.jobs.get(number)
        if job is None:
            raise Broken(f"I4: an end for job {number:x}, which was never accepted")
        if job.ended is not None:
            raise Broken(f"I4: job {number:x} ended {job.ended.name} and again {outcome.name}")
        job.ended = outcome
        self.tell(number, "ends {}", outcome.name)
        if job.kind == Kind.STORE:
            for name in job.names:
                self.pending.pop(name, None)
        words = job.reports.values()
        if outcome == Outcome.OK:
            self.ended_ok += 1
            if job.reports.keys() != job.expected or any(word != Outcome.OK for word in words):
                raise Broken(f"I2: job {number:x} ended OK; the ranks' words are {job.reports} of {job.expected}")
            if job.kind == Kind.STORE:
                self._publish(job)
        else:
            self.ended_badly += 1
            if job.kind == Kind.LOAD and not job.copies_over:
                raise Broken(f"I4: load {number:x} ended {outcome.name} before all ranks spoke: {job.reports}")

    def _publish(self, job: Job) -> None:
        if job.wish.voided:
            raise Broken(f"I3: store {job.job:x} (ticket {job.ticket}) was voided or written over, and is published")
        for name, slot, generation in zip(job.names, job.slots, job.generations, strict=True):
            self.check_whole(name, slot, generation, f"I1: store {job.job:x} ended OK")
            self.ready[name] = (slot, generation)
            self.slots[slot] = name

    def let_go(self, worker: int, why: str) -> None:
        """No copy of this worker runs for anything that it was told up to now."""
        self.awaited.discard(worker)
        for jobs in (self.live, self.orphans):
            for job in list(jobs.values()):
                if worker in job.expected and worker not in job.reports:
                    job.gone.add(worker)
                    self.tell(job.job, "worker {:x} {}", worker, why)
                    if jobs is self.orphans and job.copies_over:
                        self.bury(job, jobs)

    def bury(self, job: Job, jobs: dict[int, Job]) -> None:
        """Every rank's copy is over: its slots are nobody's but their keys'."""
        del jobs[job.job]
        self.tell(job.job, "no copy of it runs any more")
        # What a dead daemon heard of torn slots died with it: the next one serves them until a load finds out.
        is_torn = jobs is self.live and Outcome.TORN in job.reports.values()
        for name, slot, generation in zip(job.names, job.slots, job.generations, strict=True):
            self.users[slot].discard(job.job)
            if is_torn and self.ready.get(name) == (slot, generation):
                del self.ready[name], self.slots[slot]

    # ---- the copiers --------------------------------------------------------------------------------

    def may_touch(self, kind: Kind, slot: int, jobs: Iterable[int]) -> None:
        """A copier writes (store) or reads (load) a slot now, for one of these jobs."""
        if self.users.get(slot, set()).isdisjoint(jobs):
            raise Broken(f"law 1: slot {slot} is touched for {[f'{job:x}' for job in jobs]}, of which no copy may run")
        if kind == Kind.STORE and slot in self.slots:
            raise Broken(f"rule 4: READY slot {slot} ({self.slots[slot]}) is being written")

    def may_be_published(self, number: int) -> bool:
        """Whether this job may still end OK."""
        job = self.jobs[number]
        return job.ended is None and not job.wish.voided

    # ---- what slots hold ----------------------------------------------------------------------------

    def _holds(self, rank: int, pool: PoolFile, slot: int, name: Name, why: str) -> None:
        if not pool.holds(slot, self._stamps.of(name[0], name[1], rank)):
            wanted = self._stamps.text(self._stamps.of(name[0], name[1], rank))
            raise Broken(f"{why}: slot {slot} holds {pool.text(slot, self._stamps)}, not {wanted}")

    def check_whole(self, name: Name, slot: int, generation: int, why: str) -> None:
        """A slot holds all of its key on every rank, under closed headers."""
        for rank, pool in enumerate(self.pools):
            self._holds(rank, pool, slot, name, why)
            if not pool.gen_open[slot] == pool.gen_close[slot] == generation:
                raise Broken(f"rule 4: {why}; rank {rank}'s header of slot {slot} is open")

    def check_ready(self) -> None:
        """Every READY slot holds its key's stamps on every rank."""
        for slot, name in self.slots.items():
            if self.ready[name] in self.spoiled:
                continue
            for rank, pool in enumerate(self.pools):
                self._holds(rank, pool, slot, name, "I1: READY")
