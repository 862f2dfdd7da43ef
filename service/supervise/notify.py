"""What the service manager that started `kvferry up` is told, if one listens: systemd's notify protocol.

    READY=1      it serves, for the first time        STATUS=...   the words that `kvferry status` has for it
    WATCHDOG=1   its loop turns; once a second        STOPPING=1   it begins to end

Daemon and spares are watched by the supervisor (`pulse.py`); the supervisor itself by whoever is told here, who ends
one that falls silent and starts the next, warm. Datagrams to $NOTIFY_SOCKET, which no child of ours inherits: only we
speak for us. It never waits and never fails: nobody serves worse for a manager that does not listen, and one that is
only late is told with the next sign of life.
"""

import os
import socket
from collections.abc import MutableMapping
from typing import Final

NAMES: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
LONGEST_S: Final = 1.0  # between two signs of life, however patient the manager is


class Manager:
    """Whoever started us, or nobody."""

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        """Takes what is meant for us alone out of `environment`."""
        address, limit_us, pid = (environment.pop(name, "") for name in NAMES)
        # Abstract names are written with an @ for the zero byte.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.period_s = _period_s(limit_us, pid) if self._address else None  # None: nobody waits for signs of life
        self._lived_at = -LONGEST_S
        self._unsaid: dict[str, object] = {}

    def say(self, **words: object) -> None:
        """`READY=1` and the like, in one message."""
        if self._address:
            self._unsaid |= words
            self._send()

    def live(self, now_s: float) -> None:
        """A turn of the loop is a sign of life; told once in a period."""
        if self.period_s is not None and now_s - self._lived_at >= self.period_s / 2:
            self._lived_at = now_s
            self.say(WATCHDOG=1)
        elif self._unsaid:
            self._send()

    def _send(self) -> None:
        text = "\n".join(f"{name}={str(value).replace(chr(10), ' ')}" for name, value in self._unsaid.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.sendto(text.encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL, self._address)
        except BlockingIOError:  # it is there and has much to read
            return
        except (OSError, ValueError):  # nobody is there, or it is no address
            pass
        self._unsaid.clear()


def _period_s(limit_us: str, pid: str) -> float | None:
    """How often a sign of life is due; None if nobody waits for ours."""
    if not limit_us.isdecimal() or int(limit_us) == 0 or pid not in ("", str(os.getpid())):
        return None
    return min(int(limit_us) / 1e6 / 2, LONGEST_S)
