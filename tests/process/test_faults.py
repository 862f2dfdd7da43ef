"""Kill each process of a sidecar under a living engine: the engine goes on, and all is back soon."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvferry import Outcome
from kvferry.cli.ask import ask_status
from kvferry.net.paths import RunDir
from kvferry.proto.errors import LostError
from kvferry.supervise.rundir import SERVING, read_lock
from tests.process.sidecar import Sidecar, alive, kvferry, until
from tests.process.tiny_engine import TinyEngine, keys_of

pytestmark = pytest.mark.process


def attached(engine: TinyEngine) -> bool:
    """Whether client and all ranks are served; lets both sides look."""
    engine.client.poll()
    for rank in engine.ranks:
        rank.poll()
    return engine.client.attached and all(rank.attached for rank in engine.ranks)


def round_trip(engine: TinyEngine, name: str) -> None:
    """Store fresh bytes under fresh keys, load them elsewhere, compare."""
    keys, blocks, others = keys_of(name, 3), [0, 1, 2], [5, 6, 7]
    engine.fill(blocks, seed=len(name))
    before = engine.bytes_of(blocks)
    assert engine.store(name, keys, blocks) is Outcome.OK
    assert engine.hits(name + "'", keys) == 3
    assert all(end.ok for end in engine.load(name + "'", keys, others))
    assert engine.bytes_of(others) == before


def test_a_killed_worker_is_replaced_and_its_rank_attaches_to_the_spare_within_the_same_registration(
    sidecar: Sidecar,
) -> None:
    with TinyEngine(sidecar) as engine:
        assert engine.client.wait_attached(30)
        round_trip(engine, "first")
        before = {rank.worker_pid for rank in engine.ranks}
        os.kill(engine.ranks[1].worker_pid, signal.SIGKILL)
        until(lambda: not engine.client.attached or engine.ranks[1].worker_pid not in before, what="noticed")
        until(lambda: attached(engine) and engine.ranks[1].worker_pid not in before, 20, "attached again")
        # Rank 0 kept its worker, the pool kept its bytes.
        assert engine.ranks[0].worker_pid in before
        assert engine.hits("after", keys_of("first", 3)) == 3
        assert all(end.ok for end in engine.load("after", keys_of("first", 3), [10, 11, 12]))
        round_trip(engine, "second")
    until(lambda: len(sidecar.children()) == 3, what="one daemon and two spares")


def test_a_killed_spare_is_replaced(sidecar: Sidecar) -> None:
    [spare] = sidecar.workers(0)
    os.kill(spare, signal.SIGKILL)
    until(lambda: (found := sidecar.workers(0)) and found != [spare], what="another spare")
    with TinyEngine(sidecar) as engine:
        assert engine.client.wait_attached(30)
        round_trip(engine, "x")


def test_a_worker_that_hangs_is_killed_by_the_daemons_wish_and_replaced() -> None:
    """Cases 48 and 53: a store ends by its deadline; the silent worker's death frees the rest."""
    with Sidecar("--job-deadline", "1s", "--kill-grace", "1s") as sidecar, TinyEngine(sidecar) as engine:
        assert engine.client.wait_attached(30)
        hung = engine.ranks[1].worker_pid
        os.kill(hung, signal.SIGSTOP)
        engine.fill([0, 1], seed=1)
        assert engine.store("r", keys_of("h", 2), [0, 1]) is Outcome.DEADLINE
        until(lambda: not alive(hung), 10, "the hung worker is killed")
        until(lambda: attached(engine) and engine.ranks[1].worker_pid != hung, 20, "attached again")
        assert any("killing rank 1 worker" in line for line in sidecar.lines)
        status = sidecar.status()
        assert status["slots"]["quarantined"] == 0
        assert status["workers_died"] == 1
        round_trip(engine, "after")


ENGINE = """
import sys, time
from pathlib import Path
from tests.process.tiny_engine import TinyEngine, keys_of
class Where: run_dir = Path(sys.argv[1])
engine = TinyEngine(Where, "doomed")
assert engine.client.wait_attached(30)
engine.fill([0, 1], 1)
engine.store("r", keys_of("k", 2), [0, 1])
engine.client.lookup("r2", keys_of("k", 2))
engine.client.store("r3", keys_of("never begun", 4), [2, 3, 4, 5])
engine.client.end_step()
print("under way", flush=True)
time.sleep(60)
"""


def test_a_killed_engine_leaves_its_keys_and_nothing_else(sidecar: Sidecar) -> None:
    """Case 30: within a second or two no process of ours maps its memory, and all gauges are back."""
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(sidecar.run_dir)], stdout=subprocess.PIPE, text=True, cwd=root
    ) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "under way\n"
        served = [w["pid"] for w in sidecar.status()["workers"] if w["state"] == "taken"]
        assert len(served) == 2
        engine.kill()
    until(lambda: not any(alive(pid) for pid in served), 5, "its workers are gone")

    def at_rest() -> bool:
        status = sidecar.status()
        jobs = [status["jobs"]["stores"], status["fences"], status["leases"], status["slots"]["writing"]]
        return not any(jobs) and not status["engines"] and status["slots"]["quarantined"] == 0

    until(at_rest, 10, "jobs, fences, leases and quarantine are 0")
    with TinyEngine(sidecar, "doomed") as again:
        assert again.client.wait_attached(30)
        assert again.hits("r", keys_of("k", 2)) == 2
        assert again.hits("r3", keys_of("never begun", 4)) == 0


def test_an_engine_that_starts_before_its_sidecar_runs_on_misses_and_attaches_by_itself(tmp_path: Path) -> None:
    """Case 46: no sidecar means misses and nothing else."""

    class Where:
        run_dir = Path("/tmp") / f"kvf-{os.getpid()}-late"

    with TinyEngine(Where) as engine:  # type: ignore[arg-type]
        started = time.monotonic()
        for number in range(100):
            assert engine.hits(f"r{number}", keys_of("a", 4)) == 0
            assert engine.client.store(f"r{number}", keys_of("a", 4), [0, 1, 2, 3]) == 0
            engine.step()
        assert time.monotonic() - started < 2
        with Sidecar(run_dir=Where.run_dir) as sidecar:
            until(lambda: attached(engine), 20, "attached by itself")
            round_trip(engine, "x")
            assert sidecar.status()["links"]["client"] == 1
        until(lambda: not attached(engine), 10, "the sidecar's end was noticed")
        assert engine.hits("last", keys_of("x", 3)) == 0


@pytest.mark.parametrize("victim", ["daemon", "spare"])
def test_a_stopped_daemon_or_spare_is_noticed_killed_and_replaced_and_the_workers_stay(victim: str) -> None:
    """Cases 48 and 53: a process that hangs without dying; nobody goes on by himself here."""
    with Sidecar() as sidecar, TinyEngine(sidecar) as engine:
        assert engine.client.wait_attached(30)
        round_trip(engine, "first")
        serving = [rank.worker_pid for rank in engine.ranks]
        until(lambda: len(sidecar.children()) == 5, what="the next spares")
        [stopped] = [sidecar.daemon()] if victim == "daemon" else set(sidecar.workers(1)) - set(serving)
        os.kill(stopped, signal.SIGSTOP)
        began = time.monotonic()
        if victim == "daemon":
            with pytest.raises(LostError, match=rf"\(pid {stopped}\) is stopped\n  fix: "):
                ask_status(RunDir.at(sidecar.run_dir))
        else:
            os.kill(engine.ranks[1].worker_pid, signal.SIGKILL)  # its rank now knocks where nobody opens
        until(lambda: not alive(stopped), 30, "the stopped one is killed")
        noticed = time.monotonic() - began
        until(lambda: attached(engine) and stopped not in sidecar.children(), 60, "attached again")
        # The client may not have heard of the end yet, and ask the dead: that is a miss, and asked again.
        until(lambda: engine.hits("after", keys_of("first", 3)) == 3, 30, "all keys hit again")
        print(f"{victim}: killed after {noticed:.2f} s, hits again after {time.monotonic() - began:.2f} s")
        # Asked within a second, and then five looks, a second apart.
        assert noticed > 4.5
        assert any("it does nothing (state T)" in line for line in sidecar.lines)
        assert engine.ranks[0].worker_pid == serving[0]
        if victim == "daemon":
            assert engine.ranks[1].worker_pid == serving[1]
            assert sidecar.status()["daemon_restarts"] == 1
        round_trip(engine, "second")


def test_a_daemon_for_which_there_is_no_room_is_tried_again_and_the_workers_stay() -> None:
    """No process, memory or descriptor to be had: that is no death, is said, and is over when it is over."""
    with Sidecar("--restarts", "1") as sidecar:
        workers = [*sidecar.workers(0), *sidecar.workers(1)]

        def doing() -> str:
            return (read_lock(RunDir.at(sidecar.run_dir)) or (0, ""))[1]

        limits = resource.prlimit(sidecar.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(sidecar.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
        os.kill(sidecar.daemon(), signal.SIGKILL)
        until(lambda: doing().endswith("2 in a row"), 20, "tried twice")
        done = kvferry("status", "--json", "--check", "--run-dir", sidecar.run_dir)
        assert done.returncode == 1
        assert "the daemon cannot be started: [Errno 24] Too many open files" in json.loads(done.stdout)["text"]
        resource.prlimit(sidecar.pid, resource.RLIMIT_NOFILE, limits)
        until(lambda: doing() == SERVING, 30, "served again")
        assert [*sidecar.workers(0), *sidecar.workers(1)] == workers
        assert sidecar.status()["daemon_restarts"] == 1
        assert len([line for line in sidecar.lines if "cannot be started" in line]) == 1


def test_a_stopped_up_whose_daemon_is_dead_is_named_to_programs_too() -> None:
    with Sidecar(tp_size=1) as sidecar:
        daemon = sidecar.daemon()
        os.kill(sidecar.pid, signal.SIGSTOP)
        try:
            os.kill(daemon, signal.SIGKILL)
            until(lambda: not alive(daemon), 5, "the daemon is dead")
            words = kvferry("status", "--run-dir", sidecar.run_dir)
            done = kvferry("status", "--json", "--run-dir", sidecar.run_dir)
        finally:
            os.kill(sidecar.pid, signal.SIGCONT)
        answer = json.loads(done.stdout)
        assert answer["state"] == "daemon.lost" and f"kvferry up (pid {sidecar.pid})" in answer["text"]
        assert "is stopped (state T)" in answer["text"] and f"`kill -CONT {sidecar.pid}`" in answer["text"]
        assert (done.returncode, done.stderr) == (words.returncode, "") and words.returncode == 1
        until(lambda: kvferry("status", "--run-dir", sidecar.run_dir).returncode == 0, 30, "another daemon")
