"""`kvferry up`: the supervisor's shell. It carries out what `core.py` decides, and owns what no child owns:

    the run dir and its lock · the pool files · the ranks' listeners · every child's reap

One thread, one selector over control channels, pidfds and signals. All that can be wrong with the machine or
the settings is found before anything is made. The pool and its table outlive us on every way out but Ctrl-C and
`kvferry down`; everything else goes, and what a SIGKILL leaves of it the next start sweeps.
"""

import contextlib
import logging
import math
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from kvferry.gpu_worker import pool
from kvferry.logs import LEVEL_ENV, say
from kvferry.net.paths import RunDir
from kvferry.process import name_process
from kvferry.proto.limits import PAGE_BYTES
from kvferry.settings import Settings
from kvferry.supervise import gpus, kept, limits, memory, rundir, sweep, vitals
from kvferry.supervise.api import (
    Action,
    Answered,
    AtRest,
    Begin,
    Event,
    Exited,
    Failed,
    Finish,
    Kill,
    KillWanted,
    Look,
    Note,
    Ready,
    Seen,
    SpawnDaemon,
    Spawned,
    SpawnWorker,
    Stop,
    Taken,
    Tell,
    TellReady,
    Terminate,
    TimePassed,
)
from kvferry.supervise.children import Process
from kvferry.supervise.core import Supervisor
from kvferry.supervise.notify import Manager
from kvferry.supervise.progress import Progress
from kvferry.supervise.rundir import SERVING
from kvferry.supervise.signals import STOP_SIGNALS, Signals
from kvferry.supervise.state import ALIVE, LOOKS, Phase, Rules
from kvferry.units import format_bytes

log = logging.getLogger("kvferry.up")

# What `kvferry status` is told, through the lock file, of each phase.
SAYS: Final = {
    Phase.STARTING: "starting its processes",
    Phase.SERVING: SERVING,
    Phase.RESTARTING: "starting again: the daemon died",
    Phase.DRAINING: "stopping: running copies end",
    Phase.STOPPING: "stopping",
}
# (file, bytes for slots, instance, progress(done, total), node=...): `kvferry.gpu_worker.pool.create`, or a stand-in
MakePool = Callable[..., str | None]


class Interrupted(Exception):  # noqa: N818 - no error
    """A stop signal came while the pool was being made."""


class Sidecar:
    """One `kvferry up`, from the checks to the last unlink."""

    def __init__(self, settings: Settings, make_pool: MakePool = pool.create) -> None:
        self._settings = settings
        self._run_dir: RunDir = settings.directory()
        self._make_pool = make_pool
        looks_serving = LOOKS + math.ceil(settings.kill_grace)
        rules = Rules(settings.tp_size, restarts=settings.restarts, looks_serving=looks_serving)
        if settings.device == "cuda":  # opening a GPU takes as long as others pin memory: longer than `gpus.CHECK_S`
            rules = replace(rules, looks_starting=3 * int(gpus.CHECK_S))
        self._core = Supervisor(rules, new_id=_random_id)
        self._processes: dict[int, Process] = {}
        self._listeners: list[socket.socket] = []
        self._selector = selectors.DefaultSelector()
        self._started = time.monotonic()
        self._finish: Finish | None = None
        self._gpus: tuple[gpus.RankGpu, ...] = ()  # by rank; none without CUDA
        self._manager = Manager()
        self._said = ""  # what we are doing, as the lock file and the manager were told
        self._adopted = False  # the pool is one that an earlier run kept
        self._owns = False  # nobody else holds what has our names: it is ours to use and to remove

    def run(self) -> int:
        """Serve until stopped; the exit code. ConfigError before anything was started if it cannot work."""
        name_process("kvferry-up")
        with contextlib.ExitStack() as last:
            if rundir.make_private(self._run_dir):
                last.callback(rundir.remove_if_empty, self._run_dir)
            self._lock = rundir.Lock(self._run_dir)
            last.callback(self._lock.release)
            self._signals = Signals()
            left = self._run()
        assert self._finish is not None
        if self._finish.code:
            say(f"kvferry: {self._finish.text}", sys.stderr)
            self._manager.say(STATUS=self._finish.text)
        else:
            log.info("stopped: %s", self._finish.text)
        log.info("%s", left)
        return self._finish.code

    def _run(self) -> str:
        """From the pool to its end; the line that says what is left of it."""
        left = ""
        s = self._settings
        try:
            self._gpus = gpus.find(s)
            for rank, gpu in enumerate(self._gpus):
                log.info("rank %d: %s (%s)", rank, gpu.uuid, gpu.name)
            self._adopted, lines = sweep.take_over(
                self._run_dir, s.tp_size, s.rank_bytes - PAGE_BYTES, check=self._check_memory
            )
            self._owns = True
            for line in lines:
                log.info("%s", line)
            if not self._adopted:
                self._make_pools()
            self._listeners = [rundir.listen(self._run_dir.rank(r)) for r in range(self._settings.tp_size)]
            self._selector.register(self._signals, selectors.EVENT_READ)
            self._serve()
        except Interrupted:
            self._finish = Finish(0, "while it was starting", keep=self._keeps())
        finally:
            for child in self._processes.values():  # none, unless we fail ourselves
                child.signal(signal.SIGKILL)
            for listener in self._listeners:
                listener.close()
            self._selector.close()
            self._signals.close()
            if self._owns:
                rundir.clean_up(self._run_dir)
                left = self._leave_pool()
        return left

    def _check_memory(self, freed_bytes: int) -> None:
        memory.check(self._settings.rank_bytes * self._settings.tp_size, memory.read_machine().after(freed_bytes))

    def _leave_pool(self) -> str:
        """Keep the pool or drop it; the line that says so."""
        if self._finish is None or self._finish.keep:
            try:
                found = kept.look(self._run_dir)
            except OSError as error:  # no descriptor left to look with: the next start looks
                return f"what the pool holds cannot be seen ({error.strerror}), and stays for the next `kvferry up`"
            if found is not None and not found.unusable:
                return f"kept for the next `kvferry up`: {found}; `kvferry down` removes it"
        rundir.remove_files(self._run_dir)
        return "nothing is kept"

    def _keeps(self) -> bool:
        """Whether the signal that came, if any, leaves the pool."""
        got = self._signals.got
        return got is None or STOP_SIGNALS[got] or (self._settings.keep and got is signal.SIGINT)

    # ---- the loop ------------------------------------------------------------------------------------

    def _serve(self) -> None:
        self._do(Begin())
        while self._finish is None:
            due = self._core.next_due_ns()
            timeouts = [] if due is None else [max(0.0, (due - time.monotonic_ns()) / 1e9)]
            if any(process.control.pending for process in self._processes.values()):
                timeouts.append(0.02)
            if self._manager.period_s is not None:
                timeouts.append(self._manager.period_s)
            self._manager.live(time.monotonic())
            for key, _ in self._selector.select(min(timeouts, default=None)):
                self._readable(key.data)
            for process in self._processes.values():
                process.control.flush()
            due = self._core.next_due_ns()
            if due is not None and due <= time.monotonic_ns():
                self._do(TimePassed())

    def _readable(self, data: tuple[str, int] | None) -> None:
        if data is None:
            self._signals.drain()
            got = self._signals.got
            if got:
                self._do(Stop("by `kvferry down`" if got is signal.SIGUSR1 else f"on {got.name}", self._keeps()))
            return
        what, child = data
        process = self._processes.get(child)
        if process is None:
            return
        self._hear(child, process)
        if what == "end":
            # The channel is read once more after the death: a last word counts before the reap is told.
            self._selector.unregister(process.pidfd)
            self._mute(process)
            del self._processes[child]
            self._do(Exited(child, process.reap()))

    def _hear(self, child: int, process: Process) -> None:
        for said in process.control.receive():
            match said.get("event"):
                case "ready":
                    self._do(Ready(child, dict(said.get("device", {}))))
                case "taken":
                    self._do(
                        Taken(
                            child,
                            str(said.get("engine", "")),
                            str(said.get("marks", "")),
                            int(said.get("lent_bytes", 0)),
                        )
                    )
                case "failed":
                    self._do(Failed(child, str(said.get("why", ""))))
                case "drained":
                    self._do(AtRest(child))
                case "pong":
                    self._do(Answered(child))
                case "kill":
                    self._do(KillWanted(int(said["worker"]), str(said.get("why", ""))))
                case other:
                    log.warning("child %x said %r, which this supervisor does not know", child, other)
        if process.control.ended:
            self._mute(process)  # its death comes by the pidfd

    def _mute(self, process: Process) -> None:
        if not process.muted:
            process.muted = True
            self._selector.unregister(process.control)

    # ---- what the core decided -----------------------------------------------------------------------

    def _do(self, event: Event) -> None:
        actions = self._core.step(event, time.monotonic_ns())
        self._tell_phase()
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case SpawnDaemon(child):
                self._spawn(child, "kvferry.scheduler_daemon", self._daemon_arguments(), ())
            case SpawnWorker(child, rank, is_retry):
                fd = self._listeners[rank].fileno()
                self._spawn(child, "kvferry.gpu_worker", self._worker_arguments(child, rank, fd, is_retry), (fd,))
            case Tell(child, message):
                if child in self._processes:
                    self._processes[child].tell(message)
            case Look(child):
                if child in self._processes:
                    self._do(Seen(child, vitals.look(self._processes[child].pid)))
            case Terminate(child):
                self._signal(child, signal.SIGTERM)
            case Kill(child):
                self._signal(child, signal.SIGKILL)
            case TellReady(again):
                self._tell_ready(again)
            case Note(text):
                log.warning("%s", text)
            case Finish():
                self._finish = action

    def _tell_phase(self) -> None:
        phase, trouble = self._core.phase, self._core.trouble
        doing = SAYS.get(phase, self._said)
        if phase is Phase.RESTARTING and trouble:
            doing = f"starting again: {trouble}"
        if doing != self._said:
            is_end = phase in (Phase.DRAINING, Phase.STOPPING)
            self._tell(doing, **({"STOPPING": 1} if is_end else {}))

    def _tell(self, doing: str, **words: object) -> None:
        """For whoever asks the lock file, and for the manager that started us."""
        self._said = doing
        self._lock.say(doing)
        self._manager.say(STATUS=doing, **words)

    def _signal(self, child: int, number: signal.Signals) -> None:
        """To a child that was started: one before it in the same breath may have ended all."""
        if child in self._processes:
            self._processes[child].signal(number)

    def _spawn(self, child: int, module: str, arguments: list[str], fds: tuple[int, ...]) -> None:
        if self._core.phase not in ALIVE:  # one before it in the same breath could not be started
            self._do(Exited(child, os.EX_OSERR))
            return
        try:
            process = Process(module, arguments, fds, {LEVEL_ENV: self._settings.log_level})
        except OSError as error:  # no memory, no process or no descriptor left
            # Once all serves, the core says it, and not with each try.
            is_start = self._core.phase is Phase.STARTING
            why = limits.lacking(error, self._settings.tp_size, self._settings.rank_bytes) or error
            log.log(logging.ERROR if is_start else logging.DEBUG, "cannot start %s: %s", module, why)
            self._do(Failed(child, f"cannot be started: {error}"))
            self._do(Exited(child, os.EX_OSERR))
            return
        self._processes[child] = process
        self._selector.register(process.control, selectors.EVENT_READ, ("said", child))
        self._selector.register(process.pidfd, selectors.EVENT_READ, ("end", child))
        self._do(Spawned(child, process.pid))

    def _daemon_arguments(self) -> list[str]:
        s = self._settings
        flags: dict[str, Any] = {
            "run-dir": self._run_dir.path,
            "tp-size": s.tp_size,
            "lease-s": s.lease,
            "lease-share": s.lease_share,
            "job-s": s.job_deadline,
            "load-s": s.load_deadline,
            "grace-s": s.kill_grace,
            "in-flight-bytes": s.in_flight,
        }
        return [text for name, value in flags.items() for text in (f"--{name}", str(value))]

    def _worker_arguments(self, child: int, rank: int, listen_fd: int, is_retry: bool) -> list[str]:
        flags: dict[str, Any] = {
            "run-dir": self._run_dir.path,
            "rank": rank,
            "worker": child,
            "listen-fd": listen_fd,
            "device": self._settings.device,
        }
        if self._gpus:
            flags |= {"gpu": self._gpus[rank].uuid, "pin": self._settings.pin}
        told = ["--retry"] if is_retry else []
        return [text for name, value in flags.items() for text in (f"--{name}", str(value))] + told

    def _make_pools(self) -> None:
        s = self._settings
        progress = Progress("reserving the pool", s.rank_bytes * s.tp_size)
        try:
            for rank in range(s.tp_size):
                before = rank * s.rank_bytes

                def reach(done: int, _total: int, before: int = before) -> None:
                    progress.reach(before + done)
                    self._tell(f"starting: pool {progress.text}")
                    if self._signals.got:
                        raise Interrupted

                # The file has a header page of its own: with it, it is exactly the rank's share.
                slots_bytes = s.rank_bytes - PAGE_BYTES
                place = {"node": self._gpus[rank].numa_node} if self._gpus else {}
                told = self._make_pool(self._run_dir.pool(rank), slots_bytes, self._run_dir.instance, reach, **place)
                if told:
                    log.warning("the pool of rank %d: %s", rank, told)
        finally:
            progress.close()

    def _tell_ready(self, again: bool) -> None:
        if not again:
            self._manager.say(READY=1)
        s = self._settings
        took = f"in {time.monotonic() - self._started:.1f} s" + (", with what was kept" if self._adopted else "")
        took = "again, with what the pool holds" if again else took
        ranks = "1 rank" if s.tp_size == 1 else f"{s.tp_size} ranks"
        say(
            f"kvferry ready: run dir {self._run_dir.path}, {ranks} x {format_bytes(s.rank_bytes)}"
            f" = {format_bytes(s.rank_bytes * s.tp_size)}, device {s.device}, {took}"
        )


def _random_id() -> int:
    return int.from_bytes(os.urandom(8), "little") | 1
