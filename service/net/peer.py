"""The connecting end of a link: a ZeroMQ DEALER, the tether beside it, and the numbers (`proto.link`).

Clients, workers and the CLI reach the daemon through this. Nothing here blocks but `wait`. One owner at
a time: callers that share a Peer between threads hold a lock around it.

    peer = Peer(run_dir, link_id)      LostError if nobody listens
    peer.send(message); peer.flush()
    for message in peer.receive(): ...
    peer.alive                         False once the tether ended or the link was given up
"""

import socket
import struct
import time
from collections.abc import Callable
from typing import Any, Final

import zmq

from kvferry.net.paths import RunDir
from kvferry.proto.codec import pack, unpack
from kvferry.proto.control import Refused
from kvferry.proto.errors import LostError, RemoteProtocolError
from kvferry.proto.ids import LinkId
from kvferry.proto.link import FrameKind, Link, unpack_frame
from kvferry.proto.schema import Message

# First bytes on a daemon tether: which link it belongs to.
TETHER_HELLO: Final = struct.Struct("<Q")
_PEERCRED: Final = struct.Struct("3i")


def context() -> "zmq.Context[zmq.Socket[bytes]]":
    """The process's one ZeroMQ context (one I/O thread)."""
    return zmq.Context.instance()


class Peer:
    """One open link to the daemon, seen from the connecting side."""

    def __init__(self, run_dir: RunDir, link: LinkId, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.link = Link(link)
        self.refusal: Refused | None = None  # why the other end closed the link, if it said so
        self.bad_messages = 0
        self.pid = 0  # of the daemon; 0 if it is in another pid namespace
        self._now_ns = now_ns
        self._tether = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._tether.setblocking(False)
            self._tether.connect(str(run_dir.tether))
            self._tether.send(TETHER_HELLO.pack(link))
            self.pid = _PEERCRED.unpack(self._tether.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size))[
                0
            ]
        except OSError as error:
            self._tether.close()
            raise LostError("daemon.lost", f"no daemon at {run_dir.tether}: {error.strerror}") from None
        self._socket: zmq.Socket[bytes] = context().socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = 0  # the link's own window is the bound
        # A new daemon behind the same path knows nothing of this link: never reconnect by stealth.
        self._socket.reconnect_ivl = -1
        self._socket.connect(run_dir.daemon_endpoint)
        self.closed = False

    @property
    def alive(self) -> bool:
        """Whether the other end still stands, as far as the kernel has told us."""
        return not (self.closed or self.link.lost)

    def fileno(self) -> int:
        """ZeroMQ's edge-triggered descriptor: after it fires, call `receive` until it gives nothing."""
        return int(self._socket.getsockopt(zmq.FD))

    def tether_fileno(self) -> int:
        """Readable when the daemon is gone."""
        return self._tether.fileno()

    @property
    def zmq_socket(self) -> "zmq.Socket[bytes]":
        """For a `zmq.Poller`."""
        return self._socket

    def send(self, message: Message) -> bool:
        """Queue a message; False if the window is full or the link lost. `flush` puts it on the wire."""
        return self.link.send(pack(message), self._now_ns())

    def flush(self) -> None:
        """Hand queued frames to ZeroMQ; never blocks."""
        if self.closed:
            return
        for frame in self.link.outgoing():
            try:
                self._socket.send(frame, zmq.DONTWAIT)
            except zmq.Again:
                return  # not connected yet or full: the link repeats it
            except zmq.ZMQError:
                self.close()
                return

    def receive(self) -> list[Any]:
        """Messages that have come in order; never blocks. Also notices the tether's end."""
        if self.closed:
            return []
        messages: list[Any] = []
        while True:
            try:
                raw = self._socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                break
            except zmq.ZMQError:
                self.close()
                return messages
            try:
                messages += self._take(raw)
            except RemoteProtocolError:
                self.bad_messages += 1
        if self._tether_ended():
            self.close()
        return messages

    def tick(self) -> None:
        """Repeat, acknowledge, give up; then flush."""
        self.link.tick(self._now_ns())
        self.flush()

    def wait(self, timeout_s: float) -> bool:
        """Wait for something to receive; False at the timeout. Returns at once if the link is over."""
        if self.closed:
            return True
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._tether.fileno(), zmq.POLLIN)
        return bool(poller.poll(int(max(timeout_s, 0) * 1000)))

    def close(self) -> None:
        """Drop the link; idempotent."""
        if not self.closed:
            self.closed = True
            self._socket.close(0)
            self._tether.close()

    def _take(self, raw: bytes) -> list[Any]:
        frame = unpack_frame(raw)
        if frame.link != self.link.id:
            raise RemoteProtocolError("frame.link", f"link {frame.link:x}; this is {self.link.id:x}")
        if frame.kind is FrameKind.CLOSE:
            message = unpack(frame.body) if frame.body else None
            self.refusal = message if isinstance(message, Refused) else None
            self.link.lost = True
            return []
        return [unpack(body) for body in self.link.receive(frame, self._now_ns())]

    def _tether_ended(self) -> bool:
        try:
            return self._tether.recv(64) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True
