"""Where our words go, and never a wait for whoever should read them: what finds no room is dropped and counted.

    a line ──▶ Outlet ──▶ is there room? ──▶ written; before it, if any were lost: "12 lines were dropped here"
                              └── no, or nobody is there, or the disk is full ──▶ dropped

Who reads our log may live and read no more: a hung log shipper, a paused terminal, a stuck log driver. Then a plain
write waits, for ever, and with it a daemon or a worker amid a load. Nor may we set O_NONBLOCK on what we were given: it
belongs to the open file, which others hold too. So each kind is written to in the way that does not wait there:

- a pipe, a terminal: opened once more, which makes an open file of our own, and that one is told not to wait. Another
  user's terminal (`su`) may be opened as /dev/tty, if it is the one that we were started from;
- a socket: it is asked not to, with each send;
- a file, a null device: plainly. Nobody reads at the other end, and opened again a file would begin at its start;
- what may not be opened again: asked for room first. A pipe that has any takes PIPE_BUF bytes at once, unless another
  process takes that room between question and write. How much a terminal has nobody says: that one may make us wait.
"""

import contextlib
import fcntl
import functools
import io
import os
import select
import socket
import stat
from collections.abc import Callable
from typing import Final, TextIO

from kvferry.units import counted

CHUNK_BYTES: Final = select.PIPE_BUF  # what a pipe takes whole or not at all; a file takes all at once
NEWLINE: Final = b"\n"
TIOCGDEV: Final = 0x80045432  # asm-generic/ioctls.h: which terminal it is, under whatever name it was opened


class Outlet(io.RawIOBase):
    """A binary stream over a descriptor that it does not own. Each write is taken to be whole lines."""

    def __init__(self, fd: int) -> None:
        self.name = fd  # as files that were opened by number are called
        self._fd = fd
        self._ours = contextlib.ExitStack()  # what we have opened
        self._send = _way(fd, self._ours)
        self._dropped = 0  # lines since the last that went out
        self._is_torn = False  # the reader has the beginning of a line of which the rest was dropped

    def write(self, data: "bytes | bytearray | memoryview", /) -> int:  # type: ignore[override]
        """All of it, or as much as there is room for; never waits, never fails."""
        text = bytes(data)
        if (self._dropped or self._is_torn) and self._put(self._note()):
            self._dropped, self._is_torn = 0, False
        if self._dropped or not self._put(text):
            self._dropped += text.count(NEWLINE)
        return len(text)

    def close(self) -> None:
        """Close what is ours of it."""
        self._ours.close()
        super().close()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def _note(self) -> bytes:
        lines = counted(self._dropped, "line was", "lines were")
        text = f"kvferry[{os.getpid()}]: {lines} dropped here, which nobody took\n" if self._dropped else ""
        return (NEWLINE if self._is_torn else b"") + text.encode()

    def _put(self, data: bytes) -> bool:
        """Whether all of it went out."""
        at = 0
        try:
            while at < len(data) and (taken := self._send(data[at:])):
                at += taken
        except OSError:  # no room, nobody there, a full disk
            pass
        if at < len(data):
            self._is_torn = self._is_torn or (at > 0 and data[at - 1 : at] != NEWLINE)
        return at == len(data)


def over(fd: int) -> TextIO:
    """A text stream like sys.stderr that waits for nobody."""
    return io.TextIOWrapper(Outlet(fd), encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _way(fd: int, ours: contextlib.ExitStack) -> Callable[[bytes], int]:
    """How to write to what `fd` is without a wait: bytes to how many were taken; 0 or OSError if none were."""
    mode = os.fstat(fd).st_mode
    if stat.S_ISSOCK(mode):
        sock = ours.enter_context(socket.socket(fileno=os.dup(fd)))
        return lambda data: sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    if not stat.S_ISFIFO(mode) and not os.isatty(fd):
        return functools.partial(os.write, fd)  # whole: lines of several processes go into one file
    for name in (f"/proc/self/fd/{fd}", "/dev/tty"):
        with contextlib.suppress(OSError):
            own = os.open(name, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
            if _is_same(own, fd):
                ours.callback(os.close, own)
                return lambda data: os.write(own, data[:CHUNK_BYTES])
            os.close(own)
    return lambda data: os.write(fd, data[:CHUNK_BYTES]) if select.select([], [fd], [], 0)[1] else 0


def _is_same(own: int, fd: int) -> bool:
    """Whether both lead to one reader: a /dev/ptmx that is opened again is the end of another terminal."""
    with contextlib.suppress(OSError):  # no terminal
        return fcntl.ioctl(own, TIOCGDEV, bytes(4)) == fcntl.ioctl(fd, TIOCGDEV, bytes(4))
    return os.path.samestat(os.fstat(own), os.fstat(fd))
