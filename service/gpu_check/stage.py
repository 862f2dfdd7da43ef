"""What items play on: a run dir, a pool file, the played daemon, and the processes E and W, all of them reaped here.

    stage.serve(geometry, slots) ─▶ Served: pool made, W spare and ready, E attached to it
      served.store(block, slot), served.load(...), served.payload(slot)        plan + begin + word + outcome
    stage.clear()                   nothing runs and nothing lies in /dev/shm any more

The runner maps the pool itself and so sees each byte and each generation word that W writes there.
"""

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvferry.gpu_check.daemon import PlayedDaemon
from kvferry.gpu_check.results import Failed
from kvferry.gpu_check.talk import Child
from kvferry.gpu_check.views import Bytes, bytes_at
from kvferry.gpu_worker import pool as pools
from kvferry.gpu_worker.pool import Pool, PoolHeaders
from kvferry.net.channel import Channel
from kvferry.net.paths import RunDir
from kvferry.proto.errors import ConfigError
from kvferry.proto.layout import slot_bytes
from kvferry.proto.limits import PAGE_BYTES
from kvferry.proto.outcome import Kind, Outcome

START_S: Final = 60.0  # the first import of torch and the first context on a large machine take tens of seconds
READY_S: Final = 60.0
WORD_S: Final = 20.0
EXIT_S: Final = 5.0
LEAD: Final = 3 << 20  # bytes before the lent memory in its allocation: a handle opened at its base would be wrong


@dataclass(frozen=True, slots=True)
class Geometry:
    """The engine's memory: `layers` times `blocks` runs of `run` bytes."""

    layers: int
    blocks: int
    run: int

    @property
    def payload(self) -> int:
        """Bytes of a block."""
        return self.layers * self.run


class WorkerProcess:
    """One W."""

    def __init__(self, process: "subprocess.Popen[bytes]", control: Channel, number: int) -> None:
        self._process, self.control, self.number = process, control, number
        self.pid = process.pid
        self.device: dict[str, Any] = {}

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def await_ready(self, timeout_s: float) -> None:
        """Wait until it is a spare. Failed if it ends or says nothing."""
        until = time.monotonic() + timeout_s
        while (left := until - time.monotonic()) > 0:
            select.select([self.control], [], [], left)
            for said in self.control.receive():
                if said.get("event") == "ready":
                    self.device = dict(said.get("device", {}))
                    return
            if self.control.ended:
                raise Failed(f"the worker ended before it was ready ({self.wait(EXIT_S)})")
        raise Failed(f"the worker was not ready within {timeout_s:g} s")

    def wait(self, timeout_s: float) -> str:
        """Reap it; how it ended."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return f"it still runs after {timeout_s:g} s"
        return f"signal {-status}" if status < 0 else f"code {status}"

    def kill(self) -> bool:
        """SIGKILL and reap; whether it is gone."""
        with contextlib.suppress(OSError):
            self._process.kill()
        return not self.wait(10.0).startswith("it still")


def _new_run_dir() -> tuple[Path, RunDir]:
    """In the usual place for temporary files, or in /tmp where that one's path is too long for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="kvferry-check-"))
    try:
        return folder, RunDir.at(folder)
    except ConfigError:
        folder.rmdir()
    folder = Path(tempfile.mkdtemp(prefix="kvferry-check-", dir="/tmp"))
    return folder, RunDir.at(folder)


class Stage:
    """See the module's text. `clear` may be called at any time, `close` ends it."""

    def __init__(
        self,
        device: str,
        engine: str,
        gpu: str,
        *,
        is_fast: bool = False,
        is_small: bool = False,
        judges_speed: bool = True,
    ) -> None:
        self.device, self.engine_kind, self.gpu = device, engine, gpu
        self.is_cpu, self.is_fast = device == "cpu", is_fast
        self.is_small = is_small or self.is_cpu
        self.judges_speed = judges_speed and not self.is_cpu
        self._folder, self.run_dir = _new_run_dir()
        self._log = (self._folder / "log").open("wb", buffering=0)  # what all children say
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.run_dir.rank(0)))
        self._listener.listen()
        self._daemon: PlayedDaemon | None = None
        self._engine: Child | None = None
        self._copiers: list[Child] = []
        self._workers: list[WorkerProcess] = []
        self._pools: dict[int, Pool] = {}
        self._tickets = 0
        self._num_workers = 0
        self.leaks: list[str] = []  # processes that would not die

    # ---- processes -------------------------------------------------------------------------------

    @property
    def daemon(self) -> PlayedDaemon:
        """Started with the first question."""
        if self._daemon is None:
            self._daemon = PlayedDaemon(self.run_dir)
        return self._daemon

    def engine(self) -> Child:
        """E, started if there is none."""
        if self._engine is not None and not self._engine.is_alive:
            self.drop_engine()
        if self._engine is None:
            arguments = ["--engine", self.engine_kind, "--gpu", self.gpu, "--run-dir", str(self.run_dir.path)]
            self._engine = Child("the engine (E)", "kvferry.gpu_check.engine", arguments, self._log)
            self._engine.ask("start", START_S)
        return self._engine

    def copier(self, **options: Any) -> Child:
        """A process with the worker's device alone."""
        child = Child("the copier", "kvferry.gpu_check.copier", stderr=self._log)
        self._copiers.append(child)
        child.ask("open", START_S, device=self.device, gpu=self.gpu, **options)
        return child

    def worker(self, *variant: str, env: dict[str, str] | None = None) -> WorkerProcess:
        """A new W, ready for a rank. Variants are flags of `worker.py`; without any it is `kvferry.gpu_worker`."""
        self.daemon  # noqa: B018  somebody must welcome it
        control, theirs = Channel.pair()
        self._num_workers += 1
        number = self._num_workers
        with theirs:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "kvferry.gpu_check.worker" if variant else "kvferry.gpu_worker", *variant),
                    *("--run-dir", str(self.run_dir.path), "--rank", "0", "--worker", str(1000 + number)),
                    *("--listen-fd", str(self._listener.fileno()), "--control-fd", str(theirs.fileno())),
                    *("--device", self.device, "--gpu", self.gpu),
                ],
                pass_fds=[self._listener.fileno(), theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stderr=self._log,
                process_group=0,
                env={"KVFERRY_LOG_LEVEL": "warning", **os.environ, **(env or {})},
            )
        made = WorkerProcess(process, control, number)
        self._workers.append(made)
        made.await_ready(READY_S)
        return made

    def ticket(self) -> int:
        """The next one."""
        self._tickets += 1
        return self._tickets

    # ---- the pool and the whole ------------------------------------------------------------------

    def make_pool(self, nbytes: int, rank: int = 0) -> Pool:
        """A fresh pool file, mapped here. No process may still use an older one."""
        self.drop_pool(rank)
        pools.create(self.run_dir.pool(rank), nbytes, self.run_dir.instance)
        self._pools[rank] = Pool(self.run_dir.pool(rank))
        return self._pools[rank]

    def drop_pool(self, rank: int = 0) -> None:
        """Take the file away."""
        if rank in self._pools:
            self._pools.pop(rank).close()
        pools.remove(self.run_dir.pool(rank))

    @contextlib.contextmanager
    def serve(
        self, geometry: Geometry, slots: int, *variant: str, env: dict[str, str] | None = None, **attach: Any
    ) -> Iterator["Served"]:
        """A pool, a W and an attached E; all but E's process are gone afterwards. Failed if E is not served."""
        pool = self.make_pool(slots * slot_bytes(geometry.payload))
        worker = self.worker(*variant, env=env)
        engine = self.engine()
        state = engine.ask("attach", START_S, name=self._engine_name(), lead=LEAD, **_fields(geometry), **attach)
        if not state["attached"]:
            raise Failed(f"E is not served: {'; '.join(state['notes'])}")
        yield Served(self, geometry, pool, worker, engine, slots, state)
        self.leave()

    def leave(self) -> None:
        """Let E detach; its worker ends by itself, and is killed and told of otherwise."""
        if self._engine is not None:
            self._engine.ask("detach", EXIT_S + 2)
        for worker in self._workers:
            worker.control.send({"event": "stop"})  # for spares: one that served has heard its rank's end
        for worker in self._workers:
            if "still" in worker.wait(EXIT_S):
                self._end_worker(worker)
            worker.control.close()
        self._workers.clear()
        for rank in list(self._pools):
            self.drop_pool(rank)

    def strike_engine(self) -> None:
        """SIGKILL for E, without waiting for its end: `drop_engine` does."""
        if self._engine is not None:
            os.kill(self._engine.pid, signal.SIGKILL)

    def drop_engine(self) -> None:
        """Kill E and reap it."""
        engine, self._engine = self._engine, None
        if engine is not None:
            self._note_leak(engine.name, engine.pid, engine.kill())
            engine.close()

    def clear(self) -> None:
        """Kill all, remove the pool; the next item starts anew."""
        self.drop_engine()
        for child in self._copiers:
            self._note_leak(child.name, child.pid, child.kill())
            child.close()
        self._copiers.clear()
        for worker in self._workers:
            self._end_worker(worker)
        self._workers.clear()
        for rank in list(self._pools):
            self.drop_pool(rank)
        if self._daemon is not None:
            self._daemon.close()
            self._daemon = None
            for path in (self.run_dir.daemon, self.run_dir.tether):
                path.unlink(missing_ok=True)

    def end_copiers(self) -> None:
        """Let the copiers end; they have nothing to keep."""
        for child in self._copiers:
            self._note_leak(child.name, child.pid, child.close())
        self._copiers.clear()

    def close(self) -> None:
        """Leave nothing."""
        self.clear()
        self._listener.close()
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def said(self, since: int = 0) -> bytes:
        """What the children have said on their standard error, from a position of that on."""
        return (self._folder / "log").read_bytes()[since:]

    def _end_worker(self, worker: WorkerProcess) -> None:
        self._note_leak(f"worker {worker.number}", worker.pid, worker.kill())
        worker.control.close()

    def _note_leak(self, name: str, pid: int, is_gone: bool) -> None:
        if not is_gone:
            self.leaks.append(f"{name} (pid {pid}) does not die of SIGKILL: it hangs in the kernel")

    def _engine_name(self) -> str:
        return f"check-{self.ticket()}"


class Served:
    """An attached engine and everything around it."""

    def __init__(
        self,
        stage: Stage,
        geometry: Geometry,
        pool: Pool,
        worker: WorkerProcess,
        engine: Child,
        slots: int,
        state: dict[str, Any],
    ) -> None:
        self.stage, self.geometry, self.pool, self.worker, self.engine = stage, geometry, pool, worker, engine
        self.slots, self.state = slots, state
        self.slot_bytes = slot_bytes(geometry.payload)
        self.headers: PoolHeaders = pool.headers(self.slot_bytes, slots)
        self.bytes = bytes_at(pool.base, pool.nbytes)  # the whole file
        self._generation = 0

    def payload(self, slot: int) -> Bytes:
        """A slot's bytes behind its header page, as they are now."""
        start = PAGE_BYTES + slot * self.slot_bytes + PAGE_BYTES
        return self.bytes[start : start + self.geometry.payload]

    def stamp(self, slot: int, data: bytes | int) -> int:
        """Make a slot what a whole store of `data` (or of that one byte) would have made it; its generation."""
        generation = self.generation()
        where = np.array([slot], dtype=np.uint32)
        self.payload(slot)[:] = data if isinstance(data, int) else np.frombuffer(data, dtype=np.uint8)
        for write in (self.headers.open, self.headers.close):
            write(where, np.array([generation], dtype=np.uint64))
        return generation

    def is_whole(self, slot: int, generation: int) -> bool:
        """Whether both words of a slot's header are of this generation."""
        torn = self.headers.torn(np.array([slot], dtype=np.uint32), np.array([generation], dtype=np.uint64))
        return not len(torn)

    def generation(self) -> int:
        """The next one."""
        self._generation += 1
        return self._generation

    def plan(self, kind: Kind, blocks: Sequence[int], slots: Sequence[int], generations: Sequence[int]) -> int:
        """Plan a job; its ticket."""
        ticket = self.stage.ticket()
        self.stage.daemon.plan(ticket, kind, blocks, slots, generations)
        return ticket

    def play(self, *script: Sequence[Any], timeout_s: float = WORD_S) -> list[Any]:
        """What E's steps gave."""
        answers: list[Any] = self.engine.ask("play", timeout_s, script=script)
        return answers

    def outcome(self, ticket: int) -> Outcome:
        """How a job ended, by W's word to its daemon."""
        return self.stage.daemon.outcome(ticket, WORD_S)

    def store(self, block: int, slot: int) -> tuple[Outcome, int]:
        """Store a block; how it ended, and the generation."""
        generation = self.generation()
        ticket = self.plan(Kind.STORE, [block], [slot], [generation])
        self.play(("store", ticket), ("await", ticket, WORD_S / 2))
        return self.outcome(ticket), generation

    def load(self, blocks: Sequence[int], slots: Sequence[int], generations: Sequence[int]) -> dict[str, Any]:
        """Load blocks; E's word."""
        ticket = self.plan(Kind.LOAD, blocks, slots, generations)
        word: dict[str, Any] = self.play(("load", (ticket, blocks)), ("await", ticket, WORD_S / 2))[-1]
        return word


def _fields(geometry: Geometry) -> dict[str, int]:
    return {"layers": geometry.layers, "blocks": geometry.blocks, "run": geometry.run}
