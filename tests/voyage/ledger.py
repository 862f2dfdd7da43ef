"""What was promised at the daemon's door, kept apart from the daemon's own books.

The ledger sees each event that goes into the daemon core and each action that comes out, and what the
workers' copiers touch. From these alone it says what must be so, and raises `Broken` where it is not:

    I1  a store that ends OK has put its keys' stamps into its slots, on every rank; a load plan names such slots
    I2  a job ends in the very step that brings its last expected rank's report, and lookups see it from then on
    I3  a store met by a write without a revoke is named in `wait_for` and never ends OK
    I4  each accepted job ends once; a load that failed ends after every rank's word; a deadline is no word
    law 1  a slot goes into a new plan only when every earlier copy that touches it is known to be over
    I8  nothing is hit or loaded that was stored under another meaning
"""

from dataclasses import dataclass, field
from typing import Any

from kvferry.proto.columns import spans, split_keys, u8, u32, u64
from kvferry.proto.control import Attach, Register, Rotate
from kvferry.proto.hot import Done, JobsEnded, Lookup, LookupAnswer, Plan, Step, StepAnswer
from kvferry.proto.outcome import Kind, Next, Outcome, Reason
from kvferry.scheduler_daemon.core.api import LinkLost, Received, Send, WorkerReaped

from .memory import PoolFile, Stamps

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
    workers: set[int] = field(default_factory=set)
    wishes: dict[int, Wish] = field(default_factory=dict)
    jobs: dict[int, Job] = field(default_factory=dict)  # by ticket
    steps: dict[int, Step] = field(default_factory=dict)
    answers: dict[int, StepAnswer] = field(default_factory=dict)
    owed_waits: dict[int, set[int]] = field(default_factory=dict)  # step -> store tickets its writes met
    lookups: dict[int, tuple[Meaning, list[bytes]]] = field(default_factory=dict)


class Ledger:
    """The second book."""

    def __init__(self, stamps: Stamps, pools: list[PoolFile]) -> None:
        self.jobs: dict[int, Job] = {}
        self.live: dict[int, Job] = {}  # not ended, or a copy still runs
        self.ready: dict[Name, tuple[int, int]] = {}  # -> (slot, generation)
        self.pending: dict[Name, int] = {}  # -> the store that may still bring it
        self.slots: dict[int, Name] = {}  # READY slots
        self.users: dict[int, set[int]] = {}  # slot -> live jobs that touch it
        self.ended_ok = self.ended_badly = self.hits = self.refusals = 0
        self._just_ended = False  # some job ended in the present step
        self._evicted: set[Name] = set()  # by the present step
        self._engines: dict[int, Engine] = {}
        self._by_worker: dict[int, Engine] = {}
        self._links: dict[int, int] = {}  # link -> worker
        self._waiting_attaches: dict[int, str] = {}
        self._ranks: dict[int, int] = {}
        self._stamps = stamps
        self._pools = pools
        self._plans_seen: dict[int, set[int]] = {}

    # ---- the daemon's door ------------------------------------------------------------------------

    def saw(self, event: Any, actions: list[Any]) -> None:
        """One step of the daemon core has been made."""
        if isinstance(event, Received):
            self._heard(event.link, event.message)
        elif isinstance(event, WorkerReaped):
            for job in self.live.values():
                if event.worker in job.expected:
                    job.gone.add(event.worker)
        elif isinstance(event, LinkLost):
            self._engines.pop(event.link, None)
        self._just_ended = any(isinstance(a, Send) and isinstance(a.message, JobsEnded) for a in actions)
        self._evicted.clear()
        # Plans name the jobs that answers and ends speak of, whatever order the actions have.
        for kind in (Plan, JobsEnded, StepAnswer, LookupAnswer):
            for action in actions:
                if isinstance(action, Send) and isinstance(action.message, kind):
                    self._said(action.link, action.message)
        for job in list(self.live.values()):
            if job.copies_over:
                if job.ended is None:
                    raise Broken(f"I2: job {job.job:x} has every rank's word and did not end: {job.reports}")
                self._bury(job)

    def _heard(self, link: int, message: Any) -> None:
        if isinstance(message, Register):
            facts = ",".join(f"{k}={v}" for k, v in sorted(message.facts.items()))
            engine = Engine(message.engine_id, link, facts, (facts, message.salt), message.key_bytes)
            self._engines[link] = engine
            for worker, name in self._waiting_attaches.items():
                if name == engine.name:
                    engine.workers.add(worker)
                    self._by_worker[worker] = engine
        elif isinstance(message, Attach):
            self._links[link] = message.worker
            self._ranks[message.worker] = message.rank
            self._waiting_attaches[message.worker] = message.engine_id
            for engine in self._engines.values():
                if engine.name == message.engine_id:
                    engine.workers.add(message.worker)
                    self._by_worker[message.worker] = engine
        elif isinstance(message, Rotate):
            engine = self._engines[link]
            engine.meaning = (engine.facts, message.salt)
        elif isinstance(message, Lookup):
            engine = self._engines[link]
            engine.lookups[message.lookup] = (engine.meaning, split_keys(message.keys, message.key_bytes))
        elif isinstance(message, Done):
            worker = self._links.get(link)
            for number, outcome in zip(u64(message.jobs).tolist(), u8(message.outcomes).tolist(), strict=True):
                job = self.jobs.get(number)
                if job is not None and worker in job.expected:
                    job.reports.setdefault(worker, Outcome(outcome))
        elif isinstance(message, Step):
            self._heard_step(self._engines[link], message)

    def _heard_step(self, engine: Engine, step: Step) -> None:
        if step.step in engine.steps:
            return
        engine.steps[step.step] = step
        met: set[int] = set()
        for kind, tickets, counts, keys, blocks in (
            (Kind.STORE, step.store_tickets, step.store_counts, step.store_keys, step.store_blocks),
            (Kind.LOAD, step.load_tickets, step.load_counts, step.load_keys, step.load_blocks),
        ):
            all_keys, all_blocks = split_keys(keys, step.key_bytes), u32(blocks).tolist()
            for ticket, (start, stop) in zip(u64(tickets).tolist(), spans(counts), strict=True):
                if ticket in engine.wishes:
                    raise Broken(f"client {engine.name} used ticket {ticket} twice")
                engine.wishes[ticket] = Wish(kind, all_keys[start:stop], all_blocks[start:stop], engine.meaning)
        over = set(u64(step.revoked).tolist())
        for ticket in over | set(u64(step.cancelled).tolist()):
            if ticket in engine.wishes:
                engine.wishes[ticket].voided = True
        written = set(u32(step.written).tolist()) | set(u32(step.load_blocks).tolist())
        for ticket, wish in engine.wishes.items():
            if wish.kind != Kind.STORE or wish.refused or written.isdisjoint(wish.blocks):
                continue
            job = engine.jobs.get(ticket)
            if job is None and wish.answered:
                continue
            if job is not None and (job.ended is not None or written.isdisjoint(job.blocks)):
                continue
            if ticket not in over and not wish.voided:
                met.add(ticket)
            wish.voided = True
        engine.owed_waits[step.step] = met

    def _said(self, link: int, message: Any) -> None:
        if isinstance(message, Plan):
            self._said_plan(self._links[link], message)
        elif isinstance(message, StepAnswer):
            self._said_answer(self._engines[link], message)
        elif isinstance(message, JobsEnded):
            for number, outcome in zip(u64(message.jobs).tolist(), u8(message.outcomes).tolist(), strict=True):
                self._end(number, Outcome(outcome))
        elif isinstance(message, LookupAnswer):
            self._said_hits(self._engines[link], message)

    def _said_plan(self, worker: int, plan: Plan) -> None:
        engine = self._by_worker[worker]
        slots, generations, blocks = u32(plan.slots).tolist(), u64(plan.generations).tolist(), u32(plan.blocks).tolist()
        rows = zip(
            u64(plan.tickets).tolist(),
            u64(plan.jobs).tolist(),
            u8(plan.kinds).tolist(),
            spans(plan.counts),
            strict=True,
        )
        for ticket, number, kind, (start, stop) in rows:
            seen = self._plans_seen.setdefault(number, set())
            if worker in seen:
                raise Broken(f"job {number:x} was planned twice to worker {worker:x}")
            seen.add(worker)
            here = (slots[start:stop], generations[start:stop], blocks[start:stop])
            if number in self.jobs:
                job = self.jobs[number]
                if (job.slots, job.generations, job.blocks) != here or job.ticket != ticket:
                    raise Broken(f"job {number:x} was planned differently to worker {worker:x}")
                continue
            wish = engine.wishes.get(ticket)
            if wish is None or wish.kind != kind:
                raise Broken(f"a plan for ticket {ticket} that {engine.name} did not ask for")
            key_of = dict(zip(wish.blocks, wish.keys, strict=True))
            names = [(wish.meaning, key_of[block]) for block in here[2]]
            job = Job(number, ticket, Kind(kind), engine, wish, names, *here, set(engine.workers))
            self.jobs[number] = self.live[number] = engine.jobs[ticket] = job
            if job.kind == Kind.STORE:
                self._reserve(job)
            else:
                self._pin(job)

    def _reserve(self, job: Job) -> None:
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
                self._evicted.add(old)
            if name in self.ready:
                raise Broken(f"job {job.job:x} stores {name} again, which is held in slot {self.ready[name]}")
            if generation <= self._pools[0].gen_open[slot]:
                raise Broken(f"rule 4: job {job.job:x} does not raise the generation of slot {slot}")
            if name in self.pending:
                raise Broken(f"job {job.job:x} stores {name}, which job {self.pending[name]:x} is storing")
            self.pending[name] = job.job
            self.users[slot] = {job.job}

    def _pin(self, job: Job) -> None:
        for name, slot, generation in zip(job.names, job.slots, job.generations, strict=True):
            if self.ready.get(name) != (slot, generation):
                raise Broken(f"I1: load {job.job:x} of {name} is sent to slot {slot}; it is {self.ready.get(name)}")
            self.users.setdefault(slot, set()).add(job.job)

    def _said_answer(self, engine: Engine, answer: StepAnswer) -> None:
        before = engine.answers.get(answer.step)
        if before is not None:
            if (before.tickets, before.jobs, before.accepted) != (answer.tickets, answer.jobs, answer.accepted):
                raise Broken(f"I5: step {answer.step} was answered in two ways")
            return
        engine.answers[answer.step] = answer
        rows = zip(
            u64(answer.tickets).tolist(),
            u64(answer.jobs).tolist(),
            u32(answer.accepted).tolist(),
            u8(answer.reasons).tolist(),
            strict=True,
        )
        asked = self._asked(engine.steps[answer.step])
        if u64(answer.tickets).tolist() != asked:
            raise Broken(
                f"I4: step {answer.step} asked for {asked}, the answer speaks of {u64(answer.tickets).tolist()}"
            )
        for ticket, number, accepted, reason in rows:
            wish = engine.wishes[ticket]
            wish.answered = True
            if number == 0:
                wish.refused = True
                if reason:
                    self.refusals += 1
                if wish.kind == Kind.STORE:
                    self._is_taken(wish, accepted)
                continue
            if self.jobs.get(number) is not engine.jobs.get(ticket):
                raise Broken(f"ticket {ticket} was answered with job {number:x}, which was planned for another")
            if number not in self.jobs:
                raise Broken(f"job {number:x} was accepted and planned to nobody")
            if self._plans_seen[number] != engine.workers:
                raise Broken(f"job {number:x} was not planned to every rank")
            if accepted < len(wish.keys) and reason == Reason.NONE:
                raise Broken(f"ticket {ticket}: {accepted} of {len(wish.keys)} keys accepted and no reason")
        met = {t for t in engine.owed_waits[answer.step] if not engine.wishes[t].refused}
        said = set(u64(answer.wait_for).tolist())
        missing = {t for t in met if self._must_name(engine, answer.step, t)} - said
        if missing:
            raise Broken(
                f"I3: step {answer.step} writes blocks of stores {sorted(missing)}; the daemon names {sorted(said)}"
            )
        if extra := said - met:
            raise Broken(f"I3: step {answer.step} is told to wait for {sorted(extra)}, whose blocks it does not write")

    @staticmethod
    def _asked(step: Step) -> list[int]:
        return u64(step.store_tickets).tolist() + u64(step.load_tickets).tolist()

    def _is_taken(self, wish: Wish, accepted: int) -> None:
        """A store without a job: what was accepted of it is held or on its way."""
        for key in wish.keys[:accepted]:
            name = (wish.meaning, key)
            # A later store of the same step may have evicted it again.
            if not (self._just_ended or name in self.ready or name in self.pending or name in self._evicted):
                raise Broken(f"I4: {name} was accepted; it is neither held nor on its way")

    @staticmethod
    def _must_name(engine: Engine, number: int, ticket: int) -> bool:
        """Whether the writes of a step meet what was accepted of a store, and it did not fail by itself just now."""
        job = engine.jobs.get(ticket)
        step = engine.steps[number]
        written = set(u32(step.written).tolist()) | set(u32(step.load_blocks).tolist())
        return job is not None and job.ended in (None, Outcome.REVOKED) and not written.isdisjoint(job.blocks)

    def _said_hits(self, engine: Engine, answer: LookupAnswer) -> None:
        meaning, keys = engine.lookups[answer.lookup]
        self.hits += answer.hits
        if answer.reason != Reason.NONE:
            return  # turned down as a whole: ranks away, or a stale epoch
        held = 0
        while held < len(keys) and (meaning, keys[held]) in self.ready:
            held += 1
        after = Next.END if held == len(keys) else Next.MISS
        if held < len(keys) and (meaning, keys[held]) in self.pending:
            after = Next.PENDING
        if (answer.hits, answer.next) != (held, after):
            raise Broken(
                f"I2/I8: lookup {answer.lookup} of {len(keys)} keys under {meaning} is told {answer.hits} hits and then"
                f" {Next(answer.next).name}; the ranks' words make it {held} and {after.name}"
            )

    def _end(self, number: int, outcome: Outcome) -> None:
        job = self.jobs.get(number)
        if job is None:
            raise Broken(f"I4: an end for job {number:x}, which was never accepted")
        if job.ended is not None:
            raise Broken(f"I4: job {number:x} ended {job.ended.name} and again {outcome.name}")
        job.ended = outcome
        if job.kind == Kind.STORE:
            for name in job.names:
                del self.pending[name]
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
            for rank, pool in enumerate(self._pools):
                self._holds(rank, pool, slot, name, f"I1: store {job.job:x} ended OK")
                if not pool.gen_open[slot] == pool.gen_close[slot] == generation:
                    raise Broken(f"rule 4: store {job.job:x} ended OK; rank {rank}'s header of slot {slot} is open")
            self.ready[name] = (slot, generation)
            self.slots[slot] = name

    def _bury(self, job: Job) -> None:
        del self.live[job.job]
        for slot in job.slots:
            self.users[slot].discard(job.job)

    # ---- the copiers --------------------------------------------------------------------------------

    def may_touch(self, kind: Kind, slot: int) -> None:
        """A copier writes (store) or reads (load) a slot now."""
        if kind == Kind.STORE and slot in self.slots:
            raise Broken(f"rule 4: READY slot {slot} ({self.slots[slot]}) is being written")

    def may_be_published(self, number: int) -> bool:
        """Whether this job may still end OK."""
        job = self.jobs[number]
        return job.ended is None and not job.wish.voided

    # ---- at any time --------------------------------------------------------------------------------

    def _holds(self, rank: int, pool: PoolFile, slot: int, name: Name, why: str) -> None:
        if not pool.holds(slot, self._stamps.of(name[0], name[1], rank)):
            wanted = self._stamps.text(self._stamps.of(name[0], name[1], rank))
            raise Broken(f"{why}: slot {slot} holds {pool.text(slot, self._stamps)}, not {wanted}")

    def check_ready(self) -> None:
        """Every READY slot holds its key's stamps on every rank."""
        for slot, name in self.slots.items():
            for rank, pool in enumerate(self._pools):
                self._holds(rank, pool, slot, name, "I1: READY")

    def check_rest(self) -> None:
        """I6 at the daemon's door: every job has ended and every copy is over."""
        if self.live:
            raise Broken(
                "I6: jobs at rest: " + ", ".join(f"{j.job:x} {j.kind.name} {j.reports}" for j in self.live.values())
            )
        for engine in self._engines.values():
            lacking = engine.steps.keys() - engine.answers.keys()
            if lacking:
                raise Broken(f"I4: steps of {engine.name} never answered: {sorted(lacking)}")
            if unanswered := [t for t, w in engine.wishes.items() if not w.answered]:
                raise Broken(f"I4: tickets of {engine.name} never answered: {unanswered}")
