"""How jobs move on and end: words, reaps, revokes and time. Every exit of a job goes through `turn`."""

from heapq import heapify, heappop, heappush

from kvferry.proto.columns import u8, u32, u64
from kvferry.proto.hot import Done
from kvferry.proto.ids import WorkerId, job_is_of_boot
from kvferry.proto.outcome import Kind, Outcome
from kvferry.scheduler_daemon.core.api import KillWorker
from kvferry.scheduler_daemon.core.desk import Desk
from kvferry.scheduler_daemon.core.engines import Worker
from kvferry.scheduler_daemon.core.jobs import Effect, State, TransferJobStatus, Turn

DEADLINES_KEPT = 4096  # of jobs that are over, before they are swept out
_OUTCOMES = {outcome.value: outcome for outcome in Outcome}


def turn(desk: Desk, job: TransferJobStatus, what: Turn) -> None:
    """Let a job move on, and do what its table says."""
    for effect in job.turn(what):
        _DO[effect](desk, job)


def _drop(desk: Desk, job: TransferJobStatus) -> None:
    assert desk.pool is not None
    desk.pool.abandon(job.entries, job.slots)
    desk.counters.failed("store_keys", job.cause, len(job.entries))


def _publish(desk: Desk, job: TransferJobStatus) -> None:
    assert desk.pool is not None
    desk.recovered_only = False
    parent = job.session.requests.parent_of(job.request, job.entries[0])
    desk.pool.publish(job.entries, job.slots, parent)
    desk.counters.add("store_keys_stored", len(job.entries))


def _tell(desk: Desk, job: TransferJobStatus) -> None:
    session = job.session
    assert job.outcome is not None
    desk.counters.add(f"{job.kind.name.lower()}s_ended.{job.outcome.name}")
    del session.tickets[job.ticket]
    session.requests.ended(job.request, job.id)
    if not session.closed:
        desk.ended.setdefault(session.link, []).append(job)


def _cancel(desk: Desk, job: TransferJobStatus) -> None:
    for worker in job.owing:
        desk.cancels.setdefault(worker.id, []).append(job.id)


def _release(desk: Desk, job: TransferJobStatus) -> None:
    session, pool = job.session, desk.pool
    assert pool is not None
    desk.jobs.remove(job)
    session.in_flight_bytes[job.kind] -= job.num_bytes
    if job.kind is Kind.LOAD:
        if job.torn:
            desk.counters.add("keys_spoiled", pool.spoil(job.entries))
        pool.unpin(job.entries)
    else:
        session.fence.remove(job.id, job.blocks)
        if job.outcome is not Outcome.OK:
            pool.let_go(job.slots)


_DO = {
    Effect.DROP: _drop,
    Effect.PUBLISH: _publish,
    Effect.TELL: _tell,
    Effect.CANCEL: _cancel,
    Effect.RELEASE: _release,
}


def void(desk: Desk, job: TransferJobStatus, cause: Outcome) -> None:
    """Nobody wants this job any more. A store is never published; both wait for the last word."""
    if job.state is State.COPYING:
        job.blame(cause)
        turn(desk, job, Turn.VOIDED)


def take_done(desk: Desk, worker: Worker, done: Done) -> None:
    """A worker's words. Unknown, stale, foreign and repeated ones are counted and change nothing."""
    num_words = 0
    words = zip(u64(done.jobs).tolist(), u8(done.outcomes).tolist(), u32(done.copy_us).tolist(), strict=True)
    for job_id, value, copy_us in words:
        job = desk.jobs.get(job_id)
        if job is None:
            known = job_is_of_boot(job_id, desk.settings.boot)
            desk.counters.add("words_unknown" if known else "words_of_another_boot")
            continue
        if worker.rank >= len(job.workers) or job.workers[worker.rank] is not worker:
            desk.counters.add("words_foreign")
            continue
        # A word this build does not know is no OK, but it is a word: the copy is over.
        outcome = _OUTCOMES.get(value, Outcome.COPY_FAILED)
        what = job.report(worker.rank, outcome)
        if what is None:
            desk.counters.add("words_repeated")
            continue
        num_words += 1
        if outcome is Outcome.OK:
            worker.pace.add(len(job.slots) * worker.payload_bytes, copy_us)
        if what is not Turn.PROGRESS:  # the common word of many ranks, of which the table makes nothing
            turn(desk, job, what)
    desk.counters.add("words", num_words)


def worker_ended(desk: Desk, worker: Worker, outcome: Outcome) -> None:
    """The proof came: what this worker owed has failed with `outcome`, and it touches nothing of it any more."""
    for job in list(desk.jobs):
        if worker.rank < len(job.workers) and job.workers[worker.rank] is worker:
            what = job.report(worker.rank, outcome)
            if what is not None:
                desk.counters.add("words_of_the_dead" if outcome is Outcome.WORKER_DIED else "words_of_the_parted")
                turn(desk, job, what)


# ---- time ------------------------------------------------------------------------------------------


def set_deadline(desk: Desk, job: TransferJobStatus) -> None:
    """A fixed part, and the time that its slowest rank takes for all that is in flight of its engine, with this.

    From acceptance on, whether a rank begins it or not. A store is begun after its forward, which may take long
    on a slow engine and costs nobody anything; a load is begun at once, and its request stands still.
    """
    settings = desk.settings
    fixed_ns = min(settings.load_ns, settings.job_ns) if job.kind is Kind.LOAD else settings.job_ns
    floor = settings.floor_bytes_per_s
    block_bytes = job.num_bytes // len(job.entries)
    num_blocks = sum(job.session.in_flight_bytes.values()) // block_bytes
    copies_ns = max(num_blocks * w.payload_bytes * 1_000_000_000 // w.pace.bytes_per_s(floor) for w in job.workers)
    if len(desk.deadlines) > 2 * len(desk.jobs) + DEADLINES_KEPT:
        desk.deadlines = [due for due in desk.deadlines if desk.jobs.get(due[1]) is not None]
        heapify(desk.deadlines)
    heappush(desk.deadlines, (desk.now_ns + fixed_ns + copies_ns, job.id))


def let_time_pass(desk: Desk) -> None:
    """Do what is due at `desk.now_ns`."""
    now = desk.now_ns
    while (lease := desk.leases.first()) is not None and lease.end_ns <= now:
        desk.counters.add("leases_expired")
        desk.end_lease(lease)
    while desk.deadlines and desk.deadlines[0][0] <= now:
        job = desk.jobs.get(heappop(desk.deadlines)[1])
        if job is not None:
            desk.counters.add("deadlines_passed")
            void(desk, job, Outcome.DEADLINE)
            desk.graces.append((now + desk.settings.grace_ns, job.id))
    while desk.graces and desk.graces[0][0] <= now:
        job = desk.jobs.get(desk.graces.popleft()[1])
        for worker in job.owing if job is not None else []:
            assert job is not None
            kill(desk, worker, f"it owes its word on {job.kind.name.lower()} job {job.id:x} past deadline and grace")
    while desk.partings and desk.partings[0][0] <= now:
        parted = desk.partings.popleft()[1]
        if desk.workers.get(parted.id) is parted:
            kill(desk, parted, "it parted and has not exited within its grace")

    if desk.awaited_due_ns is not None and desk.awaited_due_ns <= now:
        desk.awaited_due_ns = None
        for worker_id in sorted(desk.awaited):
            desk.counters.add("workers_killed")
            desk.out.append(KillWorker(WorkerId(worker_id), "it outlived its daemon and has not drained in time"))


def kill(desk: Desk, worker: Worker, why: str) -> None:
    """Ask for a worker's death, once. Its words count as given when it is reaped, not before."""
    if not worker.killed:
        worker.killed = True
        desk.counters.add("workers_killed")
        desk.out.append(KillWorker(worker.id, why))  # type: ignore[arg-type]


def next_due_ns(desk: Desk) -> int | None:
    """When `let_time_pass` has something to do."""
    if desk.dying:
        return desk.now_ns
    while desk.deadlines and desk.jobs.get(desk.deadlines[0][1]) is None:
        heappop(desk.deadlines)
    while desk.graces and desk.jobs.get(desk.graces[0][1]) is None:
        desk.graces.popleft()
    while desk.partings and desk.workers.get((parted := desk.partings[0][1]).id) is not parted:
        desk.partings.popleft()
    due = [queue[0][0] for queue in (desk.deadlines, desk.graces, desk.partings) if queue]
    if desk.drain is not None and not desk.drain.cut and len(desk.jobs):
        due.append(desk.drain.end_ns)
    if desk.awaited_due_ns is not None and desk.awaited:
        due.append(desk.awaited_due_ns)
    lease = desk.leases.first()
    if lease is not None:
        due.append(lease.end_ns)
    return min(due, default=None)
