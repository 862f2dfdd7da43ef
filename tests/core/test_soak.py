"""Random engines against the core, with a ledger of every byte that a worker would have written.

The ledger knows what each rank's slots hold, who is still touching which slot, and which stores read
blocks that were given away meanwhile. It fails if a plan names a slot that a copy still touches, if a
load would bring other bytes than its keys name, or if a job gets two answers or none.

The daemon dies too, at any moment, within an event as well: then any part of what that event wrote to the
table may have reached it, word by word, and nothing that it wanted to say was said. The ledger, the workers
and their running copies live on; the next daemon must know nothing that the ledger does not hold.
"""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvferry.proto.columns import spans, u8, u32, u64
from kvferry.proto.control import DrainAsk, RanksChanged, Registered, ResetAnswer, ResetAsk
from kvferry.proto.hot import JobsEnded, LookupAnswer, Plan, StepAnswer
from kvferry.proto.outcome import Kind, Outcome
from kvferry.scheduler_daemon.core.api import KillWorker, Send, WorkersListed
from kvferry.scheduler_daemon.core.slots import Table

from .dummy import Answer, Engine, Job, S, World, come_to_rest

GARBAGE = "garbage"


@dataclass
class Copy:
    """One rank's part of one job."""

    engine: "Player"
    kind: Kind
    job: int
    slots: list[int]
    names: list[str]
    blocks: list[int]


@dataclass
class Player:
    """One engine of the soak."""

    engine: Engine
    space: str
    ticket: int = 0
    request: int = 0
    live: list[int] = field(default_factory=list)
    named: dict[int, tuple[list[str], list[int]]] = field(default_factory=dict)  # ticket -> keys, blocks
    job_of: dict[int, int] = field(default_factory=dict)  # ticket -> job, unanswered
    answered: set[int] = field(default_factory=set)
    stored: dict[int, set[int]] = field(default_factory=dict)  # ticket of a store -> blocks it copies
    given: dict[int, set[int]] = field(default_factory=dict)  # ticket -> its blocks that were given away
    revoked: set[int] = field(default_factory=set)
    leases: list[tuple[int, int, list[str]]] = field(default_factory=list)
    salt: bytes = b""


class Soak:
    """One seed."""

    def __init__(self, seed: int, *, crashes: bool = False) -> None:
        self.dice = random.Random(seed)
        self.world = World(
            tp=self.dice.choice([1, 2, 3]), slots=self.dice.choice([3, 8, 20]), job_ns=20 * S, grace_ns=3 * S
        )
        self.crashes = crashes
        self.num_crashes = self.num_recovered = self.num_torn = 0
        self.epoch: dict[str, int] = {}  # of each space that was ever reset alone since ...
        self.generations: dict[int, int] = {}  # ever given -> to which job
        self.least = 0  # ... all were, to this one
        self.digest: dict[bytes, str] = {}  # namespace -> space
        self.unheard: dict[int, list[tuple[int, Copy]]] = {}  # worker that no daemon hears -> rank, copy it still does
        self.players = [
            Player(self.world.engine(name, num_blocks=12, salt=salt), salt.decode(), salt=salt)
            for name, salt in (("a", b""), ("b", b""), ("c", b"other"))[: self.dice.choice([1, 2, 3])]
        ]
        self.held: list[dict[int, str]] = [{} for _ in range(self.world.tp)]  # rank -> slot -> what it holds
        self.copies: dict[int, list[Copy]] = {}  # worker -> what it still touches
        self.loads_checked = 0

    # ---- moves ---------------------------------------------------------------------------------------

    def play(self, moves: int) -> None:
        for _ in range(moves):
            player = self.dice.choice(self.players)
            move = self.dice.choices(
                [
                    *[self.step, self.lookup, self.word, self.wait, self.worker_dies, self.rotate, self.repeat],
                    *[self.reset, self.relink, self.drain, self.crash, self.run_on, self.come_back],
                ],
                [30, 15, 50, 3, 2, 1, 2, 1, 1, 1, 3 if self.crashes else 0, 10, 10],
            )[0]
            move(player)

    def chain(self) -> list[str]:
        family = self.dice.choice("xyz")
        return [f"{family}{n}" for n in range(self.dice.randint(1, 5))]

    def step(self, player: Player) -> None:
        dice, stores, loads = self.dice, [], []
        for _ in range(dice.randint(0, 3)):
            if not player.live or dice.random() < 0.5:
                player.request += 1
                player.live.append(player.request)
            names = self.chain()
            player.ticket += 1
            blocks = dice.sample(range(12), len(names))
            stores.append(Job(player.ticket, dice.choice(player.live), names, blocks))
            player.named[player.ticket] = names, blocks
        if player.leases and dice.random() < 0.7:
            lease, request, names = player.leases.pop(dice.randrange(len(player.leases)))
            player.ticket += 1
            blocks = dice.sample(range(12), len(names))
            loads.append(Job(player.ticket, request, names, blocks, lease if dice.random() < 0.8 else 0))
            player.named[player.ticket] = names, blocks
        ends = [player.live.pop(dice.randrange(len(player.live)))] if player.live and dice.random() < 0.4 else []
        written = [dice.randrange(13) for _ in range(dice.randint(0, 2))] if dice.random() < 0.3 else []
        known = list(player.job_of)
        revoked = [dice.choice(known)] if known and dice.random() < 0.1 else []
        cancelled = [dice.choice(known)] if known and dice.random() < 0.1 else []
        message = player.engine.message(
            stores=stores, loads=loads, ends=ends, written=written, revoked=revoked, cancelled=cancelled
        )
        taken = {*written, *(block for load in loads for block in load.blocks)}
        fresh = {store.ticket for store in stores}
        for ticket in [*player.job_of, *fresh]:
            player.given.setdefault(ticket, set()).update(taken & set(player.named[ticket][1]))
        player.revoked.update(revoked)
        self.hear(self.world.send(player.engine.link, message))

    def lookup(self, player: Player) -> None:
        names = self.chain()
        player.request += 1
        player.live.append(player.request)
        answer: LookupAnswer = player.engine.lookup(player.request, names)
        if answer.hits:
            player.leases.append((answer.lease, player.request, names[: answer.hits]))

    def word(self, player: Player) -> None:
        """A worker ends one of its copies, well or badly; now and then it says so twice."""
        rank = self.dice.randrange(self.world.tp)
        worker = player.engine.worker.get(rank, 0)
        copies = self.copies.get(worker, [])
        if not copies:
            return
        copy = copies.pop(self.dice.randrange(len(copies)))
        bad = [Outcome.COPY_FAILED, Outcome.CANCELLED, Outcome.REVOKED, Outcome.TORN]
        outcome = Outcome.OK if self.dice.random() < 0.85 else self.dice.choice(bad)
        self.ended(rank, copy, outcome)
        for _ in range(1 + (self.dice.random() < 0.1)):
            self.hear(player.engine.done(rank, copy.job, outcome=outcome))

    def wait(self, player: Player) -> None:
        self.hear(self.world.wait(self.dice.choice([1, 5, 11]) * S))

    def worker_dies(self, player: Player) -> None:
        self.kill(player, self.dice.randrange(self.world.tp))

    def kill(self, player: Player, rank: int) -> None:
        engine, worker = player.engine, player.engine.worker.get(rank, 0)
        if not worker or worker in self.unheard:
            return
        self.hear(self.world.lose(engine.worker_link[rank]))
        if self.dice.random() < 0.5:
            self.step(player)
        for copy in self.copies.pop(worker, []):
            self.ended(rank, copy, Outcome.WORKER_DIED)
        self.hear(self.world.reap(worker))
        self.hear(engine.attach(rank))

    def rotate(self, player: Player) -> None:
        player.space = self.dice.choice(["", "other", "third"])
        player.salt = player.space.encode()
        self.hear(player.engine.rotate(player.salt))
        player.leases.clear()

    def reset(self, player: Player) -> None:
        """An operator forgets one namespace, or all. The daemon may die just when the epochs are on record."""
        before = self.world.table.copy()
        names = {player.space: self.name_of(player), "*": "*"}
        space = self.dice.choice([player.space, "*"])
        if not names[space]:
            return
        actions = self.world.send(self.world.open("admin"), ResetAsk(namespace=names[space]))
        if any(isinstance(action, Send) and isinstance(action.message, ResetAnswer) for action in actions):
            if space == "*":
                self.least = max([self.least, *self.epoch.values()]) + 1
                self.epoch.clear()
            else:
                self.epoch[space] = self.epoch_of(space) + 1
        if self.crashes and self.dice.random() < 0.3:
            self.next_daemon(before)
        else:
            self.hear(actions)

    def epoch_of(self, space: str) -> int:
        return self.epoch.get(space, self.least)

    def name_of(self, player: Player) -> str:
        engines = self.world.core.status()["engines"]
        [name] = [e["namespace"] for e in engines if e["engine_id"] == player.engine.name] or [""]
        return str(name)

    def drain(self, player: Player) -> None:
        self.hear(self.world.send(self.world.open("admin"), DrainAsk(budget_ms=self.dice.choice([0, 5000]))))
        self.step(player)
        self.wait(player)
        self.hear(self.world.send(self.world.open("admin"), DrainAsk(resume=True)))

    # ---- workers that no daemon hears, and daemons after daemons ---------------------------------------

    def relink(self, player: Player) -> None:
        """A worker's link breaks, and neither it nor its daemon dies."""
        rank = self.dice.randrange(self.world.tp)
        worker = player.engine.worker.get(rank, 0)
        if worker and worker not in self.unheard:
            if self.dice.random() < 0.7:
                self.hear(self.world.lose(player.engine.worker_link[rank]))
            self.out_of_hearing(worker, rank)

    def out_of_hearing(self, worker: int, rank: int) -> None:
        """What it has begun runs on, the rest is dropped."""
        copies = self.copies.pop(worker, [])
        self.unheard[worker] = [(rank, copy) for copy in copies if self.dice.random() < 0.6]

    def run_on(self, player: Player) -> None:
        """One copy ends that no daemon hears of: its bytes are written all the same, whole or in part."""
        running = [worker for worker, copies in self.unheard.items() if copies]
        if running:
            rank, copy = self.unheard[self.dice.choice(running)].pop()
            self.ended(rank, copy, self.dice.choice([Outcome.OK, Outcome.CANCELLED]))

    def come_back(self, player: Player) -> None:
        """A worker that nobody heard drains and attaches anew, or dies."""
        for rank, worker in list(player.engine.worker.items()):
            if worker in self.unheard and self.dice.random() < 0.6:
                for _, copy in self.unheard.pop(worker):
                    self.ended(rank, copy, self.dice.choice([Outcome.OK, Outcome.CANCELLED]))
                if self.dice.random() < 0.3:
                    self.hear(self.world.reap(worker))
                    self.hear(player.engine.attach(rank))
                else:
                    kept = list(self.world.said)
                    link = self.world.drained(worker)
                    self.hear(self.world.said[len(kept) :])
                    self.hear(player.engine.attach(rank, worker=worker, link=link))

    def crash(self, player: Player) -> None:
        """The daemon dies between two events, or within one."""
        if self.dice.random() < 0.3 or self.world.table is None:
            self.next_daemon(self.world.table)
            return
        before, said = self.world.table.copy(), self.hear
        self.hear = lambda actions: None  # type: ignore[method-assign]
        state = {p.engine.name: (dict(p.job_of), set(p.revoked)) for p in self.players}
        copies = {worker: list(c) for worker, c in self.copies.items()}
        for _ in range(self.dice.choice([1, 2, 4])):
            if self.dice.random() < 0.7:
                self.step(player)
            elif copies:
                # A worker's word is taken, and the daemon dies over it: its copies are over all the same.
                self.word(player)
        self.hear = said  # type: ignore[method-assign]
        for p in self.players:
            p.job_of, p.revoked = state[p.engine.name]
        after = self.world.table
        torn = before.copy()
        words, new = (t.view(np.uint64).reshape(len(t), -1) for t in (torn, after))
        for slot in np.flatnonzero((words != new).any(axis=1)).tolist():
            how = self.dice.random()
            part = np.array([self.dice.random() < 0.5 for _ in range(words.shape[1])])
            words[slot][part if how < 0.6 else slice(None)] = new[slot][part if how < 0.6 else slice(None)]
            if how > 0.8:
                words[slot] = before.view(np.uint64).reshape(len(before), -1)[slot]
            self.num_torn += 1
        self.next_daemon(torn)

    def next_daemon(self, table: Table | None) -> None:
        """Everything that the daemon knew is gone but the table; workers and their copies live on."""
        self.num_crashes += 1
        workers = {worker: rank for p in self.players for rank, worker in p.engine.worker.items()}
        for worker, rank in workers.items():
            if worker not in self.unheard:
                self.out_of_hearing(worker, rank)
        late = self.dice.random() < 0.3
        self.world = self.world.restart(None if late else list(workers), None if table is None else table.copy())
        self.check_all_keys()
        for player in self.players:
            old = player.engine
            player.engine = Engine(self.world, old.name, num_blocks=12, salt=player.salt)
            player.engine.worker = dict(old.worker)
            player.job_of.clear()
            player.leases.clear()
            player.revoked.clear()
            self.hear(player.engine.register())
        if late:
            self.step(self.dice.choice(self.players))
            self.hear(self.world.step(WorkersListed(tuple(workers))))

    def check_all_keys(self) -> None:
        """The property: no key is served whose slot does not hold its bytes, on every rank."""
        for space in self.world.core._desk.namespaces:
            for index in space.groups:
                for entry in index:
                    if entry.job:
                        continue
                    self.num_recovered += 1
                    assert space.digest in self.digest, "a namespace that never was"
                    label = self.digest[space.digest]
                    name = f"{label}@{self.epoch_of(label)}/{entry.key[1:].rstrip(b'.').decode()}"
                    for rank in range(self.world.tp):
                        found = self.held[rank].get(entry.slot)
                        assert found == name, f"rank {rank} slot {entry.slot} holds {found}, its key says {name}"

    def repeat(self, player: Player) -> None:
        self.hear(self.world.send(player.engine.link, player.engine.message(number=1)))

    # ---- the ledger ----------------------------------------------------------------------------------

    def ended(self, rank: int, copy: Copy, outcome: Outcome) -> None:
        if copy.kind is Kind.LOAD:
            for slot, name in zip(copy.slots, copy.names, strict=True):
                assert self.held[rank].get(slot) == name, f"slot {slot} changed under a load"
        if copy.kind is Kind.STORE:
            for slot, name in zip(copy.slots, copy.names, strict=True):
                self.held[rank][slot] = name if outcome is Outcome.OK else GARBAGE

    def hear(self, actions: list) -> None:
        for engine in self.world.core.status()["engines"]:
            for player in self.players:
                if engine["namespace"] and engine["engine_id"] == player.engine.name:
                    self.digest[bytes.fromhex(engine["namespace"])[:16]] = player.space
        for action in actions:
            if isinstance(action, KillWorker):
                for player in self.players:
                    for rank, worker in list(player.engine.worker.items()):
                        if worker == action.worker:
                            self.kill(player, rank)
            if not isinstance(action, Send):
                continue
            for player in self.players:
                if action.link == player.engine.link:
                    self.to_client(player, action.message)
                for rank, link in player.engine.worker_link.items():
                    if action.link == link and isinstance(action.message, Plan):
                        self.planned(player, rank, action.message)

    def to_client(self, player: Player, message: object) -> None:
        if isinstance(message, RanksChanged | Registered):
            player.engine.epoch = message.epoch
        if isinstance(message, StepAnswer):
            for ticket, (job, _, _) in Answer(message).by_ticket.items():
                if job and ticket not in player.answered:
                    player.job_of[ticket] = job
        elif isinstance(message, JobsEnded):
            for ticket, value in zip(u64(message.tickets).tolist(), u8(message.outcomes).tolist(), strict=True):
                assert ticket in player.job_of, f"ticket {ticket} was answered twice or never accepted"
                del player.job_of[ticket]
                player.answered.add(ticket)
                if value == Outcome.OK and ticket in player.stored:
                    assert ticket not in player.revoked, f"ticket {ticket} was published though revoked"
                    lost = player.stored[ticket] & player.given.get(ticket, set())
                    assert not lost, f"ticket {ticket} was published though blocks {lost} were given away"

    def planned(self, player: Player, rank: int, plan: Plan) -> None:
        slots, blocks = u32(plan.slots).tolist(), u32(plan.blocks).tolist()
        running = [*self.copies.values(), *([copy for _, copy in copies] for copies in self.unheard.values())]
        busy = {slot: copy for copies in running for copy in copies for slot in copy.slots}
        for ticket, job, kind, (start, stop) in zip(
            u64(plan.tickets).tolist(),
            u64(plan.jobs).tolist(),
            u8(plan.kinds).tolist(),
            spans(plan.counts),
            strict=True,
        ):
            names, named_blocks = player.named[ticket]
            by_block = dict(zip(named_blocks, names, strict=True))
            epoch = self.epoch_of(player.space)
            mine = [f"{player.space}@{epoch}/{by_block[block]}" for block in blocks[start:stop]]
            copy = Copy(player, Kind(kind), job, slots[start:stop], mine, blocks[start:stop])
            if kind == Kind.STORE:
                player.stored[ticket] = set(copy.blocks)
                for generation in u64(plan.generations)[start:stop].tolist():
                    other_job = self.generations.setdefault(generation, job)
                    assert other_job == job, f"generation {generation} was given to job {other_job:x} too"
            for slot, name in zip(copy.slots, mine, strict=True):
                if kind == Kind.STORE:
                    other = busy.get(slot)
                    assert other is None or other.job == job, f"slot {slot} is still touched by job {other.job:x}"
                else:
                    assert self.held[rank].get(slot) == name, f"rank {rank} slot {slot} is not {name}"
                    self.loads_checked += 1
            if player.engine.worker[rank] not in self.unheard:  # else it never gets this plan
                self.copies.setdefault(player.engine.worker[rank], []).append(copy)

    def finish(self) -> None:
        """All workers say their last words: every accepted job has had its one answer."""
        self.check_all_keys()
        while self.unheard:
            for player in self.players:
                self.come_back(player)
        for player in self.players:
            for rank in range(self.world.tp):
                for copy in self.copies.pop(player.engine.worker[rank], []):
                    self.ended(rank, copy, Outcome.OK)
                    self.hear(player.engine.done(rank, copy.job))
            assert not player.job_of, f"tickets {sorted(player.job_of)} were never answered"
        self.hear(self.world.wait(60 * S))
        left = {name: n for name, n in self.world.core.at_rest().items() if n}
        assert not left, f"left at rest: {left}"
        self.check_all_keys()
        come_to_rest(self.world)


@pytest.mark.parametrize("seed", range(60))
def test_random_engines_never_meet_a_wrong_byte_and_every_job_has_one_answer(seed):
    soak = Soak(seed)
    soak.play(250)
    soak.finish()


@pytest.mark.parametrize("seed", range(60))
def test_after_any_crash_no_key_is_served_whose_slot_does_not_hold_its_bytes(seed):
    """Random histories, daemons that die between and within events, torn records, workers that outlive them."""
    soak = Soak(seed, crashes=True)
    soak.play(250)
    soak.finish()


def test_the_soak_looks_at_loads_at_all():
    soaks = [Soak(seed) for seed in range(5)]
    for soak in soaks:
        soak.play(250)
    assert sum(soak.loads_checked for soak in soaks) > 50


def test_the_crashing_soak_crashes_tears_and_recovers():
    soaks = [Soak(seed, crashes=True) for seed in range(12)]
    for soak in soaks:
        soak.play(250)
    assert sum(soak.num_crashes for soak in soaks) > 10
    assert sum(soak.num_torn for soak in soaks) > 10
    assert sum(soak.num_recovered for soak in soaks) > 50
    assert sum(soak.loads_checked for soak in soaks) > 20
