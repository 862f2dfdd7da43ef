"""What was promised at the daemon's door, kept apart from the daemon's own books.

The ledger sees each event that goes into the daemon core and each action that comes out, and what the
workers' copiers touch. From these alone it says what must be so, and raises `Broken` where it is not:

    I1  a store that ends OK has put its keys' stamps into its slots, on every rank; a load plan names such slots
    I2  a job ends in the very step that brings its last expected rank's report, and lookups see it from then on
    I3  a store met by a write without a revoke is named in `wait_for` and never ends OK
    I4  each accepted job ends once; a load that failed ends after every rank's word; a deadline is no word
    law 1  a slot goes into a new plan only when every earlier copy that touches it is known to be over
    I8  nothing is hit or loaded that was stored under another meaning
    crash    a daemon's death takes what was in flight, as a whole, and a torn record; every other READY key is
             served by the next boot, and nothing else is
    rule 10  no store is planned before each worker that outlived the last daemon has drained or is dead
    rule 12  after a reset nothing of the old epoch is served, by no later boot either
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvferry.proto.columns import spans, split_keys, u8, u32, u64
from kvferry.proto.control import (
    Attach,
    Attached,
    DrainAnswer,
    DrainAsk,
    Drained,
    RankGone,
    Refused,
    Register,
    ResetAnswer,
    Rotate,
)
from kvferry.proto.hot import Done, JobsEnded, Lookup, LookupAnswer, Plan, Step, StepAnswer
from kvferry.proto.outcome import Kind, Next, Outcome, Reason
from kvferry.scheduler_daemon.core.api import KeepEpochs, LinkLost, Received, Send, WorkersListed
from kvferry.scheduler_daemon.core.namespaces import ALL

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


class Ledger:
    """The second book."""

    def __init__(self, stamps: Stamps, pools: list[PoolFile], table: TableBytes, journal: Journal) -> None:
        self.jobs: dict[int, Job] = {}
        self.live: dict[int, Job] = {}  # not ended, or a copy still runs
        self.ready: dict[Name, tuple[int, int]] = {}  # -> (slot, generation)
        self.pending: dict[Name, int] = {}  # -> the store that may still bring it
        self.slots: dict[int, Name] = {}  # READY slots
        self.users: dict[int, set[int]] = {}  # slot -> live jobs that touch it
        self.ended_ok = self.ended_badly = self.hits = self.refusals = 0
        self._just_ended = False  # some job ended in the present step
        self._evicted: set[Name] = set()  # by the present step
        self.num_recovered = self.num_torn = self.num_lost = 0
        self.awaited: set[int] = set()  # workers of earlier boots that have neither drained nor died
        self.spoiled: set[tuple[int, int]] = set()  # (slot, generation) that somebody has scribbled on
        self._orphans: dict[int, Job] = {}  # of dead daemons, while a copy may still run
        self._doubtful: dict[Name, tuple[int, int]] = {}  # reset, and the new epoch is not on record yet
        self._meanings: dict[bytes, Meaning] = {}  # namespace digest -> what it stands for
        self._epochs: dict[bytes, int] = {}  # on record
        self._boot = 0
        self._is_draining = False
        self._engines: dict[int, Engine] = {}
        self._seats: dict[str, dict[int, int]] = {}  # engine -> rank -> worker that is attached
        self._links: dict[int, tuple[int, str, int]] = {}  # link -> (worker, engine, rank), asked for
        self._stamps = stamps
        self._pools = pools
        self._table = table
        self._journal = journal
        self._plans_seen: dict[int, set[int]] = {}

    @property
    def namespaces(self) -> list[bytes]:
        """Digests of all namespaces that anybody has stored in."""
        return list(self._meanings)

    def tell(self, job: int, text: str, *items: Any) -> None:
        """A line for the job's story."""
        self._journal.tell(job, text, *items)

    # ---- boots of the daemon ------------------------------------------------------------------------

    def daemon_starts(self, boot: int) -> None:
        """A daemon has read what the last one left."""
        self._boot = boot

    def daemon_died(self, torn: int | None, unsure: set[int]) -> None:
        """Nothing of this boot goes on but copies; what is held is what the table says, and must be what was promised.

        `torn`: the slot whose record is broken. `unsure`: slots whose records the daemon was changing; what it was
        about to publish may be held, what it was about to give away may be gone.
        """
        self._journal.everybody("the daemon dies", self.live)
        self.num_lost += sum(job.ended is None for job in self.live.values())
        for job in self.live.values():
            job.ended = job.ended or Outcome.CANCELLED
        self._orphans |= self.live
        self.live = {}
        for job in [job for job in self._orphans.values() if job.copies_over]:
            self._bury(job, self._orphans)
        self._engines, self._seats, self._links, self.pending = {}, {}, {}, {}
        self._is_draining = False
        self._epochs = self._table.epochs()
        found: dict[Name, tuple[int, int]] = {}
        for digest, key, slot, generation in self._table.ready():
            if digest not in self._meanings:
                raise Broken(f"crash: slot {slot} is READY under a namespace that nobody stored in")
            name = (self._meanings[digest], key)
            promised = self.ready.get(name) or self._doubtful.get(name)
            if promised is None and slot in unsure:
                self._is_whole(name, slot, generation, "crash: published amid the daemon's death")
            elif promised != (slot, generation):
                raise Broken(f"crash: the table says that slot {slot} holds {name}; promised was {promised}")
            found[name] = (slot, generation)
        for name, place in self.ready.items():
            if name not in found and place[0] != torn and place[0] not in unsure:
                raise Broken(f"crash: {name} was held in slot {place[0]}; the table has lost it")
        self.num_torn += torn is not None and torn in self.slots
        self.num_recovered += len(found)
        self.ready, self._doubtful = found, {}
        self.slots = {slot: name for name, (slot, _) in found.items()}

    def epochs_kept(self, epochs: Iterable[tuple[bytes, int]]) -> None:
        """These are in the table's header now."""
        self._epochs = dict(epochs)
        self._doubtful.clear()

    def reaped(self, worker: int) -> None:
        """A worker is dead, and its supervisor knows it."""
        self._let_go(worker, "is reaped")

    def _let_go(self, worker: int, why: str) -> None:
        """No copy of this worker runs for anything that it was told up to now."""
        self.awaited.discard(worker)
        for jobs in (self.live, self._orphans):
            for job in list(jobs.values()):
                if worker in job.expected and worker not in job.reports:
                    job.gone.add(worker)
                    self.tell(job.job, "worker {:x} {}", worker, why)
                    if jobs is self._orphans and job.copies_over:
                        self._bury(job, jobs)
        self._stand_up(worker)

    def _stand_up(self, worker: int) -> None:
        for seats in self._seats.values():
            for rank in [rank for rank, seated in seats.items() if seated == worker]:
                del seats[rank]

    # ---- the daemon's door ------------------------------------------------------------------------

    def saw(self, event: Any, actions: list[Any]) -> None:
        """One step of the daemon core has been made."""
        if isinstance(event, Received):
            self._heard(event.link, event.message)
        elif isinstance(event, LinkLost):
            self._lost(event.link)
        elif isinstance(event, WorkersListed):
            self.awaited = set(event.workers)
        said = [action for action in actions if isinstance(action, Send)]
        self._just_ended = any(isinstance(action.message, JobsEnded) for action in said)
        self._evicted.clear()
        # Plans name the jobs that answers and ends speak of, whatever order the actions have.
        for kind in (ResetAnswer, Attached, Refused, Plan, JobsEnded, StepAnswer, LookupAnswer):
            for action in said:
                if isinstance(action.message, kind):
                    self._said(action.link, action.message)
        if self._doubtful and not any(isinstance(action, KeepEpochs) for action in actions):
            raise Broken("rule 12: a reset is answered and its epoch is nowhere on record")
        for job in list(self.live.values()):
            if job.copies_over:
                if job.ended is None and not job.engine.closed:
                    raise Broken(f"I2: job {job.job:x} has every rank's word and did not end: {job.reports}")
                self._bury(job, self.live)
        for action in said:
            if isinstance(action.message, DrainAnswer) and self._is_draining and self.live:
                raise Broken(f"drain: answered while {[f'{job:x}' for job in self.live]} are under way")

    def _heard(self, link: int, message: Any) -> None:
        if isinstance(message, Register):
            facts = ",".join(f"{k}={v}" for k, v in sorted(message.facts.items()))
            self._engines[link] = Engine(message.engine_id, link, facts, (facts, message.salt), message.key_bytes)
        elif isinstance(message, Attach):
            self._links[link] = (message.worker, message.engine_id, message.rank)
        elif isinstance(message, Drained):
            if message.boot == self._boot:
                for old in [old for old, (worker, _, _) in self._links.items() if worker == message.worker]:
                    if old != link:
                        del self._links[old]
                self._let_go(message.worker, "has drained")
        elif isinstance(message, RankGone):
            if link in self._links:
                self._stand_up(self._links[link][0])
        elif isinstance(message, DrainAsk):
            self._is_draining = not message.resume
        elif isinstance(message, Rotate):
            engine = self._engines[link]
            engine.meaning = (engine.facts, message.salt)
        elif isinstance(message, Lookup):
            engine = self._engines[link]
            engine.lookups[message.lookup] = (engine.meaning, split_keys(message.keys, message.key_bytes))
        elif isinstance(message, Done):
            worker = self._links[link][0] if link in self._links else 0
            for number, outcome in zip(u64(message.jobs).tolist(), u8(message.outcomes).tolist(), strict=True):
                job = self.live.get(number)
                if job is not None and worker in job.expected - job.gone:
                    job.reports.setdefault(worker, Outcome(outcome))
                    if outcome == Outcome.TORN and self.spoiled.isdisjoint(
                        zip(job.slots, job.generations, strict=True)
                    ):
                        raise Broken(f"law 1: load {number:x} finds a slot changed under it: {job.slots}")
        elif isinstance(message, Step):
            self._heard_step(self._engines[link], message)

    def _lost(self, link: int) -> None:
        """A link is over: its client's work is void, its worker's rank is away."""
        engine = self._engines.pop(link, None)
        if engine is not None:
            engine.closed = True
            for job in self.live.values():
                if job.engine is engine and job.ended is None and job.kind == Kind.STORE:
                    self._end(job.job, Outcome.ENGINE_GONE)
        if link in self._links:
            self._stand_up(self._links.pop(link)[0])

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
                self._journal.ask(
                    engine.name, ticket, "{} of blocks {} is asked for", kind.name, all_blocks[start:stop]
                )
        over = set(u64(step.revoked).tolist())
        for ticket in over | set(u64(step.cancelled).tolist()):
            if ticket in engine.wishes:
                engine.wishes[ticket].voided = True
                self._journal.ask(engine.name, ticket, "is revoked or cancelled by its client")
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
            if message.jobs:
                self._said_plan(*self._links[link][:2], message)
        elif isinstance(message, StepAnswer):
            self._said_answer(self._engines[link], message)
        elif isinstance(message, JobsEnded):
            for number, outcome in zip(u64(message.jobs).tolist(), u8(message.outcomes).tolist(), strict=True):
                self._end(number, Outcome(outcome))
        elif isinstance(message, LookupAnswer):
            self._said_hits(self._engines[link], message)
        elif isinstance(message, Attached):
            worker, name, rank = self._links[link]
            self._seats.setdefault(name, {})[rank] = worker
        elif isinstance(message, Refused):
            self._engines.pop(link, None)
            self._links.pop(link, None)
        elif isinstance(message, ResetAnswer):
            self._reset(message.epochs)

    def _reset(self, epochs: dict[str, int]) -> None:
        meanings = set()
        for digest, epoch in ((bytes.fromhex(name)[:16], epoch) for name, epoch in epochs.items()):
            recorded = self._epochs.get(digest, self._epochs.get(ALL, 0))
            if epoch <= recorded:
                raise Broken(f"rule 12: a reset answers epoch {epoch}; on record is {recorded}")
            meanings.add(self._meanings.get(digest))
        for name, (slot, _) in list(self.ready.items()):
            if name[0] in meanings:
                self._doubtful[name] = self.ready.pop(name)
                del self.slots[slot]
        for job in self.live.values():
            if job.kind == Kind.STORE and job.wish.meaning in meanings:
                job.wish.voided = True
                self.tell(job.job, "its namespace is reset")

    def _said_plan(self, worker: int, name: str, plan: Plan) -> None:
        engine = next(engine for engine in self._engines.values() if engine.name == name)
        seats = set(self._seats.get(name, {}).values())
        if len(seats) != len(self._pools) or worker not in seats:
            raise Broken(f"rule 5: a plan for {name} goes to {worker:x}; attached are {seats}")
        if self._is_draining:
            raise Broken(f"drain: {name} is given a plan while the daemon drains")
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
            job = Job(number, ticket, Kind(kind), engine, wish, names, *here, seats)
            self.jobs[number] = self.live[number] = engine.jobs[ticket] = job
            self._journal.name(number, engine.name, ticket)
            self.tell(number, "is accepted as job {:x}: slots {} generations {} blocks {}", number, *here)
            if job.kind == Kind.STORE:
                self._reserve(job)
            else:
                self._pin(job)

    def _reserve(self, job: Job) -> None:
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
                self._evicted.add(old)
            if name in self.ready:
                raise Broken(f"job {job.job:x} stores {name} again, which is held in slot {self.ready[name]}")
            if generation <= max(pool.gen_open[slot] for pool in self._pools):
                raise Broken(f"rule 4: job {job.job:x} does not raise the generation of slot {slot}")
            if name in self.pending:
                raise Broken(f"job {job.job:x} stores {name}, which job {self.pending[name]:x} is storing")
            digest = self._table.digest(slot)
            if self._meanings.setdefault(digest, name[0]) != name[0]:
                raise Broken(f"I8: {name[0]} and {self._meanings[digest]} are one namespace, {digest.hex()}")
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
            if self._plans_seen[number] != self.jobs[number].expected:
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
            self._is_whole(name, slot, generation, f"I1: store {job.job:x} ended OK")
            self.ready[name] = (slot, generation)
            self.slots[slot] = name

    def _bury(self, job: Job, jobs: dict[int, Job]) -> None:
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

    # ---- at any time --------------------------------------------------------------------------------

    def _holds(self, rank: int, pool: PoolFile, slot: int, name: Name, why: str) -> None:
        if not pool.holds(slot, self._stamps.of(name[0], name[1], rank)):
            wanted = self._stamps.text(self._stamps.of(name[0], name[1], rank))
            raise Broken(f"{why}: slot {slot} holds {pool.text(slot, self._stamps)}, not {wanted}")

    def _is_whole(self, name: Name, slot: int, generation: int, why: str) -> None:
        for rank, pool in enumerate(self._pools):
            self._holds(rank, pool, slot, name, why)
            if not pool.gen_open[slot] == pool.gen_close[slot] == generation:
                raise Broken(f"rule 4: {why}; rank {rank}'s header of slot {slot} is open")

    def check_ready(self) -> None:
        """Every READY slot holds its key's stamps on every rank."""
        for slot, name in self.slots.items():
            if self.ready[name] in self.spoiled:
                continue
            for rank, pool in enumerate(self._pools):
                self._holds(rank, pool, slot, name, "I1: READY")

    def check_rest(self) -> None:
        """I6 at the daemon's door: every job has ended and every copy is over."""
        if self._orphans or self.awaited:
            raise Broken(f"I6: of dead daemons: {[f'{job:x}' for job in self._orphans]}, awaited {self.awaited}")
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
