"""Random engines against the core, with a ledger of every byte that a worker would have written.

The ledger knows what each rank's slots hold, who is still touching which slot, and which stores read
blocks that were given away meanwhile. It fails if a plan names a slot that a copy still touches, if a
load would bring other bytes than its keys name, or if a job gets two answers or none.
"""

import random
from dataclasses import dataclass, field

import pytest

from kvferry.proto.columns import spans, u8, u32, u64
from kvferry.proto.hot import JobsEnded, LookupAnswer, Plan, StepAnswer
from kvferry.proto.outcome import Kind, Outcome
from kvferry.scheduler_daemon.core.api import KillWorker, Send

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


class Soak:
    """One seed."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.world = World(
            tp=self.dice.choice([1, 2, 3]), slots=self.dice.choice([3, 8, 20]), job_ns=20 * S, grace_ns=3 * S
        )
        self.players = [
            Player(self.world.engine(name, num_blocks=12, salt=salt), salt.decode())
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
                [self.step, self.lookup, self.word, self.wait, self.worker_dies, self.rotate, self.repeat],
                [30, 15, 50, 3, 2, 1, 2],
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
        worker = player.engine.worker[rank]
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
        engine, worker = player.engine, player.engine.worker[rank]
        self.hear(self.world.lose(engine.worker_link[rank]))
        if self.dice.random() < 0.5:
            self.step(player)
        for copy in self.copies.pop(worker, []):
            self.ended(rank, copy, Outcome.WORKER_DIED)
        self.hear(self.world.reap(worker))
        self.hear(engine.attach(rank))

    def rotate(self, player: Player) -> None:
        player.space = self.dice.choice(["", "other", "third"])
        self.hear(player.engine.rotate(player.space.encode()))
        player.leases.clear()

    def repeat(self, player: Player) -> None:
        self.hear(self.world.send(player.engine.link, player.engine.message(number=1)))

    # ---- the ledger ----------------------------------------------------------------------------------

    def ended(self, rank: int, copy: Copy, outcome: Outcome) -> None:
        if copy.kind is Kind.STORE:
            for slot, name in zip(copy.slots, copy.names, strict=True):
                self.held[rank][slot] = name if outcome is Outcome.OK else GARBAGE

    def hear(self, actions: list) -> None:
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
        busy = {slot: copy for copies in self.copies.values() for copy in copies for slot in copy.slots}
        for ticket, job, kind, (start, stop) in zip(
            u64(plan.tickets).tolist(),
            u64(plan.jobs).tolist(),
            u8(plan.kinds).tolist(),
            spans(plan.counts),
            strict=True,
        ):
            names, named_blocks = player.named[ticket]
            by_block = dict(zip(named_blocks, names, strict=True))
            mine = [f"{player.space}/{by_block[block]}" for block in blocks[start:stop]]
            copy = Copy(player, Kind(kind), job, slots[start:stop], mine, blocks[start:stop])
            if kind == Kind.STORE:
                player.stored[ticket] = set(copy.blocks)
            for slot, name in zip(copy.slots, mine, strict=True):
                if kind == Kind.STORE:
                    other = busy.get(slot)
                    assert other is None or other.job == job, f"slot {slot} is still touched by job {other.job:x}"
                else:
                    assert self.held[rank].get(slot) == name, f"rank {rank} slot {slot} is not {name}"
                    self.loads_checked += 1
            self.copies.setdefault(player.engine.worker[rank], []).append(copy)

    def finish(self) -> None:
        """All workers say their last words: every accepted job has had its one answer."""
        for player in self.players:
            for rank in range(self.world.tp):
                for copy in self.copies.pop(player.engine.worker[rank], []):
                    self.ended(rank, copy, Outcome.OK)
                    self.hear(player.engine.done(rank, copy.job))
            assert not player.job_of, f"tickets {sorted(player.job_of)} were never answered"
        self.hear(self.world.wait(60 * S))
        left = {name: n for name, n in self.world.core.at_rest().items() if n}
        assert not left, f"left at rest: {left}"
        come_to_rest(self.world)


@pytest.mark.parametrize("seed", range(60))
def test_random_engines_never_meet_a_wrong_byte_and_every_job_has_one_answer(seed):
    soak = Soak(seed)
    soak.play(250)
    soak.finish()


def test_the_soak_looks_at_loads_at_all():
    soaks = [Soak(seed) for seed in range(5)]
    for soak in soaks:
        soak.play(250)
    assert sum(soak.loads_checked for soak in soaks) > 50
