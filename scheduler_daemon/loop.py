"""The daemon's shell: one thread that turns sockets, death notices and time into events of the core.

    daemon.sock   ROUTER: frames of all links          ─┐
    tether.sock   stream listener + one tether a link   ─┼─▶ switchboard ─▶ core ─▶ actions
    control fd    the supervisor                        ─┘

Each wake-up drains every socket without blocking, lets the core act, puts all answers on the wire, and
sleeps until the next frame or the next thing due. Nothing slow is done here: no disk, no KV byte, no name
lookup.
"""

import logging
import os
import select
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

import zmq

from kvferry.net.awake import AwakeClock
from kvferry.net.channel import Channel
from kvferry.net.paths import RunDir
from kvferry.proto import limits
from kvferry.proto.control import StatusAnswer, StatusAsk
from kvferry.proto.errors import LocalProtocolError
from kvferry.proto.ids import WorkerId
from kvferry.scheduler_daemon.core.api import (
    Action,
    AtRest,
    CloseLink,
    DrainBegun,
    Event,
    KeepEpochs,
    KillWorker,
    LinkLost,
    Note,
    Received,
    Send,
    TimePassed,
    WorkerReaped,
    WorkersListed,
)
from kvferry.scheduler_daemon.switchboard import Switchboard
from kvferry.scheduler_daemon.tethers import Tethers

log = logging.getLogger("kvferry.daemon")

# One drain takes at most this many frames, so that a flood on one socket cannot keep the others waiting.
FRAMES_A_DRAIN: Final = 4096
FOR_EVER_NS: Final = 1 << 62  # a sleep without an end is slept as planned
LOG_BAD_NS: Final = 1_000_000_000  # at most one log line about bad messages in this time


class DaemonCore(Protocol):
    """What the shell asks of the core (`core/core.py`)."""

    def step(self, event: Event, now_ns: int) -> Iterable[Action]: ...
    def next_due_ns(self) -> int | None: ...
    def status(self) -> dict[str, Any]: ...


class EpochKeeper(Protocol):
    """What the shell asks of the table's file (`table.py`)."""

    discarded: str

    @property
    def boots(self) -> int: ...
    def keep_epochs(self, epochs: tuple[tuple[bytes, int], ...]) -> None: ...


class Daemon:
    """The shell around one core. `run` returns when the supervisor says stop or is gone."""

    def __init__(
        self,
        run_dir: RunDir,
        core: DaemonCore,
        control: Channel,
        table: EpochKeeper,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._core = core
        self._control = control
        self._table = table
        self._listed = False  # the supervisor has told who outlived the last daemon
        self._raw_ns = now_ns
        # What happened while this process stood still is not held against anybody.
        self._now_ns = AwakeClock(now_ns)
        self._slept_ns = 0
        self._stood_ns = 0  # as the log has it
        self._started_ns = now_ns()
        self._workers: list[dict[str, Any]] = []  # as the supervisor last said
        self._deaths = {"daemon_restarts": 0, "workers_died": 0, "spares_failed": 0}
        self._no_spare: list[dict[str, Any]] = []  # ranks whose next spare does not start, and why
        self._bad_logged_ns = 0
        self._bad_seen = 0
        self._stopping = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        for path in (run_dir.daemon, run_dir.tether):
            path.unlink(missing_ok=True)
        old_umask = os.umask(0o177)
        try:
            # daemon.sock first: a peer whose tether connects may rely on the frames' socket standing.
            self._router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
            self._router.linger = 0
            self._router.sndhwm = self._router.rcvhwm = 0  # each link's window is the bound
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            # A frame past the limit is refused by name; far past it, ZeroMQ cuts it off before it takes memory.
            self._router.setsockopt(zmq.MAXMSGSIZE, limits.MAX_FRAME_BYTES * 2)
            self._router.bind(run_dir.daemon_endpoint)
            self._tethers = Tethers(str(run_dir.tether), self._now_ns)
        finally:
            os.umask(old_umask)
        self._switchboard = Switchboard(self._tethers.has)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._control.fileno(), zmq.POLLIN)
        self._poller.register(self._tethers.fileno(), zmq.POLLIN)
        self._polled: set[int] = set()

    def run(self) -> None:
        """Serve until told to stop."""
        # Who lives is known before anybody can say anything: no slot may go to two workers.
        while not self._listed and not self._stopping:
            select.select([self._control], [], [])
            self._take_control(self._now_ns(FOR_EVER_NS))
        self._control.send({"event": "ready"})
        while not self._stopping:
            self._wake(self._sleep())
        self._tethers.close()
        self._router.close(0)
        self._context.term()
        self._control.close()

    # ---- one turn ------------------------------------------------------------------------------------

    def _sleep(self) -> set[int]:
        """Wait for a frame, a tether, the supervisor or the next thing due; the descriptors that are readable."""
        now = self._now_ns()
        due = [self._core.next_due_ns(), self._switchboard.next_due_ns(), self._tethers.next_due_ns()]
        # Never a long plan: what is slept through beyond it counts for nothing.
        soonest = min([now + 1_000_000_000, *(at for at in due if at is not None)])
        if self._control.pending:
            soonest = min(soonest, now + 20_000_000)
        fds = set(self._tethers.filenos())
        for fd in fds - self._polled:
            self._poller.register(fd, zmq.POLLIN)
        for fd in self._polled - fds:
            self._poller.unregister(fd)
        self._polled = fds
        # Rounded up: a timeout of 0 for something due in 0.4 ms would spin.
        timeout_ms = max(0, -(-(soonest - now) // 1_000_000))
        self._slept_ns = timeout_ms * 1_000_000
        ready = self._poller.poll(timeout_ms)
        return {fd for fd, _ in ready if isinstance(fd, int)}

    def _wake(self, readable: set[int]) -> None:
        now = self._now_ns(self._slept_ns)
        self._take_control(now)
        if self._tethers.fileno() in readable:
            self._tethers.accept(now)
        # The ends of tethers are looked for first and told last: what a peer said before it died still counts.
        ended = self._tethers.ended(readable)
        self._take_frames(now)
        for link in ended:
            self._events(self._switchboard.lost(link), now)
            self._tethers.drop(link, now)
        self._events(self._switchboard.tick(now), now)
        due = self._core.next_due_ns()
        if due is not None and due <= now:
            self._events([TimePassed()], now)
        self._tethers.tick(now)
        self._control.flush()
        self._put_frames(now)
        self._log_bad(now)
        stood_s = (self._now_ns.stood_ns - self._stood_ns) / 1e9
        if stood_s > 1:
            self._stood_ns = self._now_ns.stood_ns
            log.warning("this daemon stood still for %.1f s: stopped, or without a processor", stood_s)

    def _take_frames(self, now: int) -> None:
        for _ in range(FRAMES_A_DRAIN):
            try:
                parts = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            # A peer of ours sends one part; more of them, joined, are refused as whatever they then are.
            self._events(self._switchboard.receive(parts[0], b"".join(parts[1:]), now), now)

    def _put_frames(self, now: int) -> None:
        gone: set[bytes] = set()
        for identity, frame in self._switchboard.outgoing():
            if identity in gone:
                continue
            try:
                self._router.send_multipart((identity, frame), zmq.NOBLOCK, copy=len(frame) < 65536)
            except zmq.ZMQError:  # ZeroMQ knows this identity no more
                gone.add(identity)
        for identity in gone:
            for link in self._switchboard.link_of(identity):
                self._events(self._switchboard.lost(link), now)
        if gone:
            self._put_frames(now)

    def _take_control(self, now: int) -> None:
        for event in self._control.receive():
            match event.get("event"):
                case "reaped":
                    self._events([WorkerReaped(WorkerId(event["worker"]))], now)
                case "workers":
                    self._workers = event["workers"]
                    self._no_spare = event.get("no_spare", [])
                    self._deaths = {name: event.get(name, 0) for name in self._deaths}
                    if not self._listed:
                        self._listed = True
                        self._events([WorkersListed(tuple(WorkerId(w["worker"]) for w in self._workers))], now)
                case "drain":
                    self._events([DrainBegun(int(event["budget_ms"]) * 1_000_000)], now)
                case "ping":
                    self._control.send({"event": "pong"})
                case "stop":
                    self._stopping = True
                case other:
                    log.warning("the supervisor said %r, which this daemon does not know", other)
        if self._control.ended:
            self._stopping = True

    # ---- the core ------------------------------------------------------------------------------------

    def _events(self, events: Iterable[Event], now: int) -> None:
        """Let the core act on these events, and on what carrying out its actions brings about, in order."""
        queue = deque(events)
        while queue:
            queue.extend(self._event(queue.popleft(), now))

    def _event(self, event: Event, now: int) -> list[Event]:
        if isinstance(event, LinkLost):
            self._tethers.drop(event.link, now)
        if isinstance(event, Received) and isinstance(event.message, StatusAsk):
            return self._send(Send(event.link, StatusAnswer(status=self.status())), now)
        follow: list[Event] = []
        for action in self._core.step(event, now):
            match action:
                case Send():
                    follow += self._send(action, now)
                case CloseLink(link):
                    self._switchboard.close(link)
                    self._tethers.drop(link, now)
                case KillWorker(worker, why):
                    self._control.send({"event": "kill", "worker": worker, "why": why})
                case KeepEpochs(epochs):
                    self._table.keep_epochs(epochs)
                case AtRest():
                    self._control.send({"event": "drained"})
                case Note(text, warn):
                    log.log(logging.WARNING if warn else logging.INFO, "%s", text)
        return follow

    def _send(self, action: Send, now: int) -> list[Event]:
        try:
            return [*self._switchboard.send(action.link, action.message, now)]
        except LocalProtocolError:
            # A bug of ours. The peer's link cannot go on without this message; all others can.
            log.exception("a message to link %x breaks the protocol", action.link)
            return [*self._switchboard.lost(action.link)]

    def status(self) -> dict[str, Any]:
        """The core's gauges and counters and the shell's own facts, as plain JSON types."""
        roles = [peer.hello.role for peer in self._switchboard.open.values()]
        return {
            **self._core.status(),
            "daemon_pid": os.getpid(),
            "uptime_s": round((self._raw_ns() - self._started_ns) / 1e9, 3),
            "stood_still_s": round(self._now_ns.stood_ns / 1e9, 3),
            **self._deaths,
            "table": {"boots": self._table.boots, "discarded": self._table.discarded},
            "no_spare": self._no_spare,
            "workers": [{**worker, "worker": f"{worker['worker']:016x}"} for worker in self._workers],
            "links": {role: roles.count(role) for role in ("client", "worker", "admin")},
            "bad_messages": dict(self._switchboard.bad),
        }

    def _log_bad(self, now: int) -> None:
        total = self._switchboard.bad.total()
        if total > self._bad_seen and now - self._bad_logged_ns >= LOG_BAD_NS:
            log.warning("%d bad messages, the last: %s", total - self._bad_seen, self._switchboard.last_bad)
            self._bad_seen = total
            self._bad_logged_ns = now
