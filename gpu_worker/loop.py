"""The worker's shell while it serves one rank: one thread between four peers, carrying out what `core.py` decides.

    daemon's socket, rank's tether and pidfd, device's eventfd, supervisor's channel
         └──────────── select ─▶ events ─▶ core ─▶ copies, words, dones ────────────┘

    serving ──tether's end, Detach, pidfd──▶ draining ──▶ exit
       └─────stop, daemon gone: what runs ends──┘

It blocks in one `select` and wakes by an event. `select` and not `poll`, because marks are looked at every
250 us and only select's timeout is finer than a millisecond. Every wait has a bound.
"""

import logging
import select
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import zmq

from kvferry.gpu_worker.api import (
    Begun,
    DaemonLost,
    Event,
    JobsCancelled,
    Planned,
    RankLost,
    SubmitCopy,
    TellDaemon,
    TellRank,
    TicketsCancelled,
    TimePassed,
)
from kvferry.gpu_worker.copies import Copies
from kvferry.gpu_worker.core import WorkerCore
from kvferry.gpu_worker.devices.base import Device
from kvferry.gpu_worker.rank_link import RankTether
from kvferry.net.channel import Channel
from kvferry.net.peer import Peer
from kvferry.proto.control import RankGone
from kvferry.proto.errors import RemoteProtocolError
from kvferry.proto.hot import Cancel, Plan
from kvferry.proto.tether import Begin, CancelTickets, Detach

log = logging.getLogger("kvferry.worker")

DRAIN_S: Final = 1.0  # running batches take milliseconds; past this they hang
ORPHAN_S: Final = 5.0  # the daemon is gone: loads already begun get this long for their marks and copies
GOODBYE_S: Final = 0.5  # for the daemon's acknowledgement of the last reports
EXIT_STUCK: Final = 70  # a copy would not end; this process's death is the proof that it did


class Service:
    """The loop while one rank is served, and its end."""

    def __init__(
        self,
        peer: Peer,
        control: Channel,
        device: Device,
        tether: RankTether,
        core: WorkerCore,
        copies: Copies,
        inbox: deque[Any],
    ) -> None:
        self._peer = peer
        self._control = control
        self._device = device
        self._tether = tether
        self._core = core
        self._copies = copies
        self._inbox = inbox
        self._rank_lost = False
        self._daemon_lost = False
        self._stopping = False
        self._ends_at: float | None = None  # monotonic seconds: when waiting for running copies is over
        # What `select` watches, and which method takes what came: a wake-up costs only what it brought.
        self._watched: dict[int, Callable[[], None]] = {
            device.fileno(): self._take_copies,
            peer.fileno(): self._hear_daemon,
            peer.tether_fileno(): self._hear_daemon,
            tether.fileno(): self._hear_rank,
            control.fileno(): self._hear_supervisor,
        }
        if tether.pidfd >= 0:
            self._watched[tether.pidfd] = self._lose_rank

    def run(self) -> int:
        """Serve until the rank is gone or nothing is left to serve it with; the exit code."""
        self._hear_daemon()  # what it said together with its verdict, or since
        while not self._is_over():
            self._turn(self._sleep())
        drained = self._core.at_rest() or self._device.drain(0)
        if not drained:
            log.error("copies did not end within %g s: %s", DRAIN_S, self._core.describe())
        if not self._daemon_lost:
            say_goodbye(self._peer)
        self._tether.flush()
        self._tether.close()
        log.info("served: %s", self._core.describe()["counters"])
        return 0 if drained else EXIT_STUCK

    def _is_over(self) -> bool:
        if self._ends_at is None:
            return False
        return (self._core.at_rest() and not self._tether.wants_to_write) or time.monotonic() >= self._ends_at

    def _turn(self, came: list[Callable[[], None]]) -> None:
        """Take everything that has come; nothing came: let time pass for the core, as every event does too."""
        for take in came:
            take()
        if not self._daemon_lost and (has_news(self._peer) or not self._peer.alive):
            self._hear_daemon()
        if not came:
            self._step(TimePassed())
        self._peer.tick()
        self._tether.flush()

    def _take_copies(self) -> None:
        for copied in self._copies.ended():
            self._step(copied)

    def _hear_daemon(self) -> None:
        if self._daemon_lost:
            return
        self._inbox.extend(self._peer.receive())
        while self._inbox:
            match self._inbox.popleft():
                case Plan() as plan:
                    self._step(Planned(plan))
                case Cancel() as cancel:
                    self._step(JobsCancelled(cancel))
                case other:
                    log.warning("the daemon sent %s, which a worker does not take", type(other).__name__)
        if not self._peer.alive:
            self._daemon_lost = True
            self._watched = {fd: take for fd, take in self._watched.items() if take != self._hear_daemon}
            log.warning("the daemon is gone (%s)", self._peer.refusal or "no word")
            self._hear_rank()  # a begin that was sent before counts as begun
            self._step(DaemonLost())
            self._end_within(ORPHAN_S)

    def _hear_rank(self) -> None:
        if self._rank_lost:
            return
        try:
            messages = self._tether.receive()
        except RemoteProtocolError as error:
            log.warning("%s", error)
            self._tether.refuse(error)
            self._lose_rank()
            return
        for message in messages:
            match message:
                case Begin():
                    self._step(Begun(message))
                case CancelTickets():
                    self._step(TicketsCancelled(message))
                case Detach():
                    self._lose_rank()
                    return
                case other:
                    name = type(other).__name__
                    self._tether.refuse(
                        RemoteProtocolError("message.unexpected", f"a rank may not send {name} while it is served")
                    )
                    self._lose_rank()
                    return
        if self._tether.ended:
            self._lose_rank()

    def _lose_rank(self) -> None:
        if not self._rank_lost:
            self._rank_lost = True
            self._watched = {
                fd: take for fd, take in self._watched.items() if take not in (self._hear_rank, self._lose_rank)
            }
            self._step(RankLost())
            self._end_within(DRAIN_S)

    def _hear_supervisor(self) -> None:
        if self._stopping:
            return
        if any(event.get("event") == "stop" for event in self._control.receive()) or self._control.ended:
            self._stopping = True
            self._watched.pop(self._control.fileno(), None)
            self._hear_daemon()  # a load that was begun before the stop is one of those that end well
            self._hear_rank()
            # As if the daemon were gone: nothing new, but who waits for a running load gets its word.
            self._step(DaemonLost())
            self._end_within(DRAIN_S)

    def _end_within(self, seconds: float) -> None:
        ends_at = time.monotonic() + seconds
        self._ends_at = ends_at if self._ends_at is None else min(self._ends_at, ends_at)

    def _step(self, event: Event) -> None:
        for action in self._core.step(event, time.monotonic_ns()):
            match action:
                case SubmitCopy():
                    self._copies.submit(action)
                case TellRank(message):
                    self._tether.send(message)
                case TellDaemon(message):
                    if not self._peer.send(message):
                        # The window is full: a daemon that does not read is as good as gone.
                        self._peer.close()
                    self._peer.flush()

    def _sleep(self) -> list[Callable[[], None]]:
        """Wait until something comes or is due; what takes that which came."""
        now_ns = time.monotonic_ns()
        dues = [self._core.next_due_ns(now_ns), self._peer.link.next_due_ns()]
        timeouts = [max((due - now_ns) / 1e9, 0) for due in dues if due is not None]
        if self._ends_at is not None:
            timeouts.append(max(self._ends_at - time.monotonic(), 0) if not self._is_over() else 0)
        if not self._daemon_lost and (not self._peer.alive or has_news(self._peer)):
            timeouts.append(0)
        writes = [self._tether] if self._tether.wants_to_write else []
        ready, _, _ = select.select(list(self._watched), writes, [], min(timeouts) if timeouts else None)
        return [self._watched[fd] for fd in ready]


def say_goodbye(peer: Peer) -> None:
    """Tell the daemon that this worker ends, and wait, bounded, until it has all our reports."""
    peer.send(RankGone())
    peer.flush()
    deadline = time.monotonic() + GOODBYE_S
    while peer.alive and peer.link.in_flight and (left := deadline - time.monotonic()) > 0:
        peer.wait(min(left, 0.02))
        peer.receive()
        peer.tick()
    peer.close()


def has_news(peer: Peer) -> bool:
    """Whether something was received that the descriptor will not tell again: it fires on changes only."""
    return bool(int(peer.zmq_socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
