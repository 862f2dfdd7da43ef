"""Nothing grows for whoever stays, and nothing is handed on from one life to the next.

A hundred times the daemon and the worker of one of two ranks, or both workers, die under traffic. Counted after each
time, at rest: descriptors, threads, private memory, files. `up` and the engine live through all of it; a daemon or
worker lives from one death to the next, and the hundredth has to hold what an early one held.
"""

import os
import signal
import time
from collections.abc import Iterator

import pytest

from kvferry.cli.ask import ask_status
from kvferry.net.paths import RunDir
from kvferry.proto.errors import KvferryError
from tests.chaos.census import Growth, Sample, growth, of_files, of_processes
from tests.process.far_engine import FarEngine
from tests.process.sidecar import Sidecar, alive, until
from tests.process.test_drills import settled

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.faults]

CYCLES, WARM = 100, 10  # in the first of them allocators and caches fill
RANKS = 2
DYING = ([0], [1], [0, 1])  # ranks whose workers die, cycle by cycle
EACH = len(DYING)  # so many cycles to a look: each finds workers of the same ages
NOTICE_S = 2.0
BACK_S = 60.0  # processes start slowly on a busy machine
BLOCKS, TARGET, MOVING = list(range(8)), list(range(8, 16)), list(range(16, 32))
# Between medians of ten looks each, sixty cycles apart: what a cycle loses is lost sixty times, so 70 KiB are seen.
MOST = {"fds": 1, "threads": 1, "private_mib": 4, "files": 0, "file_mib": 0}


class Ship:
    """One sidecar of two ranks and one engine, whose keys are stored anew in each cycle: the pool overflows."""

    def __init__(self, sidecar: Sidecar, engine: FarEngine) -> None:
        self.sidecar, self.engine = sidecar, engine
        self._run_dir = RunDir.at(sidecar.run_dir)

    def cycle(self, number: int) -> None:
        """Traffic, a death amid it, the way back, traffic that works."""
        engine = self.engine
        engine.fill(MOVING, seed=number)
        engine.begin("store", f"moving {number}", f"moving {number}", MOVING)
        workers = [engine.worker_pids[rank] for rank in DYING[number % len(DYING)]]
        if number % 2:
            self._kill(self.sidecar.daemon(), *workers)
        else:
            self._kill(self.sidecar.daemon())
            self._be_attached()
            self._kill(*workers)
        self._be_attached()
        until(lambda: self._is_there(number), BACK_S, f"cycle {number} stores and loads again")
        engine.scheduler.call("finish", f"moving {number}")
        until(self._is_at_rest, BACK_S, f"cycle {number} comes to rest")
        engine.ends.clear()
        engine.words.clear()

    def census(self) -> Iterator[Sample]:
        """Of everybody, each under a name that its successor has too."""
        found = [
            of_processes("up", [self.sidecar.pid]),
            of_processes("daemon", [self.sidecar.daemon()]),
            of_processes("engine's scheduler", [self.engine.scheduler.pid]),
            *(of_processes(f"worker {rank}", [pid]) for rank, pid in enumerate(self.engine.worker_pids)),
            *(of_processes(f"engine's rank {rank}", [one.pid]) for rank, one in enumerate(self.engine.ranks)),
        ]
        assert None not in found, "nobody dies at rest"
        yield from (sample for sample in found if sample is not None)
        where = self._run_dir
        yield of_files("/dev/shm", where.table.parent.glob(f"kvferry-{where.instance}*"))
        yield of_files("run dir", where.path.iterdir())

    def be_served(self) -> None:
        self._be_attached()
        until(lambda: self._is_there(0), BACK_S, "stores and loads")

    # ---- parts of a cycle ----------------------------------------------------------------------------

    def _kill(self, *pids: int) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            until(lambda pid=pid: not alive(pid), 10)  # type: ignore[misc]
        # A spare may have taken over before anybody looks: then the worker is another one, or time has told.
        before, told_by = list(self.engine.worker_pids), time.monotonic() + NOTICE_S
        until(lambda: self.engine.look() or self._has_noticed(before) or time.monotonic() > told_by)

    def _has_noticed(self, workers: list[int]) -> bool:
        return not self.engine.attached or self.engine.worker_pids != workers

    def _be_attached(self) -> None:
        until(lambda: self.engine.look() or self.engine.attached, BACK_S, "the engine is attached again")

    def _is_there(self, number: int) -> bool:
        """Whether keys of this cycle could be stored and come back, byte for byte."""
        engine, text = self.engine, f"kept {number}"
        engine.fill(BLOCKS, seed=1000 + number)
        ticket = engine.begin("store", text, text, BLOCKS)
        if ticket:
            until(lambda: engine.look() or ticket in engine.ends, BACK_S, "a store has an end")
        engine.scheduler.call("finish", text)
        if engine.hits(text, text, len(BLOCKS), keep=True) < len(BLOCKS):
            engine.scheduler.call("finish", text)
            return False
        engine.fill(TARGET, seed=10**6)
        load = engine.begin("load", text, text, TARGET)
        until(lambda: engine.look() or engine.load_is_over(load), BACK_S, "a load has its word")
        is_whole = all(ok for ok, _ in engine.words[load].values())
        engine.scheduler.call("load_ended", load, is_whole)
        engine.scheduler.call("finish", text)
        assert not is_whole or engine.digests(TARGET) == engine.digests(BLOCKS), "wrong bytes of an OK load"
        return is_whole

    def _is_at_rest(self) -> bool:
        """No job, lease or restart; a daemon, a worker and a spare of each rank, and no link of the dead."""
        self.engine.look()
        try:
            status = ask_status(self._run_dir, 2.0)
        except KvferryError:
            return False
        busy = [status["jobs"]["stores"], status["jobs"]["loads"], status["fences"], status["leases"]]
        links = status["links"].get("worker") == 2 * RANKS and status["links"].get("client") == 1
        return not any([*busy, status["restarting"]]) and links and len(self.sidecar.children()) == 1 + 2 * RANKS


def test_a_hundred_deaths_of_daemon_and_workers_leave_nothing_more_in_anybody() -> None:
    """Cases 32 and 45, at length: whoever stays holds what it held, and the last ones hold what the first ones did."""
    flags = ("--restarts", "10000", "--job-deadline", "2s", "--kill-grace", "2s", "--lease", "2s")
    engine = FarEngine(ranks=RANKS)
    try:
        with Sidecar(*flags, tp_size=RANKS, host_memory="128MiB") as sidecar:
            engine.open(sidecar.run_dir)
            ship = Ship(sidecar, engine)
            ship.be_served()
            samples: list[Sample] = []
            began = time.monotonic()
            for number in range(1, CYCLES + 1):
                ship.cycle(number)
                if number > WARM and number % EACH == 0:
                    settled(sidecar.daemon())  # of the tethers of our own questions
                    samples += ship.census()
                if number % 10 == 0:
                    print(f"{number} cycles, {time.monotonic() - began:.0f} s")
            found = growth(samples)
            for one in found:
                print(f"{one.subject:20}{one.measure:14}{one.first:10.2f}{one.last:10.2f}")
            engine.close()
    finally:
        engine.end()
    grown: list[Growth] = [one for one in found if one.last - one.first > MOST[one.measure]]
    assert not grown
    assert {one.subject for one in found} >= {
        "up",
        "daemon",
        "engine's scheduler",
        *(f"{who} {rank}" for rank in range(RANKS) for who in ("worker", "engine's rank")),
        "/dev/shm",
    }
