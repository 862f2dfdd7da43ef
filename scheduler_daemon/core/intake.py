"""Acceptance: which keys of a step's stores and which of its loads are taken, and the plan that says where.

    ticket, request, blocks ─ refused by name, no key looked at
    store: survey the chain ─▶ reserve places for what is missing ─▶ job, fence     its leading keys
    load:  all keys READY ─▶ pin, the lease lets go ─▶ job                          whole or not at all
    records of all stores WRITING, at once ─▶ one Plan for every rank

Zero work means no record: a store whose keys are all held or on their way has job 0.
"""

import numpy as np

from kvferry.proto import limits
from kvferry.proto.columns import U32, pack_u8, pack_u32, pack_u64, spans, split_keys, u8, u32, u64
from kvferry.proto.errors import RemoteProtocolError
from kvferry.proto.hot import Plan, Step, StepAnswer
from kvferry.proto.ids import Ticket
from kvferry.proto.outcome import Kind, Reason
from kvferry.scheduler_daemon.core.desk import Desk
from kvferry.scheduler_daemon.core.ending import set_deadline
from kvferry.scheduler_daemon.core.engines import Session
from kvferry.scheduler_daemon.core.index import Entry, KeyIndex
from kvferry.scheduler_daemon.core.jobs import TransferJobStatus
from kvferry.scheduler_daemon.core.pool import HostPool


def check_size(step: Step) -> None:
    """RemoteProtocolError if stores and loads together are more than one plan and one answer can carry."""
    num_tickets = (len(step.store_tickets) + len(step.load_tickets)) // 8
    num_blocks = (len(step.store_blocks) + len(step.load_blocks)) // 4
    if num_tickets > limits.MAX_JOBS or num_blocks > limits.MAX_KEYS:
        raise RemoteProtocolError(
            "message.limit",
            f"a step of {num_tickets} tickets and {num_blocks} blocks; it may have"
            f" {limits.MAX_JOBS} and {limits.MAX_KEYS}, stores and loads together",
        )


class Intake:
    """Acceptance of the stores and loads of one step."""

    __slots__ = (
        "_accepted",
        "_block_bytes",
        "_desk",
        "_job_ids",
        "_jobs",
        "_num_blocks",
        "_pool",
        "_reasons",
        "_refusal",
        "_session",
        "_space",
        "_step",
        "_store_refusal",
        "_used",
        "_workers",
        "tickets",
    )

    def __init__(self, desk: Desk, session: Session, step: Step) -> None:
        engine = session.engine
        self._desk = desk
        self._session = session
        self._step = step
        self._pool = desk.pool
        self._space = engine.namespace
        self._workers = tuple(engine.live)
        self._block_bytes = engine.block_bytes
        self._num_blocks = engine.num_blocks
        self._refusal = self._step_refusal()
        # Rule 10: an earlier boot's worker may still write into what looks free.
        self._store_refusal = Reason.RESTARTING if desk.is_restarting else Reason.NONE
        self._used: set[int] = set()  # tickets of this step
        self._jobs: list[TransferJobStatus] = []
        self.tickets: list[int] = []
        self._job_ids: list[int] = []
        self._accepted: list[int] = []
        self._reasons: list[int] = []

    def _step_refusal(self) -> Reason:
        """Why nothing of this step can be accepted."""
        session, step = self._session, self._step
        if self._desk.drain is not None:
            return Reason.DRAINING
        if not session.engine.is_whole or self._space is None or self._pool is None:
            return Reason.RANKS_AWAY
        if step.epoch != self._space.epoch:
            return Reason.STALE_EPOCH
        if (step.store_keys or step.load_keys) and step.key_bytes != session.register.key_bytes:
            return Reason.KEY_WIDTH
        return Reason.NONE

    # ---- stores --------------------------------------------------------------------------------------

    def take_stores(self) -> None:
        """Decide on each store, in the step's order."""
        step, counters = self._step, self._desk.counters
        keys = split_keys(step.store_keys, step.key_bytes)
        blocks = u32(step.store_blocks)
        for ticket, request, group, (start, stop) in zip(
            u64(step.store_tickets).tolist(),
            u64(step.store_requests).tolist(),
            u8(step.store_groups).tolist(),
            spans(step.store_counts),
            strict=True,
        ):
            counters.add("stores")
            counters.add("store_keys", stop - start)
            reason = self._ticket_refusal(ticket, request, group, Kind.STORE, blocks[start:stop])
            if reason is not Reason.NONE:
                self._decide(ticket, None, 0, reason)
                counters.refused("store_keys", reason, stop - start)
                continue
            job, accepted, reason = self._store(ticket, request, group, keys[start:stop], blocks[start:stop])
            counters.refused("store_keys", reason, stop - start - accepted)
            copied = len(job.entries) if job is not None else 0
            counters.add("store_keys_held", accepted - copied)
            self._decide(ticket, job, accepted, reason)

    def _store(
        self, ticket: int, request: int, group: int, keys: list[bytes], blocks: U32
    ) -> tuple[TransferJobStatus | None, int, Reason]:
        """(job if anything is to be copied, leading keys accepted, why the others were not)."""
        pool, index = self._rooms(group)
        survey = pool.survey(index, keys, self._room(Kind.STORE))
        if survey.accepted == len(keys):
            reason = Reason.NONE
        elif survey.accepted >= pool.num_slots:
            reason = Reason.NEVER_FITS
        else:
            reason = Reason.POOL_FULL if survey.full else Reason.BUSY
        if not survey.missing:
            pool.lru.touch(survey.held)
            return None, survey.accepted, reason
        job_id = self._desk.jobs.next_id()
        missing = survey.missing
        self._desk.counters.add("keys_evicted", max(0, len(missing) - pool.slots.num_free))
        entries = pool.reserve(index, [keys[at] for at in missing], survey.held, job_id)
        if len(missing) < len(blocks):
            blocks = blocks[missing]
        chain = entries
        if survey.held:
            chain = [entry for entry in index.find(keys[: survey.accepted]) if entry is not None]
        job = self._begin(job_id, ticket, request, Kind.STORE, group, entries, blocks, chain)
        self._session.fence.add(job_id, job.blocks)
        return job, survey.accepted, reason

    # ---- loads ---------------------------------------------------------------------------------------

    def take_loads(self) -> None:
        """Decide on each load, whole or not at all."""
        step, counters = self._step, self._desk.counters
        keys = split_keys(step.load_keys, step.key_bytes)
        blocks = u32(step.load_blocks)
        for ticket, request, lease, group, (start, stop) in zip(
            u64(step.load_tickets).tolist(),
            u64(step.load_requests).tolist(),
            u64(step.load_leases).tolist(),
            u8(step.load_groups).tolist(),
            spans(step.load_counts),
            strict=True,
        ):
            counters.add("loads")
            counters.add("load_keys", stop - start)
            reason = self._ticket_refusal(ticket, request, group, Kind.LOAD, blocks[start:stop])
            job = None
            if reason is Reason.NONE:
                job, reason = self._load(ticket, request, lease, group, keys[start:stop], blocks[start:stop])
            if reason is not Reason.NONE:
                counters.refused("load_keys", reason, stop - start)
            self._decide(ticket, job, 0 if reason else stop - start, reason)

    def _load(
        self, ticket: int, request: int, lease_id: int, group: int, keys: list[bytes], blocks: U32
    ) -> tuple[TransferJobStatus | None, Reason]:
        pool, index = self._rooms(group)
        entries, _ = index.leading(keys)
        if len(entries) < len(keys):
            return None, Reason.MISSING
        if not keys:
            return None, Reason.NONE
        if self._room(Kind.LOAD) < len(keys):
            return None, Reason.BUSY
        # The lease becomes the job's pin in one step: pinned by the job before the lease lets go.
        pool.pin(entries)
        lease = self._desk.lease_of(lease_id, self._session) if lease_id else None
        chain = entries
        if lease is not None:
            chain = lease.entries  # from the first key on: the engine may have held some of them itself
            self._desk.end_lease(lease)
        job_id = self._desk.jobs.next_id()
        return self._begin(job_id, ticket, request, Kind.LOAD, group, entries, blocks, chain), Reason.NONE

    # ---- both ----------------------------------------------------------------------------------------

    def _rooms(self, group: int) -> tuple[HostPool, KeyIndex]:
        assert self._pool is not None and self._space is not None
        return self._pool, self._space.groups[group]

    def _ticket_refusal(self, ticket: int, request: int, group: int, kind: Kind, blocks: U32) -> Reason:
        """Why this ticket cannot be accepted, looking at no key."""
        if not ticket or ticket <= self._session.top_ticket or ticket in self._used:
            return Reason.REPEATED
        self._used.add(ticket)
        if self._refusal is not Reason.NONE:
            return self._refusal
        if kind is Kind.STORE and self._store_refusal is not Reason.NONE:
            return self._store_refusal
        assert self._space is not None
        if group >= len(self._space.groups):
            return Reason.GROUP
        if len(blocks) and int(blocks.max()) >= self._num_blocks:
            return Reason.BAD_BLOCKS
        if kind is Kind.LOAD and len(set(blocks.tolist())) < len(blocks):
            return Reason.BAD_BLOCKS
        return self._session.requests.admits(request, kind)

    def _room(self, kind: Kind) -> int:
        """Blocks that may begin to move now. One block may always move alone.

        Stores give way first: what is not stored is a later miss. A load has its lease, and its engine's
        request waits for it; only more loads than the pool has slots are refused.
        """
        assert self._pool is not None
        flying = self._session.in_flight_bytes[kind]
        if kind is Kind.LOAD:
            return self._pool.num_slots - flying // self._block_bytes
        left = max(0, self._desk.settings.max_in_flight_bytes - flying) // self._block_bytes
        return left if flying else max(left, 1)

    def _begin(
        self,
        job_id: int,
        ticket: int,
        request: int,
        kind: Kind,
        group: int,
        entries: list[Entry],
        blocks: U32,
        chain: list[Entry],
    ) -> TransferJobStatus:
        desk, session = self._desk, self._session
        assert self._space is not None
        job = TransferJobStatus(
            id=job_id,  # type: ignore[arg-type]
            ticket=Ticket(ticket),
            session=session,
            request=request,
            kind=kind,
            group=group,
            entries=entries,
            slots=np.array([entry.slot for entry in entries], dtype=np.uint32),
            blocks=blocks.astype(np.uint32),  # a copy of its own: the message may go
            workers=self._workers,
            num_bytes=len(entries) * self._block_bytes,
            accepted_ns=desk.now_ns,
            space=self._space,
        )
        desk.jobs.add(job)
        session.tickets[ticket] = job
        session.requests.begin(request, job_id, kind, chain)
        session.in_flight_bytes[kind] += job.num_bytes
        set_deadline(desk, job)
        self._jobs.append(job)
        return job

    def _decide(self, ticket: int, job: TransferJobStatus | None, accepted: int, reason: Reason) -> None:
        self.tickets.append(ticket)
        self._job_ids.append(job.id if job is not None else 0)
        self._accepted.append(accepted)
        self._reasons.append(self._session.spoken(reason))

    # ---- out -----------------------------------------------------------------------------------------

    def plan_slots(self) -> None:
        """Write the records of all slots that this step fills: before any plan names them."""
        self._session.top_ticket = max(self._session.top_ticket, *self._used, 0)
        self._jobs.sort(key=lambda job: job.ticket)
        stores = [job for job in self._jobs if job.kind is Kind.STORE]
        if not stores:
            return
        assert self._pool is not None and self._space is not None
        self._pool.slots.write(
            np.concatenate([job.slots for job in stores]),
            [entry.key for job in stores for entry in job.entries],
            key_bytes=self._step.key_bytes,
            groups=np.repeat([job.group for job in stores], [len(job.slots) for job in stores]),
            namespace=self._space.digest,
            epoch=self._space.epoch,
            payload_bytes=self._block_bytes,
        )

    def plan(self) -> Plan:
        """What the workers copy once their ranks say begin; jobs in ticket order."""
        jobs, pool = self._jobs, self._pool
        planned_to = self._session.top_ticket
        if not jobs:
            return Plan(planned_to=planned_to)
        assert pool is not None
        slots = np.concatenate([job.slots for job in jobs])
        return Plan(
            planned_to=planned_to,
            tickets=pack_u64([job.ticket for job in jobs]),
            jobs=pack_u64([job.id for job in jobs]),
            kinds=pack_u8([job.kind for job in jobs]),
            groups=pack_u8([job.group for job in jobs]),
            counts=pack_u32([len(job.slots) for job in jobs]),
            slots=pack_u32(slots),
            generations=pack_u64(pool.slots.generations(slots)),
            blocks=pack_u32(np.concatenate([job.blocks for job in jobs])),
        )

    def answer(self, wait_for: list[int]) -> StepAnswer:
        """What became of each ticket."""
        return StepAnswer(
            step=self._step.step,
            epoch=self._space.epoch if self._space is not None else 0,
            tickets=pack_u64(self.tickets),
            jobs=pack_u64(self._job_ids),
            accepted=pack_u32(self._accepted),
            reasons=pack_u8(self._reasons),
            wait_for=pack_u64(wait_for[: limits.MAX_JOBS]),
        )
