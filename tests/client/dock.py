"""A rank's worker played by a test over a real unix socket, with a real process to die."""

import mmap
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvferry import Directive, KVMemory, Outcome, RankClient
from kvferry.proto.codec import unpack
from kvferry.proto.columns import pack_u8, pack_u32, pack_u64
from kvferry.proto.page import PageReader
from kvferry.proto.tether import Deframer, RankRegister, RankRegistered, Words, frame

ONE_LOAD = Directive(1, loads=((1, (10, 11)),))


def until(question: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    end = time.monotonic() + timeout_s
    while not (answer := question()):
        assert time.monotonic() < end, f"not within {timeout_s} s"
        time.sleep(0.002)
    return answer


class Worker:
    """One accepted tether. Its process, for the rank's proof of death, is a sleeping child."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
        self.inbox: list[Any] = []
        self.fds: list[int] = []
        self._deframer = Deframer()

    def read(self, kind: type[Any], timeout_s: float = 5.0) -> Any:
        """The next message, which must be of this kind."""
        self.sock.settimeout(timeout_s)
        while not self.inbox:
            data, fds, _, _ = socket.recv_fds(self.sock, 1 << 16, 16)
            assert data, "the rank closed the tether"
            self.fds += fds
            self.inbox += [unpack(body) for body in self._deframer.feed(data)]
        message = self.inbox.pop(0)
        assert isinstance(message, kind), message
        return message

    def has_news(self) -> bool:
        """Whether the rank has said more."""
        return bool(self.inbox or select.select([self.sock], [], [], 0)[0])

    def say(self, message: Any) -> None:
        self.sock.sendall(frame(message))

    def register(self, number: int = 7, *, with_pidfd: bool = True) -> RankRegister:
        """Take the registration and serve the rank."""
        asked: RankRegister = self.read(RankRegister)
        self.asked = asked
        verdict = RankRegistered(worker=number, boot=1, pid=self.process.pid, mark_mode="word", slots=8)
        if with_pidfd:
            pidfd = os.pidfd_open(self.process.pid)
            socket.send_fds(self.sock, [frame(verdict)], [pidfd])
            os.close(pidfd)
        else:
            self.say(verdict)
        return asked

    def word(self, ticket: int, outcome: Outcome = Outcome.OK, failed: tuple[int, ...] = ()) -> None:
        zero = pack_u32([0])
        counts, blocks = pack_u32([len(failed)]), pack_u32(failed)
        self.say(Words(pack_u64([ticket]), pack_u8([1]), pack_u8([outcome]), zero, zero, counts, blocks))

    def page(self) -> PageReader:
        return PageReader(memoryview(mmap.mmap(self.fds[-1], 4096)))

    def die(self) -> None:
        """The process ends; its tether stays, as if a forked child held it."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.sock.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        while self.fds:
            os.close(self.fds.pop())


class Dock:
    """A rank's listener, and the workers it was given."""

    def __init__(self, run_dir: Path) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(run_dir / "rank-0.sock"))
        self.listener.listen(8)
        self.workers: list[Worker] = []

    def worker(self, timeout_s: float = 5.0) -> Worker:
        self.listener.settimeout(timeout_s)
        self.workers.append(Worker(self.listener.accept()[0]))
        return self.workers[-1]

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.listener.close()


@contextmanager
def attached(dock: Dock, tmp_path: Path, memory: KVMemory, **options: Any) -> Iterator[tuple[RankClient, Worker]]:
    """A rank client served by one worker."""
    found: list[Worker] = []

    def serve() -> None:
        found.append(dock.worker())
        found[0].register()

    thread = threading.Thread(target=serve)
    thread.start()
    rank = RankClient("engine", 0, world_size=1, memory=memory, run_dir=tmp_path, on_note=lambda _: None, **options)
    thread.join()
    try:
        yield rank, found[0]
    finally:
        for worker in dock.workers:
            worker.sock.close()
        rank.close()
