"""The worker's shell while it serves one rank: one thread between four peers, carrying out what `core.py` decides.

    daemon's socket, rank's tether and pidfd, device's eventfd, supervisor's channel
         └──────────── select ─▶ events ─▶ core ─▶ copies, words, dones ────────────┘

    SERVING ──link lost──▶ AWAY ──Welcome, and at rest: Drained, Attach──▶ ASKING ──Attached──▶ SERVING
       │                    ▲                                             │  │ Refused, more slots than we know
       │                    └──────────────── link lost ──────────────────┘  │
       └── rank's end, stop ─────────────────────────────────────────────────┴──▶ what runs ends ──▶ exit

A daemon's end is no end of ours: loads that were begun are answered, and the rank never hears of it.

It blocks in one `select` and wakes by an event. `select` and not `poll`, because marks are looked at every
250 us and only select's timeout is finer than a millisecond. Every wait has a bound, but for a daemon.
"""

import logging
import select
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any, Final

from kvferry.gpu_worker.api import (
    Begun,
    DaemonFound,
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
from kvferry.gpu_worker.daemon_link import DaemonLink, LinkLost
from kvferry.gpu_worker.devices.base import Device
from kvferry.gpu_worker.rank_link import RankTether
from kvferry.net.channel import Channel
from kvferry.proto.control import Attach, Attached, Drained, Refused, Welcome
from kvferry.proto.errors import RemoteProtocolError
from kvferry.proto.hot import Cancel, Plan
from kvferry.proto.tether import Begin, CancelTickets, Detach

log = logging.getLogger("kvferry.worker")

DRAIN_S: Final = 1.0  # running batches take milliseconds; past this they hang
LEAVE_S: Final = 5.0  # no daemon wants us: loads already begun get this long for their marks and copies
ANSWER_S: Final = 4.0  # the daemon's verdict; the rank client waits for five
EXIT_LOST: Final = 71  # the device works no more in this process; the same holds
EXIT_STUCK: Final = 70  # a copy would not end; this process's death is the proof that it did


class Standing(Enum):
    """How we stand with the daemon."""

    SERVING = "serving"  # attached
    AWAY = "away"  # its link is lost, and no other one is ours yet
    ASKING = "asking"  # attaching to the next


class Service:
    """The loop while one rank is served, and its end."""

    def __init__(
        self,
        daemon: DaemonLink,
        control: Channel,
        device: Device,
        tether: RankTether,
        core: WorkerCore,
        copies: Copies,
        *,
        attach: Attach,
        slots: int,
        inbox: deque[Any],
    ) -> None:
        self._daemon = daemon
        self._control = control
        self._device = device
        self._tether = tether
        self._core = core
        self._copies = copies
        self._attach = attach  # what each daemon is told of this rank
        self._slots = slots  # that the planners know
        self._inbox = inbox
        self._standing = Standing.SERVING
        self._next_boot = 0  # of the daemon behind the open link, while it does not serve us
        self._asked_until = 0.0  # monotonic seconds: when ASKING is given up
        self._rank_lost = False
        self._leaving = False  # nothing new is served
        self._ends_at: float | None = None  # monotonic seconds: when waiting for running copies is over
        # What `select` watches, and which method takes what came: a wake-up costs only what it brought.
        self._watched: dict[int, Callable[[], None]] = {
            device.fileno(): self._take_copies,
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
            log.error("copies did not end within their time: %s", self._core.describe())
        self._daemon.close(serves=self._standing is Standing.SERVING)
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
        if self._daemon.has_news() or self._daemon_is_due():
            self._hear_daemon()
        if not came:
            self._step(TimePassed())
        if self._next_boot and not (self._leaving or self._rank_lost) and self._core.at_rest():
            self._serve_next_boot()
        self._daemon.tick()
        self._tether.flush()

    def _take_copies(self) -> None:
        for copied in self._copies.ended():
            self._step(copied)

    # ---- the daemon ------------------------------------------------------------------------------

    def _hear_daemon(self) -> None:
        self._inbox.extend(self._daemon.receive())
        while self._inbox:
            word = self._inbox.popleft()
            if not self._leaving:
                self._take_word(word)
            elif isinstance(word, LinkLost):
                self._standing = Standing.AWAY
        if self._standing is Standing.ASKING and time.monotonic() >= self._asked_until:
            self._daemon.drop(f"no answer to our attachment within {ANSWER_S:g} s")

    def _take_word(self, word: Any) -> None:
        match word:
            case Plan() if self._standing is Standing.SERVING:
                self._step(Planned(word))
            case Cancel() if self._standing is Standing.SERVING:
                self._step(JobsCancelled(word))
            case LinkLost(why):
                log.warning("the daemon is gone (%s); what was begun ends, then the next one is asked", why)
                self._standing, self._next_boot = Standing.AWAY, 0
                self._hear_rank()  # a begin that was sent before counts as begun
                self._step(DaemonLost())
            case Welcome(boot=boot):
                self._next_boot = boot
            case Attached(slots=slots) if self._standing is Standing.ASKING:
                if slots > self._slots:
                    self._leave(f"the pool has {slots} slots now, not {self._slots}")
                    return
                self._standing = Standing.SERVING
                log.info("the rank is attached again, to the daemon that listens now")
            case Refused():
                self._leave(f"the daemon serves this rank no more: {word.error()}")
            case other:
                log.warning("the daemon sent %s, which a worker does not take now", type(other).__name__)

    def _serve_next_boot(self) -> None:
        """Nothing of the old link is in flight: say so, and attach the rank over the new one."""
        boot, self._next_boot = self._next_boot, 0
        self._daemon.send(Drained(worker=self._attach.worker, boot=boot))
        self._step(DaemonFound(boot))  # before the question: a begin may overtake the answer
        self._standing = Standing.ASKING
        self._asked_until = time.monotonic() + ANSWER_S
        self._daemon.send(self._attach)

    def _leave(self, why: str) -> None:
        """Serve no more: what runs ends, then the tether closes and the rank finds another worker."""
        log.warning("%s; the rank attaches again to another worker", why)
        self._leaving = True
        self._step(DaemonLost())
        self._end_within(LEAVE_S)

    def _daemon_is_due(self) -> bool:
        due = self._daemon_due_s()
        return due is not None and time.monotonic() >= due

    def _daemon_due_s(self) -> float | None:
        dues = [self._daemon.next_due_s(), self._asked_until if self._standing is Standing.ASKING else None]
        return min((due for due in dues if due is not None), default=None)

    # ---- the rank --------------------------------------------------------------------------------

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
            self._rank_lost = True  # from here on it is our death that a next daemon waits for
            self._watched = {
                fd: take for fd, take in self._watched.items() if take not in (self._hear_rank, self._lose_rank)
            }
            self._step(RankLost())
            self._end_within(DRAIN_S)

    # ---- the supervisor --------------------------------------------------------------------------

    def _hear_supervisor(self) -> None:
        if any(event.get("event") == "stop" for event in self._control.receive()) or self._control.ended:
            self._watched.pop(self._control.fileno(), None)
            self._hear_daemon()  # a load that was begun before the stop is one of those that end well
            self._hear_rank()
            self._leaving = True
            # As if the daemon were gone: nothing new, but who waits for a running load gets its word.
            self._step(DaemonLost())
            self._end_within(DRAIN_S)

    def _end_within(self, seconds: float) -> None:
        ends_at = time.monotonic() + seconds
        self._ends_at = ends_at if self._ends_at is None else min(self._ends_at, ends_at)

    # ---- one turn --------------------------------------------------------------------------------

    def _step(self, event: Event) -> None:
        for action in self._core.step(event, time.monotonic_ns()):
            match action:
                case SubmitCopy():
                    self._copies.submit(action)
                case TellRank(message):
                    self._tether.send(message)
                case TellDaemon(message):
                    self._daemon.send(message)

    def _sleep(self) -> list[Callable[[], None]]:
        """Wait until something comes or is due; what takes that which came."""
        now = time.monotonic()
        due_ns = self._core.next_due_ns(time.monotonic_ns())
        dues = [None if due_ns is None else due_ns / 1e9, self._daemon_due_s(), self._ends_at]
        timeouts = [max(due - now, 0) for due in dues if due is not None]
        if self._daemon.has_news() or self._copies.has_ended or self._is_over():
            timeouts.append(0)
        writes = [self._tether] if self._tether.wants_to_write else []
        watched = [*self._watched, *self._daemon.filenos]
        ready, _, _ = select.select(watched, writes, [], min(timeouts) if timeouts else None)
        takes = [self._watched.get(fd, self._hear_daemon) for fd in ready]
        if self._copies.has_ended:
            takes.append(self._take_copies)
        return list(dict.fromkeys(takes))
