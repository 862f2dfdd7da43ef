"""The daemon's part, played: it seats every worker that asks, and plans what it is told to plan.

A thread of its own talks to the workers, so that links stay alive whatever the items do meanwhile. With a daemon
of our own an item may name slots, blocks and generations as no real one would, and hears each outcome itself.
"""

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import zmq

from kvferry.net.paths import RunDir
from kvferry.proto.codec import pack, unpack
from kvferry.proto.columns import pack_u8, pack_u32, pack_u64, u8, u64
from kvferry.proto.control import Attach, Attached, Hello, Welcome
from kvferry.proto.errors import LostError
from kvferry.proto.hot import Done, Plan
from kvferry.proto.ids import BootId, LinkId, make_job_id
from kvferry.proto.layout import slot_bytes
from kvferry.proto.link import Link, unpack_frame
from kvferry.proto.outcome import Kind, Outcome
from kvferry.proto.schema import Message
from kvferry.proto.version import PROTOCOL_MAJOR, PROTOCOL_MINOR

TURN_MS: Final = 10  # how often links are ticked when nothing comes


class PlayedDaemon:
    """One boot of a daemon in this process. Its methods are for one thread, the runner's."""

    def __init__(self, run_dir: RunDir) -> None:
        self.boot = secrets.randbits(23) | 1
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.bind(run_dir.daemon_endpoint)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(run_dir.tether))
        self._listener.listen()
        self._tethers: list[socket.socket] = []
        self._links: dict[int, tuple[bytes, Link]] = {}
        self._changed = threading.Condition()
        self._to_send: list[tuple[int, Message]] = []
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._outcomes: dict[int, Outcome] = {}  # by ticket
        self._seated: list[int] = []  # links of workers that serve, the latest last
        self._is_over = False
        self._error = ""
        self._thread = threading.Thread(target=self._run, name="daemon", daemon=True)
        self._thread.start()

    # ---- the runner's thread ---------------------------------------------------------------------

    def plan(
        self, ticket: int, kind: Kind, blocks: Sequence[int], slots: Sequence[int], generations: Sequence[int]
    ) -> None:
        """Plan one job for the worker that was seated last."""
        message = Plan(
            planned_to=ticket,
            tickets=pack_u64([ticket]),
            jobs=pack_u64([make_job_id(BootId(self.boot), ticket)]),
            kinds=pack_u8([kind]),
            groups=pack_u8([0]),
            counts=pack_u32([len(blocks)]),
            slots=pack_u32(slots),
            generations=pack_u64(generations),
            blocks=pack_u32(blocks),
        )
        with self._changed:
            self._to_send.append((self._seated[-1], message))
        os.eventfd_write(self._wake, 1)

    def outcome(self, ticket: int, timeout_s: float) -> Outcome:
        """How a job ended, by its worker's word. LostError if there is none in time."""
        self._await(lambda: ticket in self._outcomes, timeout_s, f"no word on ticket {ticket}")
        return self._outcomes[ticket]

    def known(self, ticket: int) -> Outcome | None:
        """How a job ended, if that is known."""
        with self._changed:
            return self._outcomes.get(ticket)

    def close(self) -> None:
        """End it; idempotent."""
        self._is_over = True
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)
        self._thread.join(5.0)
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1

    def _await(self, is_so: Callable[[], bool], timeout_s: float, otherwise: str) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._error or is_so(), timeout_s):
                raise LostError("check.daemon", f"{otherwise} within {timeout_s:.1f} s")
            if self._error:
                raise LostError("check.daemon", self._error)

    # ---- its own thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_over:
                self._turn()
        except Exception as error:  # told by whoever waits for something
            with self._changed:
                self._error = f"the played daemon ended: {type(error).__name__}: {error}"
                self._changed.notify_all()
        finally:
            self._router.close(0)
            self._listener.close()
            for tether in self._tethers:
                tether.close()
            self._context.term()

    def _turn(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        for fd in (self._listener.fileno(), self._wake):
            poller.register(fd, zmq.POLLIN)
        ready = dict(poller.poll(TURN_MS))
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        if self._listener.fileno() in ready:
            self._tethers.append(self._listener.accept()[0])
        while int(self._router.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            identity, raw = self._router.recv_multipart()
            frame = unpack_frame(raw)
            _, link = self._links.setdefault(frame.link, (identity, Link(LinkId(frame.link))))
            for body in link.receive(frame, time.monotonic_ns()):
                self._take(frame.link, unpack(body))
        with self._changed:
            to_send, self._to_send = self._to_send, []
        for link_id, message in to_send:
            self._links[link_id][1].send(pack(message), time.monotonic_ns())
        for identity, link in self._links.values():
            if not link.lost:
                link.tick(time.monotonic_ns())
            for raw in link.outgoing():
                self._router.send_multipart([identity, raw])

    def _take(self, link: int, message: Any) -> None:
        with self._changed:
            match message:
                case Hello():
                    self._to_send.append(
                        (link, Welcome(major=PROTOCOL_MAJOR, minor=PROTOCOL_MINOR, boot=self.boot, tp_size=1))
                    )
                case Attach():
                    slots = message.pool_bytes // slot_bytes(message.payload_bytes[0])
                    self._to_send.append((link, Attached(slots=slots)))
                    self._seated.append(link)
                case Done():
                    rows = zip(u64(message.jobs).tolist(), u8(message.outcomes).tolist(), strict=True)
                    self._outcomes |= {job & ((1 << 40) - 1): Outcome(outcome) for job, outcome in rows}
                case _:
                    pass  # drained: nothing is kept over boots here; gone: the runner sees its process end
            self._changed.notify_all()
