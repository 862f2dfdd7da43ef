"""A pool far smaller than the working set: refusals and evictions rise and are counted, errors stay at zero."""

import random

from kvferry.proto.outcome import Outcome, Reason

from .dummy import PAYLOAD, Job


def test_a_pool_of_a_twentieth_of_the_working_set_errs_never(worlds):
    world = worlds(slots=40, tp=2)
    engine = world.engine(num_blocks=64)
    dice = random.Random(1)
    chains = [[f"{chain}.{n}" for n in range(8)] for chain in range(100)]
    flying: list[int] = []
    ticket = hits = 0
    for request in range(1, 600):
        names = dice.choice(chains)
        answer = engine.lookup(request, names)
        hits += answer.hits
        ticket += 2
        loads = (
            [Job(ticket - 1, request, names[: answer.hits], range(answer.hits), answer.lease)] if answer.hits else []
        )
        stores = [Job(ticket, 1000 + request, names, range(10, 18))]
        step = engine.step(stores=stores, loads=loads, ends=[request, 1000 + request])
        flying += [job for job, _, _ in step.by_ticket.values() if job]
        while len(flying) > dice.choice([2, 6]):
            engine.finish(flying.pop(0))
    engine.finish(*flying)
    assert set(engine.ended().values()) == {Outcome.OK}
    counters = world.core.status()["counters"]
    assert hits and counters["keys_evicted"] > 500 and counters["store_keys_refused.POOL_FULL"] > 10
    assert not [name for name in counters if "failed" in name]


def test_one_engines_flood_of_stores_is_refused_and_anothers_loads_are_taken(worlds):
    """Bytes in flight are bounded an engine and direction: a flood is refused by reason before memory grows."""
    world = worlds(slots=64, tp=1, max_in_flight_bytes=4 * PAYLOAD)
    flood, other = world.engine("flood"), world.engine("other", salt=b"x")
    other.hold([1, 2], ticket=1)
    taken = []
    for ticket in range(1, 21):
        answer = flood.step(stores=[Job(ticket, ticket, [ticket], [ticket])])
        taken.append(answer.accepted(ticket))
        assert answer.reason(ticket) is (Reason.NONE if ticket <= 4 else Reason.BUSY)
    assert sum(taken) == 4 and world.count("store_keys_refused.BUSY") == 16
    load = other.load(2, 2, [1, 2], [10, 11])
    store = other.store(3, 3, [3], [3])
    assert load and store
    other.finish(load, store)
    assert flood.ended() == {} and set(other.ended().values()) == {Outcome.OK}
    flood.finish(*[job.id for job in world.core._desk.jobs])
