"""Any well-formed message from anyone at any time: an answer by name, all sums still right, never an exception."""

import random
from typing import Any

import pytest

from kvferry.proto.codec import MESSAGES, pack
from kvferry.proto.columns import pack_u8, pack_u32, pack_u64
from kvferry.proto.control import (
    Attach,
    DrainAsk,
    Drained,
    Goodbye,
    Hello,
    RankGone,
    Register,
    ResetAsk,
    Rotate,
    StatusAsk,
)
from kvferry.proto.hot import Done, Lookup, Renew
from kvferry.scheduler_daemon.core.api import DrainBegun, Send, WorkersListed

from .dummy import Engine, Job, S, come_to_rest

OF_ROLE: dict[str, list[Any]] = {
    "client": ["step", "step", "step", Lookup, Lookup, Renew, Rotate],
    "worker": [Done, Done, Done, Done, RankGone, Attach, Drained],
    "admin": [StatusAsk, ResetAsk, DrainAsk],
    "anyone": [
        *[Hello, Register, Attach, Lookup, "step", Renew, Done, RankGone, Rotate, Goodbye, StatusAsk],
        *[Drained, ResetAsk, DrainAsk],
    ],
}


def any_message(dice: random.Random, engine: Any, role: str) -> Any:
    few = [dice.randrange(6) for _ in range(dice.randrange(5))]
    names = [dice.randrange(9) for _ in range(dice.randrange(6))]
    kind = dice.choice(OF_ROLE[role])
    if kind is Hello:
        return Hello(role=dice.choice(["client", "worker", "admin"]), pid=dice.randrange(3))
    if kind is Register:
        return Register(
            engine_id=dice.choice("ef"),
            world_size=dice.choice([1, 2, 2, 2]),
            key_bytes=dice.choice([8, 8, 8, 32]),
            num_blocks=dice.choice([1, 20]),
            block_tokens=dice.choice([16, 16, 8]),
        )
    if kind is Attach:
        return Attach(
            worker=dice.randrange(1, 8),
            engine_id=dice.choice("ef"),
            rank=dice.randrange(3),
            world_size=2,
            layout_digest=dice.choice("xy"),
            payload_bytes=dice.choice([(4096,), (4096,), (9000,), (1, 2), ()]),
            block_tokens=dice.choice([(16,), (16,), ()]),
            num_blocks=dice.choice([10, 20]),
            pool_bytes=dice.choice([0, 50_000]),
        )
    if kind is Lookup:
        return Lookup(
            lookup=dice.randrange(9),
            request=dice.randrange(6),
            epoch=dice.choice([0, 0, 0, 1]),
            group=dice.choice([0, 0, 0, 5]),
            key_bytes=8,
            keys=b"".join(Job(1, 1, names, []).keys),
        )
    if kind is Drained:
        return Drained(worker=dice.choice([*range(1, 8), 101, 102]), boot=dice.choice([0xB007, 0xB007, 1]))
    if kind is ResetAsk:
        return ResetAsk(namespace=dice.choice(["*", "", "0", "f"]))
    if kind is DrainAsk:
        return DrainAsk(budget_ms=dice.choice([0, 1000]), resume=dice.random() < 0.7)
    if kind is Renew:
        return Renew(leases=pack_u64(few))
    if kind is Done:
        jobs = [dice.choice([0, dice.randrange(1 << 64), *((0xB007 << 40) | n for n in range(1, 30))]) for _ in few]
        return Done(jobs=pack_u64(jobs), outcomes=pack_u8([dice.randrange(13) for _ in few]), copy_us=pack_u32(few))
    if kind == "step":
        stores, loads = (
            [
                Job(
                    dice.randrange(200),
                    dice.randrange(6),
                    some := [dice.randrange(9) for _ in range(dice.randrange(5))],
                    [dice.randrange(25) for _ in some],
                    lease=dice.randrange(5),
                    group=dice.choice([0, 0, 0, 0, 1]),
                )
                for _ in range(dice.randrange(4))
            ]
            for _ in range(2)
        )
        return engine.message(
            stores=stores,
            loads=loads,
            ends=few,
            written=[dice.choice([n, 1 << 31]) for n in few],
            revoked=[dice.randrange(200) for _ in few],
            cancelled=[dice.randrange(200) for _ in few],
            released=few,
            number=dice.randrange(60),
            epoch=dice.choice([0, 0, 0, 0, 1]),
        )
    return kind(salt=b"s") if kind is Rotate else kind()


@pytest.mark.parametrize("seed", range(20))
def test_nor_does_one_to_a_daemon_that_came_after_another(worlds, seed):
    """Whatever state the last one died in, and whoever of its peers speaks first."""
    dice = random.Random(1000 + seed)
    world = worlds(slots=dice.choice([4, 12]), job_ns=5 * S, grace_ns=S)
    engine = world.engine(num_blocks=20)
    for _ in range(3):
        for _ in range(40):
            link, role = dice.choice([(engine.link, "client"), *((n, "worker") for n in engine.worker_link.values())])
            world.send(link, any_message(dice, engine, role))
        listed = list(engine.worker.values())
        world = world.restart(dice.choice([None, [], listed, [*listed, 999]]))
        engine = Engine(world, "e", num_blocks=20)
        for who in dice.sample(["client", 0, 1], 3):
            engine.register() if who == "client" else engine.attach(who)
    world.step(WorkersListed(()))
    for worker in range(1, 8):
        world.reap(worker)
    come_to_rest(world)


@pytest.mark.parametrize("seed", range(60))
def test_no_message_at_any_time_breaks_a_sum_or_raises(worlds, seed):
    dice = random.Random(seed)
    in_flight = dice.choice([1, 1 << 30])
    world = worlds(slots=dice.choice([1, 4, 12]), job_ns=5 * S, grace_ns=S, max_in_flight_bytes=in_flight)
    engine = world.engine(num_blocks=20)
    sound = [(engine.link, "client"), *((link, "worker") for link in engine.worker_link.values())]
    for _ in range(150):
        roll = dice.random()
        if roll < 0.01:
            dice.choice(
                [
                    lambda: world.step(WorkersListed((1, 2, 101))),
                    lambda: world.step(DrainBegun(S)),
                ]
            )()
        elif roll < 0.02:
            world.reap(dice.choice([*range(1, 8), 101, 102]))
        elif roll < 0.03:
            world.lose(dice.randrange(1, world._links + 1))
        elif roll < 0.07:
            world.wait(dice.choice([1, 3]) * S)
        elif roll < 0.12:
            role = dice.choice(["client", "worker", "admin"])
            sound.append((world.open(role), role))
        else:
            link, role = dice.choice(sound)
            world.send(link, any_message(dice, engine, role if dice.random() < 0.95 else "anyone"))
    for action in world.said:
        if isinstance(action, Send):
            pack(action.message)  # whatever was said can be said on the wire
            assert action.message.TAG in MESSAGES
    for worker in range(1, 8):
        world.reap(worker)
