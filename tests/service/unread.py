"""Places to write to that nobody reads: gone readers, full disks, and readers that live and read no more."""

import os
import pty
import socket
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple


class Place(NamedTuple):
    """Two descriptors. -1: there is no such end."""

    writing: int
    reading: int


def fill(fd: int) -> None:
    """Write to a pipe or terminal until nothing more is taken; it still waits for whoever else has it."""
    own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    for size in (4096, 1):
        with suppress(BlockingIOError):
            while True:
                os.write(own, b"x" * size)
    os.close(own)


def drain(fd: int) -> bytes:
    """All that is there to be read."""
    os.set_blocking(fd, False)
    found = b""
    with suppress(BlockingIOError):
        while more := os.read(fd, 1 << 16):
            found += more
    return found


@contextmanager
def closed_pipe() -> Iterator[Place]:
    """Its reader is gone, as of `up | head`."""
    reading, writing = os.pipe()
    os.close(reading)
    yield Place(writing, -1)
    os.close(writing)


@contextmanager
def full_disk() -> Iterator[Place]:
    """No space left."""
    writing = os.open("/dev/full", os.O_WRONLY)
    yield Place(writing, -1)
    os.close(writing)


@contextmanager
def full_pipe() -> Iterator[Place]:
    """A log shipper that hangs."""
    reading, writing = os.pipe()
    fill(writing)
    yield Place(writing, reading)
    os.close(reading)
    os.close(writing)


@contextmanager
def full_socket() -> Iterator[Place]:
    """A journal that hangs."""
    writing, reading = socket.socketpair()
    with writing, reading:
        with suppress(BlockingIOError):
            while True:
                writing.send(b"x" * 4096, socket.MSG_DONTWAIT)
        yield Place(writing.fileno(), reading.fileno())


@contextmanager
def paused_terminal() -> Iterator[Place]:
    """Ctrl-S."""
    reading, writing = pty.openpty()
    termios.tcflow(writing, termios.TCOOFF)
    yield Place(writing, reading)
    os.close(reading)
    os.close(writing)
