"""Who knocks at a rank's socket, until one of them registers. The worker then serves that one and nobody else.

    listener ──accept──▶ waiting ── rank.register ──▶ let in; the others are turned away
                           └── anything else, its end, silence for REGISTER_S ──▶ refused

A rank registers as soon as it is connected; what takes it long, its first probes on a GPU, it does before it knocks.
Whoever does not must not keep others waiting: after a moment of silence the next one is asked in beside it. Only
then, because somebody who was asked in is lost to the other spare of this rank. Never blocks; the owner waits on
`filenos` and `next_due_s`.
"""

import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Final

from kvferry.gpu_worker.rank_link import RankTether
from kvferry.proto.errors import KvferryError, LostError, RemoteProtocolError
from kvferry.proto.tether import RankRegister

log = logging.getLogger("kvferry.worker")

REGISTER_S: Final = 2.0  # a connection that has not shown all by then is closed
SILENT_S: Final = 0.02  # and by then keeps nobody waiting
MOST_WAITING: Final = 128
LOG_BAD_S: Final = 1.0  # at most one log line about bad connections in this time


class Door:
    """The inherited listener of one rank, and who has come through it and not yet said who it is."""

    def __init__(self, listener: socket.socket, rank: int, now_s: Callable[[], float] = time.monotonic) -> None:
        listener.setblocking(False)
        self._now_s = now_s
        self._listener = listener
        self._rank = rank
        self._waiting: dict[RankTether, float] = {}  # in the order of coming -> when
        self._bad = 0  # refused connections that the log has not heard of
        self._last_bad = ""
        self._log_at_s = 0.0  # monotonic: not before
        self.is_open = True

    def filenos(self, *, accepts: bool) -> list[int]:
        """To select on for reading, if it `accepts` now."""
        fds = [tether.fileno() for tether in self._waiting]
        return [*fds, self._listener.fileno()] if accepts and self._may_accept(self._now_s()) else fds

    def next_due_s(self) -> float | None:
        """Monotonic seconds when `look` has something to do, though nothing may have come."""
        tell = [self._log_at_s] if self._bad else []
        if not self._waiting:
            return min(tell, default=None)
        came = list(self._waiting.values())
        silent_at = came[-1] + SILENT_S
        dues = [came[0] + REGISTER_S, *tell]
        return min([*dues, silent_at] if silent_at > self._now_s() and len(came) < MOST_WAITING else dues)

    def look(self, *, accepts: bool) -> tuple[RankTether, RankRegister] | None:
        """Hear who waits, and ask the next one in if it `accepts`; the rank that has registered, with its message."""
        now = self._now_s()
        if accepts and self._may_accept(now):
            tether = self._accept()
            if tether is not None:
                self._waiting[tether] = now
        for tether, came in list(self._waiting.items()):
            try:
                register = _registration(tether, is_late=now >= came + REGISTER_S)
            except KvferryError as error:
                # Not a rank of ours, or one that said nothing: the door stays open for the next.
                self._complain(str(error))
                del self._waiting[tether]
                tether.refuse(error)
                tether.close()
                continue
            if register is not None:
                del self._waiting[tether]
                self._tell(now)
                return tether, register
        self._tell(now)
        return None

    def close(self) -> None:
        """Nobody is let in any more; who waits finds another worker. Idempotent."""
        if self.is_open:
            self.is_open = False
            self._listener.close()
            for tether in self._waiting:
                tether.close()
            self._waiting.clear()
            self._tell(self._log_at_s)

    def _may_accept(self, now: float) -> bool:
        if not self._waiting:
            return self.is_open
        newest = next(reversed(self._waiting.values()))
        return self.is_open and now >= newest + SILENT_S and len(self._waiting) < MOST_WAITING

    def _complain(self, text: str) -> None:
        self._bad += 1
        self._last_bad = text

    def _tell(self, now: float) -> None:
        """One line a second at most: whoever knocks in a loop must not fill the disk."""
        if not self._bad or now < self._log_at_s:
            return
        if self._bad == 1:
            log.warning("%s", self._last_bad)
        else:
            log.warning("%d bad connections to rank %d, the last: %s", self._bad, self._rank, self._last_bad)
        self._bad = 0
        self._log_at_s = now + LOG_BAD_S

    def _accept(self) -> RankTether | None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return None  # another spare of this rank was faster
        tether = RankTether(connection)
        if tether.uid not in (os.getuid(), 0):
            self._complain(f"refused a connection of user {tether.uid} on the socket of rank {self._rank}")
            tether.close()
            return None
        if tether.ended:  # its process is gone already, whatever it may have written before
            tether.close()
            return None
        return tether


def _registration(tether: RankTether, *, is_late: bool) -> RankRegister | None:
    """What this connection said if it registered; None if it said nothing yet. KvferryError if it never will."""
    messages = tether.receive()
    if messages:
        first, *rest = messages
        if not isinstance(first, RankRegister) or rest:
            raise RemoteProtocolError("message.unexpected", "a tether begins with rank.register alone")
        return first
    if tether.ended:
        raise LostError("register.rank", "a connection ended before it registered")
    if is_late:
        raise RemoteProtocolError("message.unexpected", f"no rank.register within {REGISTER_S:g} s")
    return None
