"""The worker's link to whichever daemon runs now: it outlives each of them and finds the next by itself.

    AWAY ──connect──▶ GREETING ──Welcome──▶ OPEN
      ▲                  │                    │
      └──── 100 ms ──────┴── silence, end ────┘ LinkLost

`receive` gives one ordered stream: what the daemon says, a `Welcome` where a new link begins, a `LinkLost`
where one that was open ended. Never sends by itself but `Hello`; what a new boot means is decided elsewhere.
There is no end to the trying: a worker ends with its rank or its supervisor, never for want of a daemon.
"""

import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import zmq

from kvferry.net.paths import RunDir
from kvferry.net.peer import Peer
from kvferry.proto.control import Goodbye, Hello, RankGone, Refused, Welcome
from kvferry.proto.errors import LostError
from kvferry.proto.ids import LinkId
from kvferry.proto.schema import Message

log = logging.getLogger("kvferry.worker")

RETRY_S: Final = 0.1
GREET_S: Final = 4.0  # a daemon that was reached and says nothing is tried again over a new link
GOODBYE_S: Final = 0.5  # for the daemon's acknowledgement of the last reports


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The open link ended: nothing that was said on it and not answered will be."""

    why: str


class DaemonLink:
    """At most one link at a time, always to the daemon that listens now."""

    def __init__(self, connect: Callable[[], Peer]) -> None:
        self._connect = connect
        self._peer: Peer | None = None
        self._retry_at = 0.0  # monotonic seconds
        self._silent_at = 0.0  # when an awaited welcome is given up
        self._lost = ""  # why the open link was dropped by this side
        self._filenos: tuple[int, ...] = ()
        self.is_open = False

    @classmethod
    def to(cls, run_dir: RunDir) -> "DaemonLink":
        """The link of a worker to the daemon of this run dir."""
        return cls(lambda: Peer(run_dir, LinkId(secrets.randbits(63) | 1)))

    @property
    def filenos(self) -> tuple[int, ...]:
        """To select on for reading; none once the link has ended, told or not: their numbers may be others' by then."""
        return self._filenos if self._peer is not None and self._peer.alive else ()

    def receive(self) -> list[Any]:
        """All that has come, in order; connects and greets when it is time to. Never blocks.

        A `Refused` before any welcome is the daemon's answer to our version: no other link will do better.
        """
        words: list[Any] = []
        if self._peer is None and not self._reach():
            return words
        assert self._peer is not None
        for message in self._peer.receive():
            if not self.is_open and isinstance(message, Welcome):
                self.is_open = True
            if self.is_open or isinstance(message, Refused):
                words.append(message)
        self._peer.tick()
        if not self.is_open and self._peer.alive and time.monotonic() >= self._silent_at:
            self._peer.close()
        if not self._peer.alive:
            self._end(words)
        return words

    def send(self, message: Message) -> None:
        """Send on the open link; without one the words are lost, as they would be on a link that ends."""
        if self._peer is None or not self.is_open:
            return
        if not self._peer.send(message):
            self.drop("the window is full: a daemon that does not read is as good as gone")
        self._peer.flush()

    def drop(self, why: str) -> None:
        """Give the open link up; `receive` will tell."""
        if self._peer is not None:
            self._lost = why
            self._peer.close()

    def has_news(self) -> bool:
        """Whether `receive` has something that no descriptor will tell again: ZeroMQ's fires on changes only."""
        if self._peer is None:
            return False
        return not self._peer.alive or bool(int(self._peer.zmq_socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def tick(self) -> None:
        """Repeat and acknowledge."""
        if self._peer is not None:
            self._peer.tick()

    def next_due_s(self) -> float | None:
        """Monotonic seconds when `receive` is to be called at the latest; None if only news can change anything."""
        if self._peer is None:
            return self._retry_at
        due_ns = self._peer.link.next_due_ns()
        dues = [] if due_ns is None else [due_ns / 1e9]
        if not self.is_open:
            dues.append(self._silent_at)
        return min(dues, default=None)

    def close(self, *, serves: bool) -> None:
        """Tell the daemon that this worker ends, and wait, bounded, until it has all our reports."""
        peer, self._peer = self._peer, None
        if peer is None:
            return
        if self.is_open:
            peer.send(RankGone() if serves else Goodbye())
            peer.flush()
            deadline = time.monotonic() + GOODBYE_S
            while peer.alive and peer.link.in_flight and (left := deadline - time.monotonic()) > 0:
                peer.wait(min(left, 0.02))
                peer.receive()
                peer.tick()
        self.is_open = False
        peer.close()

    def _reach(self) -> bool:
        now = time.monotonic()
        if now < self._retry_at:
            return False
        self._retry_at = now + RETRY_S
        try:
            self._peer = self._connect()
        except LostError:
            return False
        self._silent_at = now + GREET_S
        self._lost = ""
        self._filenos = (self._peer.fileno(), self._peer.tether_fileno())
        self._peer.send(Hello(role="worker", pid=os.getpid()))
        self._peer.flush()
        return True

    def _end(self, words: list[Any]) -> None:
        peer, self._peer = self._peer, None
        assert peer is not None
        refusal = peer.refusal
        peer.close()
        self._retry_at = time.monotonic() + RETRY_S
        if self.is_open:
            self.is_open = False
            words.append(LinkLost(self._lost or (str(refusal) if refusal else "its tether ended")))
        elif refusal is not None and refusal.code == "hello.version":
            words.append(refusal)
