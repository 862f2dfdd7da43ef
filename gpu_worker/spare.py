"""A worker process from its start to the rank it serves.

    spare ──accept──▶ registering ──Attached──▶ serving (`loop.py`) ──▶ exit
      │                    └─ anything wrong: Refused, exit
      └─ stop, supervisor gone: exit

A worker serves one rank and then exits: whatever it mapped goes with the process, so no other engine shares
its fate and no cleanup code can fail. Every wait has a bound, but the spare's for its rank and for a daemon:
while none is there, who knocks waits at the door.
"""

import gc
import logging
import os
import select
import socket
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from kvferry.gpu_worker.api import WorkerSettings
from kvferry.gpu_worker.copies import Copies
from kvferry.gpu_worker.core import WorkerCore
from kvferry.gpu_worker.daemon_link import DaemonLink, LinkLost
from kvferry.gpu_worker.devices.base import Device, DeviceLost
from kvferry.gpu_worker.door import Door
from kvferry.gpu_worker.loop import ANSWER_S, EXIT_LOST, Service
from kvferry.gpu_worker.pool import Pool
from kvferry.gpu_worker.rank_link import RankTether
from kvferry.gpu_worker.registration import RankMemory, take_up
from kvferry.net.channel import Channel
from kvferry.net.paths import RunDir
from kvferry.proto.control import Attached, Drained, Refused, Welcome
from kvferry.proto.errors import KvferryError, LostError
from kvferry.proto.tether import RankRegister, RankRegistered

log = logging.getLogger("kvferry.worker")


@dataclass(frozen=True, slots=True)
class Options:
    """What a worker is started with."""

    run_dir: RunDir
    rank: int
    worker: int
    listen_fd: int
    control_fd: int


class Stopped(Exception):  # noqa: N818  not an error: the way out of a wait
    """The supervisor said stop or is gone."""


class Worker:
    """One worker process. `run` returns its exit code."""

    def __init__(self, options: Options, device: Device) -> None:
        self._options = options
        self._device = device
        self._control = Channel.inherited(options.control_fd)
        self._door = Door(socket.socket(fileno=options.listen_fd), options.rank)
        self._pool = Pool(options.run_dir.pool(options.rank))
        self._daemon: DaemonLink  # from when the pool is registered: a link that nobody looks after is given up
        self._tether: RankTether | None = None
        self._is_judged = False  # the daemon has refused our rank
        self.was_ready = False
        self._boot = 0  # of the daemon behind the open link
        self._inbox: deque[Any] = deque()  # the daemon's words that nobody has taken yet

    # ---- the life ------------------------------------------------------------------------------

    def run(self) -> int:
        """Be a spare, then serve one rank."""
        try:
            self._register_pool()
            self._daemon = DaemonLink.to(self._options.run_dir)
        except Stopped:
            return 0
        try:
            self._await_daemon(None)
            self.was_ready = True
            self._control.send({"event": "ready", "device": self._device.describe()})
            register = self._await_rank()
            memory, slots = self._admit(register)
        except Stopped:
            return 0
        except KvferryError as error:
            # The daemon has told its log of its own verdict, with the engine; here it would come at every try.
            log.log(logging.DEBUG if self._is_judged else logging.WARNING, "%s", error)
            self._refuse(error)
            return EXIT_LOST if isinstance(error, DeviceLost) else 0
        return self._serve(memory, slots)

    def _register_pool(self) -> None:
        """Give the device the pool, before an engine needs it: a GPU pins it, which takes seconds for each 10 GiB.

        The supervisor's questions are answered meanwhile, and its stop ends it. CapacityError if it cannot be.
        """
        self._device.register_host(self._pool.base, self._pool.nbytes, self._answer_supervisor)
        told = self._device.describe()
        if "pinned_bytes" in told:
            log.info(
                "rank %d: %s (%s), %d bytes of pool pinned in %d chunks in %.1f s; copies by %s", self._options.rank,
                told["name"], told["uuid"], told["pinned_bytes"], told["pinned_chunks"], told["pin_s"], told["copies"],
            )  # fmt: skip

    def _await_daemon(self, deadline: float | None) -> None:
        """Wait until a daemon has welcomed us. LostError at the deadline."""
        while not self._daemon.is_open:
            if deadline is not None and time.monotonic() >= deadline:
                raise LostError("daemon.lost", f"no daemon within {ANSWER_S:g} s")
            self._wait(deadline)
            self._look_around()

    def _await_rank(self) -> RankRegister:
        """Let in who knocks until one registers; its RankRegister. From then on nobody else is let in."""
        while True:
            self._wait(None)
            self._look_around()
            found = self._door.look(accepts=self._daemon.is_open)
            if found is not None:
                self._tether, register = found
                self._door.close()
                lent = sum(handle.nbytes for handle in register.layout.handles)
                self._control.send(
                    {
                        "event": "taken",
                        "engine": register.engine_id,
                        "marks": register.mark_mode,
                        "lent_bytes": lent,
                    }
                )
                return register

    def _admit(self, register: RankRegister) -> tuple[RankMemory, int]:
        """Map and check the rank's memory, ask the daemon, answer the rank; the memory and the slots to serve."""
        tether = self._tether
        assert tether is not None
        memory = take_up(register, tether.fds, self._options.rank, self._device)
        tether.close_fds()
        tether.takes_fds = False
        attach = memory.attach_message(self._options.worker, self._pool)
        deadline = time.monotonic() + ANSWER_S
        while True:
            self._await_daemon(deadline)
            self._inbox.clear()
            self._daemon.send(attach)
            attached = self._await_verdict(deadline)
            if attached is not None:
                return memory, attached.slots

    def _refuse(self, error: KvferryError) -> None:
        if self._tether is not None:
            self._tether.refuse(error)
            self._tether.close()
        self._daemon.close(serves=False)

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
            boot=self._boot,
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
        service = Service(
            self._daemon,
            self._control,
            self._device,
            tether,
            core,
            Copies(self._device, planners),
            attach=memory.attach_message(self._options.worker, self._pool),
            slots=slots,
            inbox=self._inbox,
        )
        try:
            return service.run()
        except DeviceLost as error:
            # No word on what was under way: only our death says that it is over.
            log.error("rank %d: %s; this worker ends, and the rank attaches to the next", self._options.rank, error)
            return EXIT_LOST

    # ---- waiting while nobody is served ----------------------------------------------------------

    def _await_verdict(self, deadline: float) -> Attached | None:
        """The daemon's answer to our attachment; None if it went away before it gave one. RefusedError, LostError."""
        while True:
            while self._inbox:
                match self._inbox.popleft():
                    case Attached() as attached:
                        return attached
                    case Refused() as refused:
                        self._is_judged = True
                        raise refused.error()
                    case LinkLost():
                        return None
            if time.monotonic() >= deadline:
                raise LostError("daemon.lost", f"the daemon gave no answer within {ANSWER_S:g} s")
            self._wait(deadline)
            self._look_around()
            if self._tether is not None and not self._tether.has_unread() and self._tether.ended:
                raise LostError("register.rank", "the rank went away before it was served")

    def _wait(self, deadline: float | None) -> None:
        """Sleep until something may have happened or `deadline` (monotonic seconds) has come."""
        if self._daemon.has_news():
            return
        dues = [due for due in (deadline, self._daemon.next_due_s(), self._door.next_due_s()) if due is not None]
        timeout = max(min(dues) - time.monotonic(), 0) if dues else None
        fds: list[Any] = [*self._daemon.filenos, self._control]
        if self._tether is not None:
            # What a rank says before it is served waits in its socket.
            if not self._tether.has_unread():
                fds.append(self._tether)
        else:
            fds += self._door.filenos(accepts=self._daemon.is_open)
        select.select(fds, [], [], timeout)

    def _look_around(self) -> None:
        """Take what daemon and supervisor said. Stopped if there is nothing to wait for any more."""
        self._answer_supervisor()
        for word in self._daemon.receive():
            match word:
                case Welcome(boot=boot):
                    # Nothing of an earlier boot can be in flight at a worker that serves nobody.
                    self._boot = boot
                    self._daemon.send(Drained(worker=self._options.worker, boot=boot))
                case Refused() if self._tether is None:
                    raise word.error()  # our version: no other link will do better
                case LinkLost(why):
                    log.info("rank %d: the daemon is gone (%s); waiting for the next", self._options.rank, why)
                    self._inbox.append(word)
                case _:
                    self._inbox.append(word)

    def _answer_supervisor(self) -> None:
        """Take what the supervisor said: Stopped on its stop or its end."""
        for event in self._control.receive():
            if event.get("event") == "stop":
                raise Stopped
            if event.get("event") == "ping":
                self._control.send({"event": "pong"})
        if self._control.ended:
            raise Stopped
