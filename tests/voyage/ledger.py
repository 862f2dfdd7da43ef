"""What was promised at the daemon's door, kept apart from the daemon's own books.

The ledger sees each event that goes into the daemon core and each action that comes out, and what the
workers' copiers touch. From these alone it says what must be so, and raises `Broken` where it is not:

    I1  a store that ends OK has put its keys' stamps into its slots, on every rank; a load plan names such slots
    I2  a job ends in the very step that brings its last expected rank's report, and lookups see it from then on
    I3  a store met by a write without a revoke is named in `wait_for` and never ends OK
    I4  each accepted job ends once; a load that failed ends after every rank's word; a deadline is no word
    law 1  a slot goes into a new plan only when every earlier copy that touches it is known to be over
    I7  an engine's or a worker's death is a cause for its own jobs only; nobody's link is closed for another's message
    I8  nothing is hit or loaded that was stored under another meaning
    crash    a daemon's death takes what was in flight, as a whole, and a torn record; every other READY key is
             served by the next boot, and nothing else is
    rule 10  no store is planned before each worker that outlived the last daemon has drained or is dead
    rule 12  after a reset nothing of the old epoch is served, by no later boot either
"""

from collections.abc import Iterable
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
from kvferry.proto.outcome import Kind, Outcome
from kvferry.scheduler_daemon.core.api import CloseLink, KeepEpochs, KillWorker, LinkLost, Received, Send, WorkersListed
from kvferry.scheduler_daemon.core.namespaces import ALL

from .answers import check_answer, check_hits
from .books import Books, Broken, Engine, Job, Name, Wish
from .journal import Journal
from .memory import PoolFile, Stamps
from .table import TableBytes


class Ledger(Books):
    """The second book, kept at the daemon's door: who is there, what they asked, what they were told."""

    def __init__(self, stamps: Stamps, pools: list[PoolFile], table: TableBytes, journal: Journal) -> None:
        super().__init__(stamps, pools, table, journal)
        self.hits = self.refusals = 0
        self.num_recovered = self.num_torn = self.num_lost = 0
        self.just_ended = False  # some job ended in the present step
        self.plans_seen: dict[int, set[int]] = {}  # job -> workers that were sent it
        self._doubtful: dict[Name, tuple[int, int]] = {}  # reset, and the new epoch is not on record yet
        self._epochs: dict[bytes, int] = {}  # on record
        self._boot = 0
        self._is_draining = False
        self._engines: dict[int, Engine] = {}
        self._seats: dict[str, dict[int, int]] = {}  # engine -> rank -> worker that is attached
        self._links: dict[int, tuple[int, str, int]] = {}  # link -> (worker, engine, rank), asked for
        self._doomed: set[int] = set()  # workers that the daemon has wanted dead

    # ---- boots of the daemon ------------------------------------------------------------------------

    def daemon_starts(self, boot: int) -> None:
        """A daemon has read what the last one left."""
        self._boot = boot

    def daemon_died(self, torn: int | None, unsure: set[int]) -> None:
        """Nothing of this boot goes on but copies; what is held is what the table says, and must be what was promised.

        `torn`: the slot whose record is broken. `unsure`: slots whose records the daemon was changing; what it was
        about to publish may be held, what it was about to give away may be gone.
        """
        self.journal.everybody("the daemon dies", self.live)
        self.num_lost += sum(job.ended is None for job in self.live.values())
        for job in self.live.values():
            job.ended = job.ended or Outcome.CANCELLED
        self.orphans |= self.live
        self.live = {}
        for job in [job for job in self.orphans.values() if job.copies_over]:
            self.bury(job, self.orphans)
        self._engines, self._seats, self._links, self.pending = {}, {}, {}, {}
        self._is_draining = False
        self._epochs = self.table.epochs()
        found: dict[Name, tuple[int, int]] = {}
        for digest, key, slot, generation in self.table.ready():
            if digest not in self.meanings:
                raise Broken(f"crash: slot {slot} is READY under a namespace that nobody stored in")
            name = (self.meanings[digest], key)
            promised = self.ready.get(name) or self._doubtful.get(name)
            if promised is None and slot in unsure:
                self.check_whole(name, slot, generation, "crash: published amid the daemon's death")
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
        self.let_go(worker, "is reaped")
        self._stand_up(worker)

    def _stand_up(self, worker: int) -> None:
        for seats in self._seats.values():
            for rank in [rank for rank, seated in seats.items() if seated == worker]:
                del seats[rank]

    # ---- the daemon's door: what it hears -----------------------------------------------------------

    def saw(self, event: Any, actions: list[Any]) -> None:
        """One step of the daemon core has been made."""
        if isinstance(event, Received):
            self._heard(event.link, event.message)
        elif isinstance(event, LinkLost):
            self._lost(event.link)
        elif isinstance(event, WorkersListed):
            self.awaited = set(event.workers)
        for action in actions:
            if isinstance(action, CloseLink) and not (isinstance(event, Received) and event.link == action.link):
                raise Broken(f"I7: link {action.link:x} is closed, and another one brought {event}")
            if isinstance(action, KillWorker):
                self._doomed.add(action.worker)
        said = [action for action in actions if isinstance(action, Send)]
        self.just_ended = any(isinstance(action.message, JobsEnded) for action in said)
        self.evicted.clear()
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
                self.bury(job, self.live)
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
                self.let_go(message.worker, "has drained")
                self._stand_up(message.worker)
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
                    self.end(job.job, Outcome.ENGINE_GONE)
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
                self.journal.ask(engine.name, ticket, "{} of blocks {} is asked for", kind.name, all_blocks[start:stop])
        over = set(u64(step.revoked).tolist())
        for ticket in over | set(u64(step.cancelled).tolist()):
            if ticket in engine.wishes:
                engine.wishes[ticket].voided = True
                self.journal.ask(engine.name, ticket, "is revoked or cancelled by its client")
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

    # ---- the daemon's door: what it says ------------------------------------------------------------

    def _said(self, link: int, message: Any) -> None:
        if isinstance(message, Plan):
            if message.jobs:
                self._said_plan(*self._links[link][:2], message)
        elif isinstance(message, StepAnswer):
            check_answer(self, self._engines[link], message)
        elif isinstance(message, JobsEnded):
            for number, outcome in zip(u64(message.jobs).tolist(), u8(message.outcomes).tolist(), strict=True):
                self._check_cause(self.jobs.get(number), Outcome(outcome))
                self.end(number, Outcome(outcome))
        elif isinstance(message, LookupAnswer):
            check_hits(self, self._engines[link], message)
        elif isinstance(message, Attached):
            worker, name, rank = self._links[link]
            self._seats.setdefault(name, {})[rank] = worker
        elif isinstance(message, Refused):
            self._engines.pop(link, None)
            self._links.pop(link, None)
        elif isinstance(message, ResetAnswer):
            self._reset(message.epochs)

    def _check_cause(self, job: Job | None, outcome: Outcome) -> None:
        """A death is a cause for the jobs of the dead alone."""
        if job is None:
            return
        what = f"{job.kind.name.lower()} {job.job:x} of {job.engine.name} ended {outcome.name}"
        if outcome == Outcome.ENGINE_GONE and not job.engine.closed and outcome not in job.reports.values():
            raise Broken(f"I7: {what}, and that engine lives")
        if outcome == Outcome.WORKER_DIED:
            seated = set(self._seats.get(job.engine.name, {}).values())
            if job.expected <= seated - self._doomed:
                raise Broken(f"I7: {what}, and all its workers serve: {[f'{worker:x}' for worker in job.expected]}")

    def _reset(self, epochs: dict[str, int]) -> None:
        meanings = set()
        for digest, epoch in ((bytes.fromhex(name)[:16], epoch) for name, epoch in epochs.items()):
            recorded = self._epochs.get(digest, self._epochs.get(ALL, 0))
            if epoch <= recorded:
                raise Broken(f"rule 12: a reset answers epoch {epoch}; on record is {recorded}")
            meanings.add(self.meanings.get(digest))
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
        if len(seats) != len(self.pools) or worker not in seats:
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
            seen = self.plans_seen.setdefault(number, set())
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
            self.journal.name(number, engine.name, ticket)
            self.tell(number, "is accepted as job {:x}: slots {} generations {} blocks {}", number, *here)
            if job.kind == Kind.STORE:
                self.reserve(job)
            else:
                self.pin(job)

    # ---- at the end ---------------------------------------------------------------------------------

    def check_rest(self) -> None:
        """I6 at the daemon's door: every job has ended and every copy is over."""
        if self.orphans or self.awaited:
            raise Broken(f"I6: of dead daemons: {[f'{job:x}' for job in self.orphans]}, awaited {self.awaited}")
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
