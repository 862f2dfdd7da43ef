"""Coming to rest in good order: nothing is admitted, loads run to their end, stores have a budget.

    ask ─▶ DRAINING ── stores past the budget cancelled ──▶ last word of the last job ─▶ answer, AtRest
              └─────────────────── resume ───────────────▶ as before

The budget bounds stores only: a load's blocks are the engine's again when its ranks have spoken, and its own
deadline bounds that. A worker that owes its word a grace after the budget is killed, as after a deadline.
"""

from kvferry.proto.control import DrainAnswer, DrainAsk
from kvferry.proto.ids import LinkId
from kvferry.proto.outcome import Kind, Outcome
from kvferry.scheduler_daemon.core.api import AtRest, Note
from kvferry.scheduler_daemon.core.desk import Desk, Drain
from kvferry.scheduler_daemon.core.ending import void
from kvferry.scheduler_daemon.core.jobs import State
from kvferry.units import counted


def take_drain(desk: Desk, link: LinkId, ask: DrainAsk) -> None:
    """An operator asks for rest, or for its end."""
    if not ask.resume:
        begin(desk, ask.budget_ms * 1_000_000)
        assert desk.drain is not None
        desk.drain.links.append((link, desk.now_ns))
        return
    if desk.drain is not None:
        desk.out.append(Note("the drain was ended: work is admitted"))
        _answer(desk, desk.drain)
        desk.drain = None
    desk.send(link, DrainAnswer(dropped=0, waited_ms=0))


def begin_for_shell(desk: Desk, budget_ns: int) -> None:
    """The shell asks, and is told by AtRest."""
    begin(desk, budget_ns)
    assert desk.drain is not None
    desk.drain.shell_waits = True


def begin(desk: Desk, budget_ns: int) -> None:
    """Admit nothing from now on. A second ask may shorten the first one's budget."""
    end_ns = desk.now_ns + budget_ns
    if desk.drain is not None:
        desk.drain.end_ns = min(desk.drain.end_ns, end_ns)
        return
    desk.drain = Drain(end_ns=end_ns)
    for lease in list(desk.leases):
        desk.end_lease(lease)
    desk.counters.add("drains")
    desk.out.append(Note(f"draining: {counted(len(desk.jobs), 'job is', 'jobs are')} under way"))


def look(desk: Desk) -> None:
    """Cancel the stores that the budget does not cover, and answer once nothing is in flight."""
    drain = desk.drain
    if drain is None:
        return
    if not drain.cut and drain.end_ns <= desk.now_ns:
        drain.cut = True
        for job in list(desk.jobs):
            if job.kind is Kind.STORE:
                if job.state is State.COPYING:
                    drain.dropped += 1
                    void(desk, job, Outcome.CANCELLED)
                desk.graces.append((desk.now_ns + desk.settings.grace_ns, job.id))
    if not len(desk.jobs):
        _answer(desk, drain)
        if not drain.announced:
            drain.announced = True
            desk.out.append(Note(f"at rest; {counted(drain.dropped, 'store was', 'stores were')} dropped"))
        if drain.shell_waits:
            drain.shell_waits = False
            desk.out.append(AtRest())


def _answer(desk: Desk, drain: Drain) -> None:
    for link, asked_ns in drain.links:
        if link in desk.hellos:
            waited_ms = (desk.now_ns - asked_ns) // 1_000_000  # since this one asked
            desk.send(link, DrainAnswer(dropped=drain.dropped, waited_ms=waited_ms))
    drain.links.clear()
