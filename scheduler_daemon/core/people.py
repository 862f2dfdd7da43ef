"""Who comes and goes: hellos, clients, workers. A notice of death takes a rank away; only the reap frees.

worker: Attach ─▶ live ─ RankGone, link lost ─▶ away (words still count) ─ WorkerReaped ─▶ gone, what it owed failed
client: Register ─▶ session ─ Goodbye, link lost ─▶ closed: leases dropped, unended jobs never published
"""

from kvferry.proto import version
from kvferry.proto.control import (
    Attach,
    Attached,
    Hello,
    RanksChanged,
    Refused,
    Register,
    Registered,
    Rotate,
    Welcome,
)
from kvferry.proto.errors import KvferryError, RefusedError, RemoteProtocolError
from kvferry.proto.hot import Plan
from kvferry.proto.ids import LinkId, WorkerId
from kvferry.proto.outcome import Kind, Outcome
from kvferry.scheduler_daemon.core.api import CloseLink, Note
from kvferry.scheduler_daemon.core.desk import Desk
from kvferry.scheduler_daemon.core.ending import void, worker_ended
from kvferry.scheduler_daemon.core.engines import Engine, Session, Worker, half, incarnation_number
from kvferry.scheduler_daemon.core.geometry import Geometry
from kvferry.scheduler_daemon.core.pool import HostPool

NUM_GROUPS = 1  # KV groups an engine may have, in this version
MAX_NOTED = 1024  # refusals that are remembered


# ---- links -----------------------------------------------------------------------------------------


def take_hello(desk: Desk, link: LinkId, hello: Hello) -> None:
    """Open a link, or refuse its version with both ranges."""
    lowest, highest = version.SUPPORTED_MAJORS
    major = min(highest, hello.major_max)
    if major < max(lowest, hello.major_min):
        error = RemoteProtocolError(
            "hello.version",
            f"the {hello.role} speaks protocol majors {hello.major_min}..{hello.major_max};"
            f" this daemon speaks {lowest}..{highest}",
            "install the same kvferry version on both sides",
        )
        refuse_link(desk, link, error)
        return
    desk.hellos[link] = hello
    minor = min(version.PROTOCOL_MINOR, hello.minor)
    desk.send(link, Welcome(major=major, minor=minor, boot=desk.settings.boot, tp_size=desk.settings.tp_size))


def refuse_link(desk: Desk, link: LinkId, error: KvferryError) -> None:
    """Answer a broken rule by its name and end the link."""
    desk.counters.add(f"refused.{error.code}")
    desk.send(link, Refused.of(error))
    desk.out.append(CloseLink(link))
    lose_link(desk, link)


def lose_link(desk: Desk, link: LinkId) -> None:
    """A link is over: what stood on it goes away, and nothing is freed that needs proof."""
    desk.hellos.pop(link, None)
    session = desk.sessions.pop(link, None)
    if session is not None:
        close_session(desk, session)
    worker = desk.worker_links.pop(link, None)
    if worker is not None:
        worker.link = None
        leave(desk, worker)


def _refuse(desk: Desk, link: LinkId, error: KvferryError, engine_id: str, rank: int = -1) -> None:
    """Turn a registration down; the link stays open for another try.

    It is tried again for ever: the log hears of it once, and again when the reason is another.
    """
    desk.counters.add(f"refused.{error.code}")
    desk.send(link, Refused.of(error))
    last = desk.noted.get((engine_id, rank))
    if last is None and len(desk.noted) >= MAX_NOTED:
        desk.noted.clear()
    desk.noted[engine_id, rank] = error, desk.now_ns
    if last is None or last[0].code != error.code:
        desk.out.append(Note(f"engine {engine_id!r} {half(rank)} is refused: {error}", warn=True))


def _check_world(desk: Desk, engine_id: str, world_size: int) -> None:
    tp_size = desk.settings.tp_size
    if world_size != tp_size:
        raise RefusedError(
            "register.world_size",
            f"engine {engine_id!r} has {world_size} ranks; this sidecar was started with --tp-size {tp_size}",
            f"start the sidecar with --tp-size {world_size}, or the engine with {tp_size} ranks",
        )


# ---- clients ---------------------------------------------------------------------------------------


def take_register(desk: Desk, link: LinkId, register: Register) -> None:
    """Register the scheduler half of an engine under a fresh incarnation, or refuse it."""
    engine = desk.engines.get(register.engine_id) or Engine(register.engine_id, register.world_size)
    try:
        _check_world(desk, register.engine_id, register.world_size)
        pid = desk.hellos[link].pid
        if engine.session is None and pid != engine.client_pid:
            # Ranks that served an earlier client process belong to an engine that is gone or going.
            for worker in engine.live:
                if worker.served:
                    leave(desk, worker)
        engine.check_client(register)
    except RefusedError as error:
        _refuse(desk, link, error, register.engine_id)
        return
    desk.noted.pop((register.engine_id, -1), None)
    desk.num_registrations += 1
    incarnation = incarnation_number(desk.settings.boot, desk.num_registrations)
    session = Session(incarnation, link, engine, register, minor=desk.hellos[link].minor)
    desk.engines[engine.id] = engine
    desk.sessions[link] = session
    engine.session = session
    engine.client_pid = pid
    for worker in engine.live:
        worker.served = False
    _find_namespace(desk, engine)
    session.told = _news(desk, engine)
    attached, name, epoch, slots = session.told
    desk.send(
        link,
        Registered(incarnation=session.incarnation, namespace=name, epoch=epoch, attached=attached, slots=slots),
    )
    desk.out.append(Note(f"engine {engine.id!r} registered, {attached} of {engine.world_size} ranks attached"))


def close_session(desk: Desk, session: Session) -> None:
    """The client is gone: leases dropped, unended jobs voided, nothing admitted any more."""
    engine = session.engine
    session.closed = True
    for lease in desk.leases.of(session):
        desk.end_lease(lease)
    for job in list(session.tickets.values()):
        void(desk, job, Outcome.ENGINE_GONE)
    engine.session = None
    engine.namespace = None
    for worker in engine.live:
        worker.served = True
    desk.out.append(Note(f"the client of engine {engine.id!r} is gone"))
    _drop_if_empty(desk, engine)


def take_rotate(desk: Desk, session: Session, rotate: Rotate) -> None:
    """Move this engine alone to the namespace of another salt; what it was storing is never published."""
    engine = session.engine
    session.salt = rotate.salt
    for lease in desk.leases.of(session):
        desk.end_lease(lease)
    for job in list(session.tickets.values()):
        if job.kind is Kind.STORE:
            void(desk, job, Outcome.REVOKED)
    engine.namespace = None
    _find_namespace(desk, engine)
    desk.counters.add("rotations")
    tell_ranks(desk, engine, always=True)


# ---- workers ---------------------------------------------------------------------------------------


def take_attach(desk: Desk, link: LinkId, attach: Attach) -> None:
    """Seat a worker at its engine's rank, or refuse it with both values."""
    if attach.worker in desk.reaped:
        desk.counters.add("attaches_of_the_dead")
        return
    engine = desk.engines.get(attach.engine_id) or Engine(attach.engine_id, attach.world_size)
    try:
        if attach.worker in desk.workers or link in desk.worker_links:
            raise RefusedError("worker.busy", f"worker {attach.worker:x} serves a rank already")
        _check_world(desk, engine.id, attach.world_size)
        if attach.rank >= attach.world_size:
            raise RefusedError("register.rank", f"rank {attach.rank} of a world of {attach.world_size}")
        if len(attach.payload_bytes) != NUM_GROUPS:
            raise RefusedError(
                "layout.groups",
                f"rank {attach.rank} has {len(attach.payload_bytes)} KV groups; this version serves {NUM_GROUPS}",
                "run this model without kvferry for now",
            )
        engine.check_rank(attach)
        _cut_pool(desk, attach)
    except KvferryError as error:
        _refuse(desk, link, error, attach.engine_id, attach.rank)
        return
    desk.noted.pop((attach.engine_id, attach.rank), None)
    # It attaches only after it has drained: its last word on an earlier boot, whether that came through or not.
    desk.drained.add(attach.worker)
    has_drained(desk, attach.worker)
    desk.engines[engine.id] = engine
    worker = Worker(attach, link, engine)
    desk.workers[worker.id] = worker
    desk.worker_links[link] = worker
    engine.seats[worker.rank] = worker
    desk.send(link, Attached(slots=desk.geometry.num_slots or desk.geometry.fits(worker.rank)))
    session = engine.session
    if session is not None and session.top_ticket:
        # A begin of a ticket that was decided before this worker came must end at once.
        desk.send(link, Plan(planned_to=session.top_ticket))
    _find_namespace(desk, engine)
    for other in desk.engines.values():
        tell_ranks(desk, other)
    desk.out.append(
        Note(f"engine {engine.id!r} rank {worker.rank} attached: {engine.num_attached} of {engine.world_size}")
    )


def _cut_pool(desk: Desk, attach: Attach) -> None:
    """Fix this rank's slot size, and make the slot table once every rank's is fixed."""
    payload = attach.payload_bytes[0]
    if desk.geometry.disagrees(attach.rank, payload, attach.pool_bytes, desk.pool.num_slots if desk.pool else 0):
        # What only an earlier daemon's engines could use must not keep the present ones out for ever.
        in_use = desk.pool is not None and not desk.pool.is_empty and not desk.recovered_only
        if in_use or len(desk.jobs) or len(desk.leases) or any(engine.live for engine in desk.engines.values()):
            raise desk.geometry.refusal(attach.rank, payload)
        fresh = Geometry(desk.settings.tp_size)
        fresh.fix(attach.rank, payload, attach.pool_bytes)
        num_lost = 0
        if desk.pool is not None:
            num_lost = desk.pool.slots.num_ready
            desk.generation = desk.pool.slots.generation
            desk.pool = None
            desk.namespaces.empty()
            desk.dying.clear()
        desk.geometry = fresh
        desk.recovered_only = False
        text = f"the pool is cut anew for another block size; {num_lost} recovered keys were discarded"
        desk.out.append(Note(text, warn=num_lost > 0))
    else:
        desk.geometry.fix(attach.rank, payload, attach.pool_bytes)
    num_slots = desk.geometry.num_slots
    if num_slots and desk.pool is None:
        shape = desk.geometry.shape()
        desk.pool = HostPool(num_slots, lambda _: desk.make_table(shape), desk.generation)
        desk.out.append(Note(f"the host pool has {num_slots} slots"))


def take_rank_gone(desk: Desk, worker: Worker) -> None:
    """The engine's rank is gone; its worker drains, says its last words and exits."""
    worker.leaving = True
    leave(desk, worker)


def leave(desk: Desk, worker: Worker) -> None:
    """A rank is away: told of no new job. What its worker owes waits for its word or its reap."""
    if not worker.live:
        return
    worker.live = False
    if worker.id in desk.workers:
        # It should exit by itself; one that lives on unheard would keep its rank's seat and its blocks for ever.
        desk.partings.append((desk.now_ns + desk.settings.grace_ns, worker))
    tell_ranks(desk, worker.engine)
    desk.out.append(Note(f"engine {worker.engine.id!r} rank {worker.rank} is away"))


def reap(desk: Desk, worker_id: WorkerId) -> None:
    """The proof of a worker's death."""
    desk.reaped.add(worker_id)
    desk.drained.discard(worker_id)
    has_drained(desk, worker_id)
    worker = desk.workers.get(worker_id)
    if worker is not None:
        part(desk, worker, Outcome.WORKER_DIED)


def has_drained(desk: Desk, worker: int) -> None:
    """Nothing of an earlier boot is in this worker's hands: its word, or its death."""
    if worker in desk.awaited:
        desk.awaited.discard(worker)
        if not desk.is_restarting:
            desk.out.append(Note("all workers of the earlier daemon have drained: stores are accepted"))


def part(desk: Desk, worker: Worker, outcome: Outcome) -> None:
    """Forget a worker of which it is certain that it touches nothing any more; what it owed fails with `outcome`."""
    del desk.workers[worker.id]
    worker_ended(desk, worker, outcome)
    if worker.link is not None:
        desk.worker_links.pop(worker.link, None)
        worker.link = None
    leave(desk, worker)
    engine = worker.engine
    if engine.seats.get(worker.rank) is worker:
        del engine.seats[worker.rank]
    _drop_if_empty(desk, engine)


# ---- what all of them change -----------------------------------------------------------------------


def _find_namespace(desk: Desk, engine: Engine) -> None:
    """Put a whole engine into the namespace that its ranks, its client and its salt name."""
    if engine.is_whole:
        engine.namespace = desk.namespaces.open(engine.identity(), NUM_GROUPS)


def _drop_if_empty(desk: Desk, engine: Engine) -> None:
    # Another engine may have come under this id while an old worker of this one was still to be reaped.
    if engine.session is None and not engine.seats and desk.engines.get(engine.id) is engine:
        del desk.engines[engine.id]


def _news(desk: Desk, engine: Engine) -> tuple[int, str, int, int]:
    space = engine.namespace
    name, epoch = (space.name, space.epoch) if space is not None else ("", 0)
    return engine.num_attached, name, epoch, desk.geometry.num_slots


def tell_ranks(desk: Desk, engine: Engine, *, always: bool = False) -> None:
    """Tell the client how many ranks are attached and where it is, if that changed."""
    session = engine.session
    if session is None:
        return
    news = _news(desk, engine)
    if always or news != session.told:
        session.told = news
        attached, name, epoch, slots = news
        desk.send(session.link, RanksChanged(attached=attached, namespace=name, epoch=epoch, slots=slots))
