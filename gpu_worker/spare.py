"""A worker process from its start to the rank it serves.

    spare ──accept──▶ registering ──Attached──▶ serving (`loop.py`) ──▶ exit
      │                    └─ anything wrong: Refused, exit
      └─ stop, daemon gone: exit

A worker serves one rank and then exits: whatever it mapped goes with the process, so no other engine shares
its fate and no cleanup code can fail. Every wait has a bound, but the spare's for its rank.
"""

import gc
import logging
import os
import secrets
import select
import socket
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

from kvferry.gpu_worker.api import WorkerSettings
from kvferry.gpu_worker.copies import Copies
from kvferry.gpu_worker.core import WorkerCore
from kvferry.gpu_worker.devices.base import Device
from kvferry.gpu_worker.loop import Service, has_news, say_goodbye
from kvferry.gpu_worker.pool import Pool
from kvferry.gpu_worker.rank_link import RankTether
from kvferry.gpu_worker.registration import RankMemory, take_up
from kvferry.net.channel import Channel
from kvferry.net.paths import RunDir
from kvferry.net.peer import Peer
from kvferry.proto.control import Attached, Hello, Refused, Welcome
from kvferry.proto.errors import KvferryError, LostError, RefusedError, RemoteProtocolError
from kvferry.proto.ids import LinkId
from kvferry.proto.tether import RankRegister, RankRegistered

log = logging.getLogger("kvferry.worker")

ANSWER_S: Final = 4.0  # the daemon's welcome and verdict; the rank client waits for five
REGISTER_S: Final = 2.0  # a connection that shows nothing by then keeps others waiting


@dataclass(frozen=True, slots=True)
class Options:
    """What a worker is started with."""

    run_dir: RunDir
    rank: int
    worker: int
    listen_fd: int
    control_fd: int


class Stopped(Exception):  # noqa: N818  not an error: the way out of a wait
    """The supervisor said stop or is gone, or the daemon is, while nobody is served."""


class Worker:
    """One worker process. `run` returns its exit code."""

    def __init__(self, options: Options, device: Device) -> None:
        self._options = options
        self._device = device
        self._control = Channel.inherited(options.control_fd)
        self._listener: socket.socket | None = socket.socket(fileno=options.listen_fd)
        self._listener.setblocking(False)
        self._pool = Pool(options.run_dir.pool(options.rank))
        device.register_host(self._pool.base, self._pool.nbytes)
        self._peer = Peer(options.run_dir, LinkId(secrets.randbits(63) | 1))
        self._tether: RankTether | None = None
        self._boot = 0
        self._inbox: deque[Any] = deque()  # the daemon's messages that nobody has taken yet

    # ---- the life ------------------------------------------------------------------------------

    def run(self) -> int:
        """Be a spare, then serve one rank."""
        try:
            self._greet_daemon()
            self._control.send({"event": "ready"})
            register = self._await_rank()
            memory, slots = self._admit(register)
        except Stopped:
            return 0
        except KvferryError as error:
            log.warning("%s", error)
            self._refuse(error)
            return 0
        return self._serve(memory, slots)

    def _greet_daemon(self) -> None:
        self._peer.send(Hello(role="worker", pid=os.getpid()))
        welcome = self._await_answer(Welcome)
        self._boot = welcome.boot

    def _await_rank(self) -> RankRegister:
        """Accept connections until one registers; its RankRegister. From then on nobody else is accepted."""
        while True:
            self._wait(None)
            self._look_around()
            tether = self._accept()
            if tether is None:
                continue
            self._tether = tether
            try:
                register = self._first_message(tether)
            except KvferryError as error:
                # Not a rank of ours, or one that said nothing: the door stays open for the next.
                log.warning("%s", error)
                tether.refuse(error)
                tether.close()
                self._tether = None
                continue
            assert self._listener is not None
            self._listener.close()
            self._listener = None
            self._control.send({"event": "taken", "engine": register.engine_id})
            return register

    def _accept(self) -> RankTether | None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return None  # another spare of this rank was faster
        tether = RankTether(connection)
        if tether.uid not in (os.getuid(), 0):
            log.warning("refused a connection of user %d on the socket of rank %d", tether.uid, self._options.rank)
            tether.close()
            return None
        if tether.ended:  # its process is gone already, whatever it may have written before
            tether.close()
            return None
        return tether

    def _first_message(self, tether: RankTether) -> RankRegister:
        deadline = time.monotonic() + REGISTER_S
        while True:
            messages = tether.receive()
            if messages:
                first, *rest = messages
                if not isinstance(first, RankRegister) or rest:
                    raise RemoteProtocolError("message.unexpected", "a tether begins with rank.register alone")
                return first
            if tether.ended:
                raise LostError("register.rank", "a connection ended before it registered")
            if time.monotonic() >= deadline:
                raise RemoteProtocolError("message.unexpected", f"no rank.register within {REGISTER_S:g} s")
            self._wait(deadline)
            self._look_around()

    def _admit(self, register: RankRegister) -> tuple[RankMemory, int]:
        """Map and check the rank's memory, ask the daemon, answer the rank; the memory and the slots to serve."""
        tether = self._tether
        assert tether is not None
        memory = take_up(register, tether.fds, self._options.rank, self._device)
        tether.close_fds()
        tether.takes_fds = False
        self._peer.send(memory.attach_message(self._options.worker, self._pool))
        attached = self._await_answer(Attached)
        return memory, attached.slots

    def _refuse(self, error: KvferryError) -> None:
        if self._tether is not None:
            self._tether.refuse(error)
            self._tether.close()
        say_goodbye(self._peer)

    # ---- serving -------------------------------------------------------------------------------

    def _serve(self, memory: RankMemory, slots: int) -> int:
        try:
            planners = memory.planners(self._pool, slots)
        except KvferryError as error:
            log.warning("%s", error)
            self._refuse(error)
            return 0
        group = memory.register.layout.groups[0]
        settings = WorkerSettings(
            payload_bytes=tuple(group.payload_bytes for group in memory.register.layout.groups),
            num_blocks=group.num_blocks,
            num_slots=slots,
        )
        tether = self._tether
        assert tether is not None
        core = WorkerCore(settings, memory.page, self._pool.headers(group.slot_bytes, slots))
        own_pidfd = os.pidfd_open(os.getpid())
        tether.send(
            RankRegistered(
                worker=self._options.worker,
                boot=self._boot,
                pid=os.getpid(),
                mark_mode=memory.register.mark_mode,
                slots=slots,
            ),
            fds=[own_pidfd],
        )
        os.close(own_pidfd)
        log.info(
            "serving rank %d of engine %r (pid %d): %d blocks, %d slots of %d bytes",
            self._options.rank, memory.register.engine_id, tether.pid, group.num_blocks, slots, group.slot_bytes,
        )  # fmt: skip
        gc.collect()
        gc.freeze()  # what stands now stands to the end: later collections pass it by
        return Service(self._peer, self._control, self._device, tether, core,
                       Copies(self._device, planners), self._inbox).run()  # fmt: skip

    # ---- waiting while nobody is served ----------------------------------------------------------

    def _await_answer(self, kind: type[Any]) -> Any:
        """The daemon's message of this type. RefusedError if it refuses, LostError if it does not answer."""
        deadline = time.monotonic() + ANSWER_S
        self._peer.flush()
        while True:
            while self._inbox:
                message = self._inbox.popleft()
                if isinstance(message, kind):
                    return message
                if isinstance(message, Refused):
                    raise message.error()
            if time.monotonic() >= deadline:
                raise LostError("daemon.lost", f"the daemon gave no answer within {ANSWER_S:g} s")
            self._wait(deadline)
            self._look_around()
            if self._tether is not None and not self._tether.has_unread() and self._tether.ended:
                raise LostError("register.rank", "the rank went away before it was served")

    def _wait(self, deadline: float | None) -> None:
        """Sleep until something may have happened or `deadline` (monotonic seconds) has come."""
        timeout = None if deadline is None else max(deadline - time.monotonic(), 0)
        due = self._peer.link.next_due_ns()
        if due is not None:
            until_due = max((due - time.monotonic_ns()) / 1e9, 0)
            timeout = until_due if timeout is None else min(timeout, until_due)
        if has_news(self._peer):
            return
        fds: list[Any] = [self._peer.fileno(), self._peer.tether_fileno(), self._control]
        if self._tether is not None:
            # What a rank says before it is served waits in its socket.
            if not self._tether.has_unread() or self._listener is not None:
                fds.append(self._tether)
        elif self._listener is not None:
            fds.append(self._listener)
        select.select(fds, [], [], timeout)

    def _look_around(self) -> None:
        """Take what daemon and supervisor said. Stopped or a refusal if there is nothing to wait for any more."""
        if any(event.get("event") == "stop" for event in self._control.receive()) or self._control.ended:
            raise Stopped
        self._inbox.extend(self._peer.receive())
        self._peer.tick()
        if not self._peer.alive:
            if self._peer.refusal is not None:
                raise self._peer.refusal.error()
            if self._tether is None:
                raise Stopped
            raise RefusedError("daemon.lost", "the daemon went away while this rank registered", "try again")
