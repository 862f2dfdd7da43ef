"""What a worker process meets, played by the test: a daemon (ROUTER and tether listener), a supervisor, a rank.

Nothing here is product code but the wire itself (`proto`), so that both ends of it are seen.
"""

import contextlib
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import zmq

from kvferry.gpu_worker import pool
from kvferry.net.channel import Channel
from kvferry.net.paths import RunDir
from kvferry.proto.codec import pack, unpack
from kvferry.proto.columns import pack_u8, pack_u32, pack_u64, u8, u64
from kvferry.proto.control import Attach, Attached, Drained, Hello, RankGone, Refused, Welcome
from kvferry.proto.hot import Cancel, Done, Plan
from kvferry.proto.ids import BootId, LinkId, make_job_id
from kvferry.proto.layout import Group, Handle, Layout, Region
from kvferry.proto.limits import PAGE_BYTES
from kvferry.proto.link import Link, unpack_frame
from kvferry.proto.outcome import Kind, Outcome
from kvferry.proto.page import PageWriter
from kvferry.proto.tether import Begin, Deframer, Probe, RankRegister, RankRegistered, Words, frame

ROOT = Path(__file__).parents[2]
PATIENCE_S = 10.0
WORKER_ID = 77
FIRST_BOOT = 5


def wait_for(ask, what: str, patience_s: float = PATIENCE_S):
    """The first true answer; asks again as things move, fails with `what` when patience ends."""
    deadline = time.monotonic() + patience_s
    while True:
        answer = ask()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"no {what} within {patience_s} s"


class FakeDaemon:
    """One boot of a daemon. It answers the link whose message was taken last."""

    def __init__(self, run_dir: RunDir, boot: int = FIRST_BOOT) -> None:
        self.boot = boot
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.linger = 0
        self.router.bind(run_dir.daemon_endpoint)
        run_dir.tether.unlink(missing_ok=True)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(run_dir.tether))
        self.listener.listen()
        self.tethers: list[socket.socket] = []
        self.links: dict[int, tuple[bytes, Link]] = {}
        self.link = 0  # whom `send` reaches
        self.inbox: list[tuple[int, object]] = []

    def turn(self) -> None:
        """Take and give what is there; waits a little if there is nothing."""
        poller = zmq.Poller()
        poller.register(self.router, zmq.POLLIN)
        poller.register(self.listener.fileno(), zmq.POLLIN)
        ready = dict(poller.poll(20))
        if self.listener.fileno() in ready:
            connection, _ = self.listener.accept()
            self.tethers.append(connection)
        if self.router in ready:
            identity, raw = self.router.recv_multipart()
            got = unpack_frame(raw)
            _, link = self.links.setdefault(got.link, (identity, Link(LinkId(got.link))))
            self.inbox += [(got.link, unpack(body)) for body in link.receive(got, time.monotonic_ns())]
        self.flush()

    def flush(self) -> None:
        for identity, link in self.links.values():
            link.tick(time.monotonic_ns())
            for raw in link.outgoing():
                self.router.send_multipart([identity, raw])

    def send(self, message) -> None:
        assert self.links[self.link][1].send(pack(message), time.monotonic_ns())
        self.flush()

    def take(self, kind):
        """The next message of this type, from whichever worker."""

        def ask():
            self.turn()
            for sender, message in self.inbox:
                if isinstance(message, kind):
                    self.inbox.remove((sender, message))
                    self.link = sender
                    return message
            return None

        return wait_for(ask, f"{kind.__name__} from a worker")

    def greet(self) -> Drained:
        """Welcome whichever worker says hello; what it says then."""
        assert self.take(Hello).role == "worker"
        self.send(Welcome(major=1, minor=1, boot=self.boot, tp_size=1))
        drained = self.take(Drained)
        assert drained.boot == self.boot
        return drained

    def settle(self) -> None:
        """Wait until the worker has taken all that it was sent."""

        def ask():
            self.turn()
            return not any(link.in_flight for _, link in self.links.values())

        wait_for(ask, "acknowledgement of a worker")

    def hang_up(self) -> None:
        """End all links and live on."""
        for tether in self.tethers:
            tether.close()
        self.tethers.clear()
        self.links.clear()

    def close(self) -> None:
        self.router.close(0)
        self.listener.close()
        self.hang_up()
        self.context.term()


class FakeRank:
    """The engine's side of one rank: a memfd "GPU", a shared page, a tether."""

    def __init__(
        self,
        run_dir: RunDir,
        num_blocks: int = 16,
        num_layers: int = 4,
        run: int = 4096,
        rank: int = 0,
        name: str = "kv",  # of its memory, as /proc shows it
    ) -> None:
        self.num_blocks, self.num_layers, self.run, self.rank = num_blocks, num_layers, run, rank
        nbytes = num_blocks * num_layers * run
        self.kv_fd = os.memfd_create(name)
        os.posix_fallocate(self.kv_fd, 0, nbytes)
        self.kv = np.frombuffer(mmap.mmap(self.kv_fd, nbytes), dtype=np.uint8).reshape(num_layers, num_blocks, run)
        self.page_fd = os.memfd_create("page")
        os.ftruncate(self.page_fd, PAGE_BYTES)
        self.page = PageWriter(memoryview(mmap.mmap(self.page_fd, PAGE_BYTES)))
        self.layout = Layout(
            handles=(Handle(kind="shm_fd", nbytes=nbytes),),
            groups=(
                Group(
                    regions=tuple(
                        Region(handle=0, offset=layer * num_blocks * run, stride=run, run=run, blocks=num_blocks)
                        for layer in range(num_layers)
                    ),
                    block_tokens=16,
                ),
            ),
        )
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(str(run_dir.rank(rank)))
        self.socket.settimeout(PATIENCE_S)
        self.deframer = Deframer()
        self.inbox: list = []
        self.worker_pidfd = -1
        self.told: list[tuple[int, Outcome]] = []  # words taken and not yet given by `word`

    def stamp(self, block: int, seed: int) -> np.ndarray:
        """Fill a block with a pattern of its own; the bytes."""
        pattern = np.random.default_rng(seed).integers(0, 256, (self.num_layers, self.run), dtype=np.uint8)
        self.kv[:, block] = pattern
        return pattern

    def registration(self, **changes) -> RankRegister:
        fields = {"engine_id": "e", "rank": self.rank, "world_size": 1, "layout": self.layout, "pid": os.getpid()}
        probe = Probe(handle=0, offset=0, expect=self.kv[0, 0, :64].tobytes())
        return RankRegister(**{**fields, "probes": (probe,), **changes})

    def register(self, fds=None, **changes) -> None:
        socket.send_fds(
            self.socket,
            [frame(self.registration(**changes))],
            [self.kv_fd, self.page_fd] if fds is None else fds,
        )

    def take(self, kind):
        """The next message of the worker, which is of this type."""
        while not self.inbox:
            data, fds, _, _ = socket.recv_fds(self.socket, 1 << 16, 4)
            if fds:
                self.worker_pidfd = fds[0]
            assert data, f"the tether ended; awaited {kind.__name__}"
            self.inbox += [unpack(body) for body in self.deframer.feed(data)]
        message = self.inbox.pop(0)
        assert isinstance(message, kind), message
        return message

    def begin(self, *tickets: int, ahead: int = 0) -> None:
        """Name tickets; with `ahead` the mark has not come so far yet."""
        mark = self.page.mark() + ahead if ahead else self.page.signal()
        self.send(Begin(mark=mark, tickets=pack_u64(tickets)))

    def word(self) -> tuple[int, Outcome]:
        """How the next ticket ended."""
        while not self.told:
            self.told += rows_of(self.take(Words))
        return self.told.pop(0)

    def hear(self) -> list:
        """What the worker has said by now."""
        while select.select([self.socket], [], [], 0)[0] and (data := self.socket.recv(1 << 16)):
            self.inbox += [unpack(body) for body in self.deframer.feed(data)]
        messages, self.inbox = self.inbox, []
        return messages

    def at_end(self) -> bool:
        """Wait for the end of the tether."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True

    def send(self, message) -> None:
        self.socket.sendall(frame(message))

    def close(self) -> None:
        self.socket.close()
        for fd in (self.kv_fd, self.page_fd, self.worker_pidfd):
            with contextlib.suppress(OSError):
                os.close(fd)


def rows_of(words: Words) -> list[tuple[int, Outcome]]:
    """Tickets and how they ended."""
    return list(zip(u64(words.tickets).tolist(), map(Outcome, u8(words.outcomes).tolist()), strict=True))


class Sidecar:
    """A run dir, a pool file, the fake daemon, and one real worker process."""

    def __init__(
        self, path: Path, pool_bytes: int = 1 << 20, num_ranks: int = 1, module: str = "kvferry.gpu_worker"
    ) -> None:
        self.module = module
        self.run_dir = RunDir.at(path)
        self.listeners: list[socket.socket] = []
        for rank in range(num_ranks):
            pool.remove(self.run_dir.pool(rank))
            pool.create(self.run_dir.pool(rank), pool_bytes, self.run_dir.instance)
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(self.run_dir.rank(rank)))
            listener.listen()
            self.listeners.append(listener)
        self.daemon = FakeDaemon(self.run_dir)
        self.processes: list[subprocess.Popen] = []
        self.controls: list[Channel] = []
        for rank in range(num_ranks):
            self.spawn(WORKER_ID + rank, rank)

    def spawn(self, worker_id: int = WORKER_ID, rank: int = 0) -> None:
        """Start a worker, a spare of a rank."""
        control, theirs = Channel.pair()
        self.controls.append(control)
        with theirs:
            self.processes.append(
                subprocess.Popen(
                    [
                        *(sys.executable, "-m", self.module, "--run-dir", str(self.run_dir.path)),
                        *("--rank", str(rank), "--worker", str(worker_id)),
                        *("--listen-fd", str(self.listeners[rank].fileno())),
                        *("--control-fd", str(theirs.fileno()), "--device", "cpu"),
                    ],
                    pass_fds=[self.listeners[rank].fileno(), theirs.fileno()],
                    cwd=ROOT,
                )
            )

    @property
    def worker(self) -> subprocess.Popen:
        return self.processes[0]

    @property
    def control(self) -> Channel:
        return self.controls[0]

    def hear(self, event: str, worker: int = 0) -> dict:
        """A worker's next word on its control channel, which is this one."""
        select.select([self.controls[worker]], [], [], PATIENCE_S)
        (said,) = self.controls[worker].receive()
        assert said["event"] == event
        return said

    def make_spare(self, worker: int = 0) -> None:
        """Let a worker greet the daemon and become ready."""
        self.daemon.greet()
        self.hear("ready", worker)

    def lose_daemon(self) -> None:
        """The daemon dies: the kernel ends its tethers, and nobody listens."""
        self.daemon.close()

    def start_daemon(self) -> None:
        """The next boot."""
        self.daemon = FakeDaemon(self.run_dir, self.daemon.boot + 1)

    def serve(self, rank: FakeRank, slots: int = 8, worker: int = 0) -> RankRegistered:
        """Let the rank register and the daemon agree."""
        rank.register()
        self.attach(slots)
        self.hear("taken", worker)
        return rank.take(RankRegistered)

    def attach(self, slots: int = 8) -> Attach:
        """Seat the worker that asks for it."""
        attach = self.daemon.take(Attach)
        assert attach.engine_id == "e"
        self.daemon.send(Attached(slots=slots))
        return attach

    def job(self, ticket: int) -> int:
        """The id that this boot gives to a ticket's job."""
        return make_job_id(BootId(self.daemon.boot), ticket)

    def plan(self, ticket: int, kind: Kind, blocks: list[int], slots: list[int], generation: int = 1) -> None:
        self.daemon.send(
            Plan(
                planned_to=ticket,
                tickets=pack_u64([ticket]),
                jobs=pack_u64([self.job(ticket)]),
                kinds=pack_u8([kind]),
                groups=pack_u8([0]),
                counts=pack_u32([len(blocks)]),
                slots=pack_u32(slots),
                generations=pack_u64([generation] * len(slots)),
                blocks=pack_u32(blocks),
            )
        )

    def wait_exit(self, patience_s: float = PATIENCE_S) -> int:
        """The worker's exit code; the daemon goes on acknowledging meanwhile."""

        def ask():
            self.daemon.turn()
            return self.worker.poll() is not None

        wait_for(ask, "exit of the worker", patience_s)
        return self.worker.returncode

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait()
        for control in self.controls:
            control.close()
        self.daemon.close()
        for rank, listener in enumerate(self.listeners):
            listener.close()
            pool.remove(self.run_dir.pool(rank))


__all__ = ["Begin", "Cancel", "Done", "FakeDaemon", "FakeRank", "RankGone", "Refused", "Sidecar", "Words"]
