"""What an engine is told in answer to a step or a lookup, held against the ledger.

    a step's answer    each ticket, with a job that every rank was told of or a reason; the stores that its writes met
    a lookup's answer  as many leading keys as are held, and whether the next one is on its way

Nothing here changes what the ledger knows but its counts: it looks, and raises `Broken`.
"""

from typing import TYPE_CHECKING

from kvferry.proto.columns import u8, u32, u64
from kvferry.proto.hot import LookupAnswer, Step, StepAnswer
from kvferry.proto.outcome import Kind, Next, Outcome, Reason

from .books import Broken, Engine, Wish

if TYPE_CHECKING:
    from .ledger import Ledger


def check_answer(ledger: "Ledger", engine: Engine, answer: StepAnswer) -> None:
    """Every ticket of the step is spoken of, in its order, and every store that its writes met is named."""
    before = engine.answers.get(answer.step)
    if before is not None:
        if (before.tickets, before.jobs, before.accepted) != (answer.tickets, answer.jobs, answer.accepted):
            raise Broken(f"I5: step {answer.step} was answered in two ways")
        return
    engine.answers[answer.step] = answer
    rows = zip(
        u64(answer.tickets).tolist(),
        u64(answer.jobs).tolist(),
        u32(answer.accepted).tolist(),
        u8(answer.reasons).tolist(),
        strict=True,
    )
    asked = _asked(engine.steps[answer.step])
    if u64(answer.tickets).tolist() != asked:
        raise Broken(f"I4: step {answer.step} asked for {asked}, the answer speaks of {u64(answer.tickets).tolist()}")
    for ticket, number, accepted, reason in rows:
        wish = engine.wishes[ticket]
        wish.answered = True
        if number == 0:
            wish.refused = True
            if reason:
                ledger.refusals += 1
            if wish.kind == Kind.STORE:
                _is_taken(ledger, wish, accepted)
            continue
        if ledger.jobs.get(number) is not engine.jobs.get(ticket):
            raise Broken(f"ticket {ticket} was answered with job {number:x}, which was planned for another")
        if number not in ledger.jobs:
            raise Broken(f"job {number:x} was accepted and planned to nobody")
        if ledger.plans_seen[number] != ledger.jobs[number].expected:
            raise Broken(f"job {number:x} was not planned to every rank")
        if accepted < len(wish.keys) and reason == Reason.NONE:
            raise Broken(f"ticket {ticket}: {accepted} of {len(wish.keys)} keys accepted and no reason")
    met = {t for t in engine.owed_waits[answer.step] if not engine.wishes[t].refused}
    said = set(u64(answer.wait_for).tolist())
    missing = {t for t in met if _must_name(engine, answer.step, t)} - said
    if missing:
        raise Broken(
            f"I3: step {answer.step} writes blocks of stores {sorted(missing)}; the daemon names {sorted(said)}"
        )
    if extra := said - met:
        raise Broken(f"I3: step {answer.step} is told to wait for {sorted(extra)}, whose blocks it does not write")


def check_hits(ledger: "Ledger", engine: Engine, answer: LookupAnswer) -> None:
    """As many leading keys as all ranks' words make it, no more and no fewer."""
    meaning, keys = engine.lookups[answer.lookup]
    ledger.hits += answer.hits
    if answer.reason != Reason.NONE:
        return  # turned down as a whole: ranks away, or a stale epoch
    held = 0
    while held < len(keys) and (meaning, keys[held]) in ledger.ready:
        held += 1
    after = Next.END if held == len(keys) else Next.MISS
    if held < len(keys) and (meaning, keys[held]) in ledger.pending:
        after = Next.PENDING
    if (answer.hits, answer.next) != (held, after):
        raise Broken(
            f"I2/I8: lookup {answer.lookup} of {len(keys)} keys under {meaning} is told {answer.hits} hits and then"
            f" {Next(answer.next).name}; the ranks' words make it {held} and {after.name}"
        )


def _asked(step: Step) -> list[int]:
    return u64(step.store_tickets).tolist() + u64(step.load_tickets).tolist()


def _is_taken(ledger: "Ledger", wish: Wish, accepted: int) -> None:
    """A store without a job: what was accepted of it is held or on its way."""
    for key in wish.keys[:accepted]:
        name = (wish.meaning, key)
        # A later store of the same step may have evicted it again.
        if not (ledger.just_ended or name in ledger.ready or name in ledger.pending or name in ledger.evicted):
            raise Broken(f"I4: {name} was accepted; it is neither held nor on its way")


def _must_name(engine: Engine, number: int, ticket: int) -> bool:
    """Whether the writes of a step meet what was accepted of a store, and it did not fail by itself just now."""
    job = engine.jobs.get(ticket)
    step = engine.steps[number]
    written = set(u32(step.written).tolist()) | set(u32(step.load_blocks).tolist())
    return job is not None and job.ended in (None, Outcome.REVOKED) and not written.isdisjoint(job.blocks)
