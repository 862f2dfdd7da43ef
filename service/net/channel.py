"""The control channel between the supervisor and one child: small maps over a socket pair, never bytes of KV.

    supervisor ──{"event": "workers" | "reaped" | "drain" | "ping" | "stop"}──▶ child
    child ──{"event": "ready" | "failed" | "taken" | "kill" | "drained" | "pong"}──▶ supervisor

`ping` is answered by `pong` from the place where the child waits for work, so that an answer means that it does;
a worker that serves a rank is not asked. docs/protocol.md lists all of them.

A SOCK_SEQPACKET pair keeps packets whole and in order, and its end is the kernel's word that the other
side is gone: a child that reads it exits, so nothing outlives a killed supervisor. Nothing here blocks; what
the kernel will not take yet waits in a queue and goes with the next `flush`.
"""

import os
import socket
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

import msgpack

MAX_PACKET: Final = 128 << 10  # 64 ranks with four workers each, about 60 bytes a worker, leave a factor of eight


class Channel:
    """One end of a control channel."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._unsent: deque[bytes] = deque()
        self._is_heard = True  # the other side takes what we say
        self.ended = False  # the other side is gone, and all that it said was received

    @classmethod
    def pair(cls) -> "tuple[Channel, socket.socket]":
        """The supervisor's end, and the socket whose descriptor the child inherits."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), theirs

    @classmethod
    def inherited(cls, fd: int) -> "Channel":
        """The child's end, from the descriptor it was started with; later children do not inherit it."""
        os.set_inheritable(fd, False)
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        """For a poller."""
        return self._socket.fileno()

    @property
    def pending(self) -> bool:
        """Whether packets wait for the other side to read."""
        return bool(self._unsent)

    def send(self, event: Mapping[str, Any]) -> None:
        """Queue and try to send; dropped if the other side is gone."""
        self._unsent.append(msgpack.packb(dict(event), use_bin_type=True))
        self.flush()

    def flush(self) -> None:
        """Hand queued packets to the kernel; never blocks."""
        while self._unsent and self._is_heard:
            try:
                self._socket.send(self._unsent[0], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError:
                self._is_heard = False
                break
            self._unsent.popleft()
        if not self._is_heard:
            self._unsent.clear()

    def receive(self) -> list[dict[str, Any]]:
        """Events that have come; never blocks. Sets `ended` at the end of the channel."""
        events: list[dict[str, Any]] = []
        while not self.ended:
            try:
                packet = self._socket.recv(MAX_PACKET)
            except BlockingIOError:
                break
            except ConnectionResetError:  # told once, and before its last words: it ended without reading all of ours
                continue
            except OSError:
                packet = b""
            if not packet:
                self.ended, self._is_heard = True, False
                break
            events.append(msgpack.unpackb(packet))
        return events

    def close(self) -> None:
        """Close this end; idempotent."""
        self.ended, self._is_heard = True, False
        self._socket.close()
