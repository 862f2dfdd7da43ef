"""The daemon's stream listener and the connections beside the links: their ends are the notices of death.

A peer connects here, sends its link id as u64 little-endian, and says nothing more. The kernel ends the
connection when the peer's process is gone, however it went. Never blocks.
"""

import logging
import socket
from collections import deque
from collections.abc import Callable
from typing import Final

from kvferry.net.peer import TETHER_HELLO
from kvferry.proto.ids import LinkId

log = logging.getLogger("kvferry.daemon")

# A closed link's tether is kept this long, so that its CLOSE frame comes before the tether's end.
TETHER_LINGER_NS: Final = 1_000_000_000
# A new tether names its link at once or is dropped after this.
TETHER_HELLO_NS: Final = 2_000_000_000


class Tethers:
    """The daemon's stream listener and the connections beside the links."""

    def __init__(self, path: str, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(512)
        self._listener.setblocking(False)
        self._nameless: dict[socket.socket, int] = {}  # accepted, link id not read yet -> since when
        self._of: dict[LinkId, socket.socket] = {}
        self._closing: deque[tuple[int, socket.socket]] = deque()

    def fileno(self) -> int:
        return self._listener.fileno()

    def has(self, link: LinkId) -> bool:
        """Whether the tether of `link` stands; looks for one that has just come."""
        if link not in self._of:
            self.accept(self._now_ns())
        return link in self._of

    def accept(self, now_ns: int) -> None:
        """Take all waiting connections and read which links they belong to."""
        while True:
            try:
                conn, _ = self._listener.accept()
            except BlockingIOError:
                break
            except OSError as error:  # out of descriptors: the connection waits, the daemon goes on
                log.warning("cannot accept a tether: %s", error)
                break
            conn.setblocking(False)
            self._nameless[conn] = now_ns
        for conn in list(self._nameless):
            self._name(conn, now_ns)

    def _name(self, conn: socket.socket, now_ns: int) -> None:
        try:
            said = conn.recv(TETHER_HELLO.size)
        except BlockingIOError:
            if now_ns - self._nameless[conn] < TETHER_HELLO_NS:
                return
            said = b""
        except OSError:
            said = b""
        del self._nameless[conn]
        link = LinkId(TETHER_HELLO.unpack(said)[0]) if len(said) == TETHER_HELLO.size else LinkId(0)
        if not link or link in self._of:
            conn.close()
            return
        self._of[link] = conn

    def ended(self, readable: set[int]) -> list[LinkId]:
        """Links whose tether, one of the `readable` descriptors, is at its end."""
        return [link for link, conn in self._of.items() if conn.fileno() in readable and _at_end(conn)]

    def drop(self, link: LinkId, now_ns: int) -> None:
        """Let go of a link's tether, a little later."""
        conn = self._of.pop(link, None)
        if conn is not None:
            self._closing.append((now_ns + TETHER_LINGER_NS, conn))

    def tick(self, now_ns: int) -> None:
        """Close what has lingered long enough."""
        if self._nameless:
            self.accept(now_ns)
        while self._closing and self._closing[0][0] <= now_ns:
            self._closing.popleft()[1].close()

    def next_due_ns(self) -> int | None:
        due = [at for at, _ in list(self._closing)[:1]]
        due += [since + TETHER_HELLO_NS for since in self._nameless.values()]
        return min(due, default=None)

    def filenos(self) -> list[int]:
        """Descriptors to poll beside the listener's."""
        return [conn.fileno() for conn in (*self._of.values(), *self._nameless)]

    def close(self) -> None:
        for conn in (self._listener, *self._of.values(), *self._nameless, *(c for _, c in self._closing)):
            conn.close()


def _at_end(conn: socket.socket) -> bool:
    try:
        return conn.recv(64) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
