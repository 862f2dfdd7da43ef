"""The daemon's decisions, as one deterministic machine: the same events and times give the same actions.

    Received ─▶ role's handler ─┐
    LinkLost, WorkerReaped ─────┼─▶ desk (all state) ─▶ actions: Send, CloseLink, KillWorker, Note
    TimePassed ─────────────────┘

Every event first lets time pass, so what is due is done before anything new is looked at, whether the
shell woke for it or not. Nothing here knows a socket, a clock or a log.
"""

from collections.abc import Callable
from typing import Any

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
    StatusAnswer,
    StatusAsk,
)
from kvferry.proto.errors import RemoteProtocolError
from kvferry.proto.hot import Done, Lookup, Renew, Step
from kvferry.proto.ids import LinkId
from kvferry.scheduler_daemon.core import drain, ending, intake, lookups, people, recovery, reset, status, steps
from kvferry.scheduler_daemon.core.api import (
    Action,
    CoreSettings,
    DrainBegun,
    Event,
    Incoming,
    LinkLost,
    Received,
    Recovered,
    TableShape,
    TimePassed,
    WorkerReaped,
    WorkersListed,
)
from kvferry.scheduler_daemon.core.desk import Desk
from kvferry.scheduler_daemon.core.slots import Table, zeroed_table

# What comes all the time looks at no namespace but its own.
HOT = (Lookup, Step, Renew, Done)


def plain_table(shape: TableShape) -> Table:
    """A table in plain memory."""
    return zeroed_table(shape.num_slots)


class Core:
    """The scheduler daemon without its sockets.

    `make_table(shape)` gives the slot table, zeroed, shape (num_slots,) of `slots.RECORD`, once the
    pool's geometry is known; a KvferryError it raises refuses the attachment that fixed the geometry.
    `recovered` is what an earlier daemon left: its READY slots are served at once.
    """

    def __init__(
        self,
        settings: CoreSettings,
        make_table: Callable[[TableShape], Table] = plain_table,
        recovered: Recovered | None = None,
    ) -> None:
        self._desk = Desk(settings, make_table)
        if recovered is not None:
            recovery.recover(self._desk, recovered)

    def step(self, event: Event, now_ns: int) -> list[Action]:
        """Take one event; everything to be done about it, in order. A `now_ns` that went back counts as no time."""
        desk = self._desk
        desk.now_ns = max(desk.now_ns, now_ns)
        ending.let_time_pass(desk)
        match event:
            case Received(link, message):
                self._receive(link, message)
            case LinkLost(link):
                people.lose_link(desk, link)
            case WorkerReaped(worker):
                people.reap(desk, worker)
            case WorkersListed(workers):
                recovery.await_workers(desk, workers)
            case DrainBegun(budget_ns):
                drain.begin_for_shell(desk, budget_ns)
            case TimePassed():
                pass
        reset.free_some(desk)
        drain.look(desk)
        actions = desk.take_actions()
        if not (isinstance(event, Received) and isinstance(event.message, HOT)):
            desk.namespaces.sweep(e.namespace for e in desk.engines.values() if e.namespace is not None)
        return actions

    def next_due_ns(self) -> int | None:
        """When time alone will have something done; None: never."""
        return ending.next_due_ns(self._desk)

    def status(self) -> dict[str, Any]:
        """Gauges and counters as plain JSON types."""
        return status.status(self._desk)

    def check(self) -> None:
        """AssertionError naming the sums that disagree; for tests and the simulator."""
        status.check(self._desk)

    def at_rest(self) -> dict[str, int]:
        """Sums that are all 0 once no job, lease or copy is left."""
        return status.at_rest(self._desk)

    # ---- messages ------------------------------------------------------------------------------------

    def _receive(self, link: LinkId, message: Incoming) -> None:
        desk = self._desk
        hello = desk.hellos.get(link)
        if hello is None:
            if isinstance(message, Hello):
                people.take_hello(desk, link, message)
            else:
                text = f"the first message of a link was {message.TAG!r}, not 'hello'"
                people.refuse_link(desk, link, RemoteProtocolError("hello.first", text))
            return
        if isinstance(message, Goodbye):
            people.lose_link(desk, link)
            return
        if isinstance(message, StatusAsk):
            desk.send(link, StatusAnswer(status=self.status()))
            return
        known = self._from_client(link, message) if hello.role == "client" else False
        known = self._from_worker(link, message) if hello.role == "worker" else known
        known = self._from_admin(link, message) if hello.role == "admin" else known
        if not known:
            error = RemoteProtocolError("message.unexpected", f"{message.TAG!r} from a {hello.role}, or not now")
            people.refuse_link(desk, link, error)

    def _from_client(self, link: LinkId, message: Incoming) -> bool:
        """Whether a client may send this now; then it has been taken."""
        desk = self._desk
        session = desk.sessions.get(link)
        if session is None:
            if not isinstance(message, Register):
                return False
            people.take_register(desk, link, message)
            return True
        match message:
            case Lookup():
                lookups.take_lookup(desk, session, message)
            case Step():
                try:
                    intake.check_size(message)
                except RemoteProtocolError as error:
                    people.refuse_link(desk, link, error)
                else:
                    steps.take_step(desk, session, message)
            case Renew():
                lookups.take_renew(desk, session, message)
            case Rotate():
                people.take_rotate(desk, session, message)
            case _:
                return False
        return True

    def _from_worker(self, link: LinkId, message: Incoming) -> bool:
        """Whether a worker may send this now; then it has been taken."""
        desk = self._desk
        worker = desk.worker_links.get(link)
        match message:
            case Drained():
                recovery.take_drained(desk, link, message)
            case Attach():
                people.take_attach(desk, link, message)
            case Done():
                if worker is None:
                    desk.counters.add("words_of_strangers", len(message.jobs) // 8)
                else:
                    ending.take_done(desk, worker, message)
            case RankGone():
                if worker is None:
                    desk.counters.add("words_of_strangers")
                else:
                    people.take_rank_gone(desk, worker)
            case _:
                return False
        return True

    def _from_admin(self, link: LinkId, message: Incoming) -> bool:
        """Whether an admin may send this now; then it has been taken."""
        match message:
            case ResetAsk():
                reset.take_reset(self._desk, link, message)
            case DrainAsk():
                drain.take_drain(self._desk, link, message)
            case _:
                return False
        return True
