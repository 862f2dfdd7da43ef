"""The worker's end of a rank's tether: a plain unix stream, messages in order, descriptors beside them.

Never blocks: what the kernel does not take yet waits in a buffer. The end of the stream is a notice of the
rank's death and is seen as `ended`.
"""

import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from kvferry.proto import limits
from kvferry.proto.codec import unpack
from kvferry.proto.control import Refused
from kvferry.proto.errors import KvferryError
from kvferry.proto.schema import Message
from kvferry.proto.tether import Deframer, frame

READ_BYTES: Final = 256 << 10
READS_A_TURN: Final = 64  # then the loop looks at its other sockets again
MAX_FDS: Final = limits.MAX_HANDLES + 1  # and the kernel's own bound is 253 a message
_PEERCRED: Final = struct.Struct("3i")


class RankTether:
    """One accepted connection of a rank."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._deframer = Deframer()
        self._unsent: deque[memoryview] = deque()
        self.fds: list[int] = []  # descriptors that came; whoever takes them closes them
        self.takes_fds = True
        self.ended = False
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
        self.pid, self.uid, _ = _PEERCRED.unpack(raw)
        # Readable when the rank is dead, also if a child of it still holds this connection open.
        self.pidfd = -1
        try:
            self.pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            self.ended = True
        except (OSError, OverflowError, ValueError):
            pass  # its number means nothing here (another pid namespace says 0): the stream's end must do

    def fileno(self) -> int:
        """For a poller."""
        return self._socket.fileno()

    @property
    def wants_to_write(self) -> bool:
        """Whether `flush` would have something to do."""
        return bool(self._unsent) and not self.ended

    def receive(self) -> list[Any]:
        """Messages that have come; RemoteProtocolError on one that is none, and then nothing more is worth reading."""
        messages: list[Any] = []
        for _ in range(READS_A_TURN):
            try:
                data = self._read()
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.ended = True
                break
            messages += [unpack(body) for body in self._deframer.feed(data)]
        return messages

    def has_unread(self) -> bool:
        """Whether something can be received; notices the end of the stream without taking anything."""
        try:
            waiting = self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            waiting = b""
        self.ended = self.ended or not waiting
        return bool(waiting)

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send, or queue what the kernel does not take. `fds` only as long as nothing is queued."""
        if self.ended:
            return
        data = memoryview(frame(message))
        if fds:
            try:
                sent = socket.send_fds(self._socket, [data], list(fds), socket.MSG_NOSIGNAL)
            except OSError:
                self.ended = True
                return
            data = data[sent:]
        self._unsent.append(data)
        self.flush()

    def refuse(self, error: KvferryError) -> None:
        """Say why this rank is not served; the caller closes."""
        self.send(Refused.of(error))

    def flush(self) -> None:
        """Hand queued bytes to the kernel."""
        while self.wants_to_write:
            try:
                sent = self._socket.send(self._unsent[0], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError:
                self.ended = True
                return
            if sent < len(self._unsent[0]):
                self._unsent[0] = self._unsent[0][sent:]
            else:
                self._unsent.popleft()

    def close_fds(self) -> None:
        """Close the descriptors that came."""
        for fd in self.fds:
            os.close(fd)
        self.fds = []

    def close(self) -> None:
        """Close the connection; idempotent."""
        self.ended = True
        self.close_fds()
        self._socket.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def _read(self) -> bytes:
        if not self.takes_fds:
            return self._socket.recv(READ_BYTES)
        data, fds, _, _ = socket.recv_fds(self._socket, READ_BYTES, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        self.fds += fds
        return data
