"""One tether of a rank: a stream socket to its worker, without ever waiting once it stands.

attach(sock, RankRegister, fds)   sends the registration with its descriptors, waits for the verdict (bounded)
Tether                            queue, flush, receive: whole frames over a non-blocking socket
"""

import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

from kvferry.proto.codec import unpack
from kvferry.proto.control import Refused
from kvferry.proto.errors import LostError, RemoteProtocolError
from kvferry.proto.schema import Message
from kvferry.proto.tether import Deframer, RankRegister, RankRegistered, frame


class Tether:
    """A standing tether. Its end is a notice of the worker's death, never the proof."""

    def __init__(self, sock: socket.socket, deframer: Deframer, worker: int, pid: int) -> None:
        self.worker = worker
        self.pid = pid
        self.ended = False
        self._sock = sock
        self._deframer = deframer
        self._unsent = bytearray()
        sock.setblocking(False)

    def fileno(self) -> int:
        """Readable when the worker has said something, or is gone."""
        return self._sock.fileno()

    def queue(self, message: Message) -> None:
        """Add a message to what `flush` sends."""
        self._unsent += frame(message)

    def flush(self) -> None:
        """Send what the socket takes now; the rest goes with the next call."""
        while self._unsent and not self.ended:
            try:
                sent = self._sock.send(self._unsent)
            except BlockingIOError:
                return
            except OSError:
                return  # the end is noticed where it is read: words may still lie before it
            del self._unsent[:sent]

    def receive(self) -> list[Any]:
        """Messages that have come. RemoteProtocolError if the worker does not speak our language."""
        bodies = []
        while not self.ended:
            try:
                data = self._sock.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.ended = True
                break
            bodies += self._deframer.feed(data)
        return [unpack(body) for body in bodies]

    def drain(self, timeout_s: float) -> list[Any]:
        """What the worker still says until it closes its end, at most for so long. For the orderly end only."""
        until = time.monotonic() + timeout_s
        messages: list[Any] = []
        while not self.ended and (left := until - time.monotonic()) > 0:
            try:
                poller = select.poll()
                poller.register(self._sock.fileno(), select.POLLIN)
                poller.poll(left * 1000)
                messages += self.receive()
            except (OSError, ValueError, RemoteProtocolError):
                break
        return messages

    def close(self) -> None:
        """Drop it; idempotent."""
        self.ended = True
        self._sock.close()


def attach(sock: socket.socket, register: RankRegister, fds: Sequence[int], timeout_s: float) -> tuple[Tether, int]:
    """Show a worker our memory and wait for its verdict; the tether, and a pidfd of the worker.

    Errors: RefusedError with the worker's reason; LostError if it goes away, is silent past `timeout_s`, or
    cannot be watched: a worker whose death we could not prove may not hold our blocks.
    """
    until = time.monotonic() + timeout_s
    _check_peer(sock)
    raw = frame(register)
    sent = socket.send_fds(sock, [raw], list(fds))
    if sent < len(raw):  # nothing to send is no reason to ask: a worker that refused at once has closed by now
        sock.sendall(raw[sent:])
    deframer = Deframer()
    passed: list[int] = []
    try:
        while True:
            left = until - time.monotonic()
            if left <= 0:
                raise LostError("daemon.lost", f"no verdict of the worker within {timeout_s:.1f} s")
            sock.settimeout(left)
            try:
                data, more, _, _ = socket.recv_fds(sock, 1 << 16, 4)
            except TimeoutError:
                continue
            passed += more
            if not data:
                raise LostError("daemon.lost", "the worker closed the tether without a verdict")
            for body in deframer.feed(data):
                verdict = unpack(body)
                if isinstance(verdict, Refused):
                    raise verdict.error()
                if not isinstance(verdict, RankRegistered):
                    raise RemoteProtocolError("message.unexpected", f"{verdict.TAG} in place of a verdict")
                pidfd = passed.pop(0) if passed else _open_pidfd(sock, verdict.pid)
                return Tether(sock, deframer, verdict.worker, verdict.pid), pidfd
    finally:
        for fd in passed:
            os.close(fd)


def _peer_credentials(sock: socket.socket) -> tuple[int, int, int]:
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", raw)
    return pid, uid, gid


def _check_peer(sock: socket.socket) -> None:
    """Our memory is shown to our own user, or to root, and to nobody else."""
    _, uid, _ = _peer_credentials(sock)
    if uid not in (os.getuid(), 0):
        raise LostError("daemon.lost", f"the rank socket belongs to user {uid}; this engine runs as {os.getuid()}")


def _open_pidfd(sock: socket.socket, pid: int) -> int:
    """A pidfd of the worker by the number it gave, if we can know that number to mean the same to us."""
    # The peer of this socket is whoever called listen, the supervisor: no proof of the worker's death. But a
    # peer number of 0 says that they live in another pid namespace.
    if _peer_credentials(sock)[0] == 0:
        raise LostError("daemon.lost", f"worker {pid} passed no pidfd and lives in another pid namespace")
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise LostError("daemon.lost", f"cannot watch worker {pid}: {error.strerror}") from None
