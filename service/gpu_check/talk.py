"""A line between the runner and a child: a question, its answer, never longer than a deadline.

    runner                                            child
    Child.ask("name", timeout_s, **fields) ──frame──▶ serve({"name": deed})
           ◀──frame── {"answer": ...} or {"code": ..., "error": ...}

Frames are a length as u32 and a msgpack map, over a socket pair. The child ends with the line. Whatever the
child does, dies or hangs, `ask` ends: with the answer, ChildError, ChildDied, or TimeoutError.
"""

import contextlib
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, Final

import msgpack

from kvferry.process import end_with_parent, name_process
from kvferry.proto.errors import KvferryError

_LENGTH: Final = struct.Struct("<I")
_READ_BYTES: Final = 1 << 20
REAP_S: Final = 10.0  # after SIGKILL; a process in a driver call that the kernel cannot end is left and named

Deed = Callable[..., Any]


class ChildError(KvferryError):
    """The child did what it was asked, and that failed; `code` is its error's code, or its type's name."""


class ChildDied(KvferryError):  # noqa: N818  a state that lasts
    """The child is gone."""


class Line:
    """One end of a line."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._unread = bytearray()

    def send(self, message: Mapping[str, Any], timeout_s: float) -> None:
        """Hand a message over; TimeoutError if the other side does not read, OSError if it is gone."""
        body = msgpack.packb(dict(message), use_bin_type=True)
        self._socket.settimeout(timeout_s)
        self._socket.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self, timeout_s: float | None) -> dict[str, Any] | None:
        """The next message; None at the end of the line. TimeoutError."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if len(self._unread) >= _LENGTH.size:
                (size,) = _LENGTH.unpack_from(self._unread)
                end = _LENGTH.size + size
                if len(self._unread) >= end:
                    body = bytes(self._unread[_LENGTH.size : end])
                    del self._unread[:end]
                    return dict(msgpack.unpackb(body, strict_map_key=False))
            left = None if until is None else until - time.monotonic()
            if (left is not None and left <= 0) or not select.select([self._socket], [], [], left)[0]:
                raise TimeoutError("no answer")
            try:
                data = self._socket.recv(_READ_BYTES)
            except ConnectionError:
                data = b""
            if not data:
                return None
            self._unread += data

    def close(self) -> None:
        """End the line."""
        self._socket.close()


class Child:
    """One child process, from its start to its reap."""

    def __init__(self, name: str, module: str, arguments: Sequence[str] = (), stderr: IO[bytes] | None = None) -> None:
        self.name = name
        ours, theirs = socket.socketpair()
        self._line = Line(ours)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments, "--line-fd", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stderr=stderr,
                process_group=0,
            )
        self.pid = self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def ask(self, deed: str, timeout_s: float, **fields: Any) -> Any:
        """What came of a deed. ChildError, ChildDied; TimeoutError, after which the child is of no more use."""
        self.tell(deed, **fields)
        return self.answer(timeout_s)

    def tell(self, deed: str, **fields: Any) -> None:
        """Ask, and do not wait: `answer` does."""
        try:
            self._line.send({"deed": deed, "fields": fields}, 5.0)
        except OSError as error:
            raise ChildDied("check.child", f"{self.name} takes no question any more: {error}") from None

    def answer(self, timeout_s: float) -> Any:
        """The answer to the oldest question without one."""
        try:
            message = self._line.receive(timeout_s)
        except TimeoutError:
            raise TimeoutError(f"{self.name} gave no answer within {timeout_s:.1f} s") from None
        if message is None:
            raise ChildDied("check.child", f"{self.name} died{self._how()}")
        if "error" in message:
            raise ChildError(str(message["code"]), f"{self.name}: {message['error']}", str(message.get("fix", "")))
        return message["answer"]

    def kill(self) -> bool:
        """SIGKILL and reap; whether it is gone."""
        with contextlib.suppress(OSError):
            self._process.kill()
        try:
            self._process.wait(REAP_S)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> bool:
        """End the line, which ends a child in good order within a moment, or the child; whether it is gone."""
        self._line.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return self.kill()
        return True

    def _how(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(1.0)
            return f" of signal {-status}" if status < 0 else f" with code {status}"
        return ""


def serve(name: str, line_fd: int, deeds: Mapping[str, Deed]) -> None:
    """A child's life: do what is asked until the line ends."""
    end_with_parent()
    name_process(name)
    os.set_inheritable(line_fd, False)
    line = Line(socket.socket(fileno=line_fd))
    while (message := line.receive(None)) is not None:
        try:
            answer = {"answer": deeds[message["deed"]](**message["fields"])}
        except KvferryError as error:
            answer = {"error": error.text, "code": error.code, "fix": error.fix}
        except Exception as error:  # told where it is judged; the child lives on
            answer = {"error": f"{type(error).__name__}: {error}", "code": type(error).__name__}
        line.send(answer, 30.0)
