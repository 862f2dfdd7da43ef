"""What the daemon says of itself, and the sums that must hold at any moment and at rest."""

from typing import Any

from kvferry.proto.outcome import Kind, Outcome
from kvferry.scheduler_daemon.core.desk import Desk
from kvferry.scheduler_daemon.core.engines import Session, half
from kvferry.scheduler_daemon.core.jobs import State
from kvferry.scheduler_daemon.core.slots import SlotState

REFUSED_FOR_NS = 60_000_000_000  # a refusal is told for so long: who is refused tries again every ten seconds
MAX_REFUSED = 16  # that are told, the latest


def _sessions(desk: Desk) -> list[Session]:
    """Open ones, and closed ones whose jobs still wait for words."""
    found = {id(session): session for session in desk.sessions.values()}
    found.update({id(job.session): job.session for job in desk.jobs})
    return list(found.values())


def _refused(desk: Desk) -> list[dict[str, Any]]:
    """Who tried to register of late and was turned down, and has not got in since."""
    since_ns = desk.now_ns - REFUSED_FOR_NS
    found = [(at_ns, who, error) for who, (error, at_ns) in desk.noted.items() if at_ns >= since_ns]
    found.sort(key=lambda one: one[0])
    return [
        {
            "engine_id": engine_id,
            "half": half(rank),
            "code": error.code,
            "text": error.text,
            "ago_s": (desk.now_ns - at_ns) // 1_000_000_000,
        }
        for at_ns, (engine_id, rank), error in found[-MAX_REFUSED:]
    ]


def status(desk: Desk) -> dict[str, Any]:
    """Gauges and counters as plain JSON types."""
    pool = desk.pool
    oldest = min((job.accepted_ns for job in desk.jobs), default=None)
    return {
        "boot": f"{desk.settings.boot:016x}",
        "tp_size": desk.settings.tp_size,
        "engines": [
            {
                "engine_id": engine.id,
                "registered": engine.session is not None,
                "attached": engine.num_attached,
                "world_size": engine.world_size,
                "namespace": engine.namespace.name if engine.namespace is not None else "",
                "in_flight_bytes": sum(engine.session.in_flight_bytes.values()) if engine.session is not None else 0,
                "ranks": [
                    {
                        "rank": rank,
                        "worker": f"{worker.id:016x}",
                        "state": "attached" if worker.live else "leaving" if worker.leaving else "lost",
                        "jobs_owed": sum(1 for job in desk.jobs if worker in job.owing),
                    }
                    for rank, worker in sorted(engine.seats.items())
                ],
            }
            for engine in desk.engines.values()
        ],
        "refused": _refused(desk),
        "namespaces": [
            {"name": space.name, "epoch": space.epoch, "entries": space.num_entries} for space in desk.namespaces
        ],
        "slot_bytes": desk.geometry.as_dict(),
        "slots": {
            "total": pool.num_slots if pool else 0,
            "free": pool.slots.num_free if pool else 0,
            "writing": pool.slots.num_writing if pool else 0,
            "ready": pool.slots.num_ready if pool else 0,
            "quarantined": pool.slots.num_quarantined if pool else 0,
            "pinned": pool.num_pinned if pool else 0,
            "leased": pool.num_leased if pool else 0,
            "evictable": pool.lru.num if pool else 0,
        },
        "expired": sum(index.num for index in desk.dying),  # READY slots of ended epochs, freed some a step
        "jobs": {
            "stores": sum(job.kind is Kind.STORE for job in desk.jobs),
            "loads": sum(job.kind is Kind.LOAD for job in desk.jobs),
            "void": sum(job.state is State.VOID for job in desk.jobs),
            "oldest_ms": (desk.now_ns - oldest) // 1_000_000 if oldest is not None else 0,
        },
        "fences": sum(session.fence.num_entries for session in _sessions(desk)),
        "leases": len(desk.leases),
        "restarting": desk.is_restarting,  # stores wait for workers of an earlier daemon
        "awaited": [f"{worker:016x}" for worker in sorted(desk.awaited)],
        "draining": desk.drain is not None,
        "requests": sum(session.requests.num_busy for session in _sessions(desk)),
        "counters": desk.counters.as_dict(),
    }


def at_rest(desk: Desk) -> dict[str, int]:
    """Sums that are all 0 when no request, lease or copy is left (I6)."""
    pool = desk.pool
    sessions = _sessions(desk)
    return {
        "jobs": len(desk.jobs),
        "tickets": sum(len(session.tickets) for session in sessions),
        "requests": sum(session.requests.num_busy for session in sessions),
        "fences": sum(session.fence.num_entries for session in sessions),
        "leases": len(desk.leases),
        "in_flight_bytes": sum(sum(session.in_flight_bytes.values()) for session in sessions),
        "writing": pool.slots.num_writing if pool else 0,
        "quarantined": pool.slots.num_quarantined if pool else 0,
        "pinned": pool.num_pinned if pool else 0,
        "leased": pool.num_leased if pool else 0,
    }


def check(desk: Desk) -> None:
    """AssertionError naming the sums that disagree. Walks everything: for tests and the simulator."""
    _check_pool(desk)
    for session in _sessions(desk):
        _check_session(desk, session)
    for lease in desk.leases:
        assert not lease.owner.closed, f"lease {lease.id} outlives its owner"
        assert lease.owner.requests.lease_of(lease.request, lease.group) == lease.id, f"lease {lease.id} has no request"
    _check_keys(desk)
    for engine in desk.engines.values():
        assert engine.session is not None or engine.seats, f"engine {engine.id!r} holds nothing"
        for worker in engine.seats.values():
            assert worker.id in desk.workers, f"worker {worker.id:x} sits though it is reaped"
    for link, session in desk.sessions.items():
        assert session.engine.session is session and session.link == link, "a session is not its engine's"


def _check_pool(desk: Desk) -> None:
    pool = desk.pool
    if pool is None:
        assert not len(desk.jobs) and not len(desk.leases), "jobs or leases without a pool"
        return
    pool.slots.check()
    assert not (desk.dying and not sum(index.num for index in desk.dying)), "an empty index is kept"
    indexes = [*desk.dying, *(index for space in desk.namespaces for index in space.groups)]
    entries = [entry for index in indexes for entry in index]
    for index in indexes:
        assert index.num == sum(1 for _ in index), f"an index counts {index.num} entries and has others"
    ready = [entry for entry in entries if not entry.job]
    writing = [entry for entry in entries if entry.job]
    pinned = [entry for entry in ready if entry.pins]
    leased = [entry for entry in ready if entry.leases]
    listed = list(pool.lru)
    slots = pool.slots
    assert len({entry.slot for entry in entries}) == len(entries), "two keys have one slot"
    assert len(ready) == slots.num_ready, f"{len(ready)} keys are ready, {slots.num_ready} slots are"
    assert len(writing) == slots.num_writing, f"{len(writing)} keys are being written, {slots.num_writing} slots are"
    assert len(pinned) == pool.num_pinned, f"{len(pinned)} keys are pinned, {pool.num_pinned} counted"
    assert len(leased) == pool.num_leased, f"{len(leased)} keys are leased, {pool.num_leased} counted"
    assert len(listed) == pool.lru.num == len(ready) - len(pinned), "evictable, ready and pinned do not add up"
    assert {id(entry) for entry in listed} == {id(entry) for entry in ready if not entry.pins}, "the Lru lists others"
    for entry in ready:
        assert slots.state_of(entry.slot) is SlotState.READY, f"slot {entry.slot} of a loadable key is not READY"
    quarantined = 0
    pins: dict[int, int] = {}
    for job in desk.jobs:
        if job.kind is Kind.STORE:
            quarantined += len(job.slots) if job.state is State.VOID else 0
        else:
            for entry in job.entries:
                pins[id(entry)] = pins.get(id(entry), 0) + 1
    spoiled = {entry.slot for job in desk.jobs if job.kind is Kind.LOAD for entry in job.entries if entry.home is None}
    spoiled |= {entry.slot for lease in desk.leases for entry in lease.entries if entry.home is None}
    quarantined += len(spoiled)
    assert quarantined == slots.num_quarantined, f"{quarantined} slots in quarantine by jobs, {slots.num_quarantined}"
    for lease in desk.leases:
        for entry in lease.entries:
            pins[id(entry)] = pins.get(id(entry), 0) + 1
    for entry in ready:
        assert entry.pins == pins.get(id(entry), 0), f"slot {entry.slot} has {entry.pins} pins, held {pins}"


def _check_session(desk: Desk, session: Session) -> None:
    mine = [job for job in desk.jobs if job.session is session]
    untold = {job.id for job in mine if job.outcome is None}
    tickets = {job.id for job in session.tickets.values()}
    assert tickets == untold, f"unanswered jobs {sorted(untold)}, tickets {sorted(tickets)}"
    booked = {job for _, state in session.requests for job in state.transfer_jobs}
    assert booked == untold, f"unanswered jobs {sorted(untold)}, in requests {sorted(booked)}"
    for request, state in session.requests:
        kinds = [job.kind for job in session.tickets.values() if job.request == request]
        assert kinds.count(Kind.LOAD) == 0 or len(kinds) == 1, f"request {request} has both kinds or two loads"
        assert state.is_busy or (state.chain and not state.closed), f"request {request} holds nothing"
    chained = sum(len(state.chain) for _, state in session.requests)
    assert session.requests.num_chained == chained, (
        f"{chained} entries in chains, {session.requests.num_chained} counted"
    )
    fenced = {(block, int(job.id)) for job in mine if job.kind is Kind.STORE for block in job.blocks.tolist()}
    assert session.fence.pairs() == fenced, "the fence index is not the store jobs' blocks"
    assert session.fence.num_entries == len(fenced), "the fence index counts others"
    for kind in Kind:
        flying = sum(job.num_bytes for job in mine if job.kind is kind)
        assert session.in_flight_bytes[kind] == flying, f"{kind.name}: {flying} bytes in flight, counted otherwise"
    for job in mine:
        assert job.pending_count > 0, f"job {job.id:x} owes nothing and is not over"
        assert (job.outcome is None) == (job.kind is Kind.LOAD or job.state is State.COPYING), f"job {job.id:x} answer"


def _check_keys(desk: Desk) -> None:
    """Every key that was offered or asked for is accounted for."""
    counters = desk.counters
    flying = sum(len(job.entries) for job in desk.jobs if job.kind is Kind.STORE and job.outcome is None)
    ended = counters["store_keys_held"] + counters["store_keys_stored"]
    lost = counters.total("store_keys_refused.") + counters.total("store_keys_failed.")
    assert counters["store_keys"] == ended + lost + flying, (
        f"{counters['store_keys']} keys offered; held or stored {ended}, refused or failed {lost}, in flight {flying}"
    )
    asked = counters["lookup_keys"]
    told = sum(counters[f"lookup_keys_{how}"] for how in ("hit", "pending", "missed"))
    told += counters.total("lookup_keys_refused.")
    assert asked == told, f"{asked} keys asked for, {told} answered"
    assert not counters[f"store_keys_failed.{Outcome.OK.name}"], "a store failed with OK"
