"""One engine step in its order: what it gives, what it takes away, and what is said about it.

    stores ─▶ loads ─▶ ended requests ─▶ fences of written blocks ─▶ revokes ─▶ cancels ─▶ releases
      └── records WRITING, generations raised ──▶ StepAnswer, one Plan to every attached worker

Stores come before anything that gives their blocks away, so a block stored and reassigned in one step is
met by its fence. Records are written for the whole step at once, before the plan that names their slots
leaves.
"""

import numpy as np

from kvferry.proto.columns import u32, u64
from kvferry.proto.hot import Step
from kvferry.proto.outcome import Kind, Outcome
from kvferry.scheduler_daemon.core.desk import Desk
from kvferry.scheduler_daemon.core.ending import void
from kvferry.scheduler_daemon.core.engines import Session
from kvferry.scheduler_daemon.core.intake import Intake
from kvferry.scheduler_daemon.core.jobs import State

# Answers kept for repeats of a step. The link below gives each message once, so more would never be asked for.
KEPT_ANSWERS = 64


def take_step(desk: Desk, session: Session, step: Step) -> None:
    """Take each step number once; a repeat is answered as before and changes nothing."""
    last = session.last_step
    if last is not None and step.step <= last:
        desk.counters.add("steps_repeated")
        answer = session.answers.get(step.step)
        if answer is not None:
            desk.send(session.link, answer)
        return
    if last is not None and step.step > last + 1:
        desk.counters.add("step_gaps")
    session.last_step = step.step
    desk.counters.add("steps")
    intake = Intake(desk, session, step)
    intake.take_stores()
    intake.take_loads()
    intake.plan_slots()
    end_requests(desk, session, step)
    wait_for = meet_fences(desk, session, step)
    void_tickets(desk, session, step)
    for lease_id in u64(step.released).tolist():
        lease = desk.lease_of(lease_id, session)
        if lease is not None:
            desk.end_lease(lease)
    answer = intake.answer(wait_for)
    session.answers[step.step] = answer
    if len(session.answers) > KEPT_ANSWERS:
        session.answers.popitem(last=False)
    desk.send(session.link, answer)
    if intake.tickets:
        plan = intake.plan()
        for worker in session.engine.live:
            if worker.link is not None:
                desk.send(worker.link, plan)


# ---- what a step takes away --------------------------------------------------------------------------


def end_requests(desk: Desk, session: Session, step: Step) -> None:
    """Close requests for new work and release their leases. Their running stores go on, behind their fences."""
    chains = []
    for request in u64(step.end_requests).tolist():
        chain, leases = session.requests.close(request)
        chains.append(chain)
        desk.counters.add("requests_ended")
        for lease_id in leases:
            lease = desk.leases.get(lease_id)
            if lease is not None:
                desk.end_lease(lease)
    if desk.pool is not None:
        # Attempts of one request end together, the one that loaded its head first: so the last is touched first.
        for chain in reversed(chains):
            desk.pool.lru.touch(chain)


def meet_fences(desk: Desk, session: Session, step: Step) -> list[int]:
    """Revoke the stores that still read blocks given to a new owner; tickets the client had not revoked itself."""
    blocks = np.concatenate([u32(step.written), u32(step.load_blocks)])
    inside = blocks[blocks < session.register.num_blocks]
    desk.counters.add("written_blocks_bad", len(blocks) - len(inside))
    hit = session.fence.hit(inside)
    if not hit:
        return []
    revoked = set(u64(step.revoked).tolist())
    wait_for = []
    for job_id in hit:
        job = desk.jobs.get(job_id)
        assert job is not None
        if job.state is not State.COPYING:
            continue  # never to be published: nothing to wait for
        desk.counters.add("fence_hits")
        if job.ticket not in revoked:
            desk.counters.add("fence_hits_unrevoked")
            wait_for.append(int(job.ticket))
        void(desk, job, Outcome.REVOKED)
    return wait_for


def void_tickets(desk: Desk, session: Session, step: Step) -> None:
    """Carry out the client's revokes and cancels. Late ones are counted."""
    for column, cause, late in (
        (step.revoked, Outcome.REVOKED, "revokes_late"),
        (step.cancelled, Outcome.CANCELLED, "cancels_late"),
    ):
        for ticket in u64(column).tolist():
            job = session.tickets.get(ticket)
            if job is None:
                desk.counters.add(late)
            elif cause is Outcome.REVOKED and job.kind is Kind.LOAD:
                desk.counters.add("revokes_of_loads")
            else:
                void(desk, job, cause)
