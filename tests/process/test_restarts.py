"""Restart each part and the whole: what was committed is served again, byte for byte, and nothing grows."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvferry import Outcome
from kvferry.net.paths import RunDir
from kvferry.scheduler_daemon.core.header import HEADER_BYTES
from kvferry.scheduler_daemon.core.slots import RECORD, SlotState
from tests.process.sidecar import Sidecar, alive, kvferry, until
from tests.process.test_faults import attached, round_trip
from tests.process.tiny_engine import TinyEngine, keys_of

pytestmark = pytest.mark.process

BLOCKS = 24  # of one chain


def shm_of(run_dir: Path) -> list[Path]:
    """This instance's files in /dev/shm."""
    one = RunDir.at(run_dir)
    return sorted(one.table.parent.glob(f"kvferry-{one.instance}*"))


def store_chains(engine: TinyEngine, num: int) -> dict[str, list[bytes]]:
    """Store chains of BLOCKS blocks; their names and bytes."""
    blocks = list(range(BLOCKS))
    stored = {}
    for number in range(num):
        name = f"chain {number}"
        engine.fill(blocks, seed=100 + number)
        stored[name] = engine.bytes_of(blocks)
        assert engine.store(name, keys_of(name, BLOCKS), blocks) is Outcome.OK
    return stored


def tear_record(run_dir: Path, key: bytes) -> None:
    """Change a word of this key's record behind its checksum's back."""
    records = np.memmap(RunDir.at(run_dir).table, dtype=RECORD, mode="r+", offset=HEADER_BYTES)
    filled = np.flatnonzero(records["state"] == SlotState.READY).tolist()
    [slot] = [at for at in filled if records["key"][at].tobytes()[: len(key)] == key]
    records["payload_bytes"][slot] += 1
    records.flush()


def served_again(engine: TinyEngine, stored: dict[str, list[bytes]], attempt: str) -> int:
    """Blocks of `stored` that are held; each chain is loaded whole, and its bytes must be equal."""
    blocks = list(range(BLOCKS))
    held = 0
    for number, (name, before) in enumerate(stored.items()):
        engine.fill(blocks, seed=9000 + number)
        found = engine.hits(f"{attempt} {name}", keys_of(name, BLOCKS))
        held += found
        if found:
            words = engine.load(f"{attempt} {name}", keys_of(name, found), blocks[:found])
            assert all(word.ok for word in words)
            size = found * engine.arrays[0].shape[1]
            assert [data[:size] for data in engine.bytes_of(blocks)] == [data[:size] for data in before]
    return held


def hits_again(engine: TinyEngine, name: str, timeout_s: float) -> float:
    """Seconds until a chain is found whole again, asked as an engine does: a new request each time."""
    started = time.monotonic()
    attempts = 0

    def ask() -> bool:
        nonlocal attempts
        attempts += 1
        attached(engine)
        request = f"ask {name} {started} {attempts}"
        found = engine.hits(request, keys_of(name, 3))
        engine.client.finish(request)
        engine.step()
        return found == 3

    until(ask, timeout_s, f"{name} is found again")
    return time.monotonic() - started


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A place that several sidecars of one test share; nothing of it may be left."""
    path = Path("/tmp") / f"kvf-{os.getpid()}-{time.monotonic_ns() % 100_000}"
    yield path
    left = shm_of(path)
    for file in left:
        file.unlink()
    shutil.rmtree(path, ignore_errors=True)  # a killed sidecar's directory stays for its next start
    assert not left


# ---- the daemon alone ------------------------------------------------------------------------------------


def test_a_killed_daemon_under_load_costs_misses_for_a_moment_and_nothing_else(sidecar: Sidecar) -> None:
    """Case 45: workers stay, ranks keep their tethers, and the new daemon serves what the old one knew."""
    with TinyEngine(sidecar) as engine:
        assert engine.client.wait_attached(30)
        round_trip(engine, "first")
        boot = sidecar.status()["boot"]
        workers = [rank.worker_pid for rank in engine.ranks]
        engine.fill([10, 11], seed=5)
        ticket = engine.client.store("under way", keys_of("under way", 2), [10, 11])
        engine.step()
        os.kill(sidecar.daemon(), signal.SIGKILL)
        until(lambda: not engine.client.attached, what="the loss was noticed")
        asked = time.monotonic()
        assert engine.hits("meanwhile", keys_of("nobody has it", 3)) == 0
        assert time.monotonic() - asked < 1
        took = hits_again(engine, "first", 20)
        print(f"hits again {took:.2f} s after the daemon's death was noticed")
        assert [rank.worker_pid for rank in engine.ranks] == workers
        assert all(rank.attached for rank in engine.ranks)
        # The store under way has one end, whatever it is, and its keys are there whole or not at all.
        ends = [end.ticket for end in engine.client.poll()]
        assert ends.count(ticket) <= 1
        assert engine.hits("whole", keys_of("under way", 2)) in (0, 2)
        status = until(lambda: (now := sidecar.status()) and not now["restarting"] and now)
        assert status["boot"] != boot
        assert status["daemon_restarts"] == 1
        assert status["table"] == {"boots": 2, "discarded": ""}
        assert status["counters"]["keys_recovered"] >= 3
        assert any("another one starts, the workers and what the pool holds stay" in line for line in sidecar.lines)
        round_trip(engine, "second")
    assert [line for line in sidecar.lines if "going on with" in line] == []


def test_ten_daemon_restarts_leave_no_descriptor_thread_file_or_process_more() -> None:
    """Case 45: ten restarts, and nothing grows for whoever stays."""
    with Sidecar("--restarts", "50") as sidecar, TinyEngine(sidecar) as engine:
        assert engine.client.wait_attached(30)
        round_trip(engine, "kept")

        def footprint() -> dict[str, int]:
            pids = {"up": sidecar.pid, "client": os.getpid()}
            pids |= {f"worker {number}": rank.worker_pid for number, rank in enumerate(engine.ranks)}
            found = {f"{who} fds": len(list(Path(f"/proc/{pid}/fd").iterdir())) for who, pid in pids.items()}
            found |= {f"{who} threads": len(list(Path(f"/proc/{pid}/task").iterdir())) for who, pid in pids.items()}
            found["children"] = len(sidecar.children())
            found["shm"] = len(shm_of(sidecar.run_dir))
            return found

        for turn in range(10):
            os.kill(sidecar.daemon(), signal.SIGKILL)
            until(lambda: not engine.client.attached, what=f"the loss was noticed, turn {turn}")
            hits_again(engine, "kept", 30)
            if turn == 1:
                until(lambda: sidecar.status()["links"]["worker"] == 4, what="all workers are back")
                early = footprint()
        until(lambda: sidecar.status()["links"]["worker"] == 4, what="all workers are back")
        # What was closed goes a moment later: sockets of ZeroMQ by a thread of its own.
        until(lambda: all(held <= early[what] + 1 for what, held in footprint().items()), what=f"no more than {early}")


def test_a_daemon_that_keeps_dying_is_given_up_in_one_line_and_the_pool_is_kept(run_dir: Path) -> None:
    """A crash loop has an end that a service manager sees; what it held waits for the next start."""
    sidecar = Sidecar(tp_size=1, run_dir=run_dir)
    try:
        with TinyEngine(sidecar, ranks=1) as engine:
            assert engine.client.wait_attached(30)
            assert engine.store("r", keys_of("k", 3), [0, 1, 2]) is Outcome.OK
        for _ in range(6):
            [daemon] = until(lambda: sidecar.pids_of("kvferry.scheduler_daemon"), 10, "a daemon")
            os.kill(daemon, signal.SIGKILL)
            until(lambda pid=daemon: not alive(pid), 10)  # type: ignore[misc]
        assert sidecar.wait() == 1
        told = "kvferry: giving up: the daemon died 6 times within 30 s, the last time it ended by signal 9"
        assert told in sidecar.lines
        assert "kept for the next `kvferry up`: 64.4 MiB, 3 of " in sidecar.lines[-1]
        assert [left for left in sidecar.leftovers() if not left.startswith("/dev/shm")] == []
        done = kvferry("down", "--run-dir", run_dir)
        assert done.returncode == 0
        assert "removed what was kept: 64.4 MiB, 3 of " in done.stdout
        assert shm_of(run_dir) == []
    finally:
        sidecar.kill()


# ---- the whole tree --------------------------------------------------------------------------------------


def test_after_a_kill_of_everything_the_next_start_serves_what_was_committed(run_dir: Path) -> None:
    """Cases 32 and 45: SIGKILL of the whole tree with a store under way; the engine stays, and has it all back."""
    first = Sidecar(run_dir=run_dir)
    second = None
    with TinyEngine(first) as engine:
        try:
            assert engine.client.wait_attached(30)
            stored = store_chains(engine, 20)
            before = served_again(engine, stored, "before")
            assert before == 20 * BLOCKS
            # One that was never begun: its records say WRITING, and so they must never be served.
            engine.client.store("half", keys_of("half", 4), [28, 29, 30, 31])
            engine.client.end_step()
            until(lambda: first.status()["slots"]["writing"] == 4)
            children = first.children()
            os.kill(first.pid, signal.SIGKILL)  # and with it, by the kernel, all its children
            until(lambda: not any(alive(pid) for pid in children), 5.0, "children of a killed supervisor")
            tear_record(run_dir, keys_of("chain 7", BLOCKS)[-1])
            killed = time.monotonic()
            second = Sidecar(run_dir=run_dir)
            ready = time.monotonic() - killed
            first_hit = hits_again(engine, "chain 0", 20)
            until(lambda: attached(engine), 20, "attached again")
            after = served_again(engine, stored, "after")
            print(f"{after} of {before} blocks again; ready {ready:.2f} s after the kill, hits {first_hit:.2f} s later")
            assert after == before - 1, "all but the block whose record is torn"
            assert after >= 0.99 * before
            assert engine.hits("half again", keys_of("half", 4)) == 0
            [line] = [line for line in second.lines if "going on with what an earlier run kept" in line]
            assert "480 of " in line
            assert any("recovered 479 keys" in line and "; 5 were being written" in line for line in second.lines)
            status = second.status()
            assert status["counters"]["keys_recovered"] == 479
            assert status["slots"]["writing"] == 0
            round_trip(engine, "fresh")
            second.close()
        finally:
            first.kill()
            if second:
                second.kill()


def test_sigterm_keeps_the_pool_and_ctrl_c_does_not_and_another_size_drops_it(run_dir: Path) -> None:
    """A service manager's restart is warm; a person's end leaves nothing. Each says what it leaves."""
    ends = [
        ("SIGTERM", [], lambda s: s.stop(signal.SIGTERM)),
        ("Ctrl-C with --keep", ["--keep"], lambda s: s.stop(signal.SIGINT)),
        ("down --keep", [], lambda s: kvferry("down", "--keep", "--run-dir", run_dir).returncode),
        ("Ctrl-C", [], lambda s: s.stop(signal.SIGINT)),
    ]
    for name, flags, end in ends:
        is_first, is_last = name == ends[0][0], name == ends[-1][0]
        sidecar = Sidecar(*flags, run_dir=run_dir, host_memory="32MiB" if is_last else "64MiB")
        try:
            with TinyEngine(sidecar) as engine:
                assert engine.client.wait_attached(30)
                found = engine.hits("r", keys_of("k", 3))
                assert found == (0 if is_first or is_last else 3), f"before {name}"
                if not found:
                    assert engine.store("s", keys_of("k", 3), [0, 1, 2]) is Outcome.OK
            assert end(sidecar) == 0, name
            assert sidecar.wait() == 0
            assert [left for left in sidecar.leftovers() if not left.startswith("/dev/shm")] == []
            said = kvferry("status", "--run-dir", run_dir) if is_first or is_last else None
            kept = "64.2 MiB, 3 of 1,638 slots filled"
            if is_last:
                [line] = [line for line in sidecar.lines if "discarded what an earlier run kept" in line]
                assert "its files have 32.0 MiB, 32.0 MiB, this sidecar's have 16.0 MiB a rank" in line
                assert sidecar.lines[-1].endswith("nothing is kept"), name
                assert shm_of(run_dir) == []
            else:
                assert f"kept for the next `kvferry up`: {kept}" in sidecar.lines[-1], name
                assert len(shm_of(run_dir)) == 3
            if said:
                assert (said.returncode, kept in said.stderr) == (1, is_first)
        finally:
            sidecar.kill(files=False)


def test_a_killed_supervisor_takes_even_stopped_children_with_it_and_the_next_start_is_warm(run_dir: Path) -> None:
    """Case 32: nothing outlives it, however it stood."""
    first = Sidecar(run_dir=run_dir)
    second = None
    try:
        with TinyEngine(first) as engine:
            assert engine.client.wait_attached(30)
            assert engine.store("r", keys_of("k", 3), [0, 1, 2]) is Outcome.OK
            children = first.children()
            os.kill(engine.ranks[0].worker_pid, signal.SIGSTOP)
            os.kill(first.daemon(), signal.SIGSTOP)
            os.kill(first.pid, signal.SIGKILL)
            until(lambda: not any(alive(pid) for pid in children), 2.0, "children of a killed supervisor")
            second = Sidecar(run_dir=run_dir)
            until(lambda: attached(engine), 20, "attached again")
            assert engine.hits("again", keys_of("k", 3)) == 3
        second.close()
    finally:
        first.kill()
        if second:
            second.kill()


def test_a_stop_lets_a_running_load_end_and_takes_nothing_new_meanwhile(run_dir: Path) -> None:
    sidecar = Sidecar(run_dir=run_dir)
    try:
        with TinyEngine(sidecar) as engine:
            assert engine.client.wait_attached(30)
            keys = keys_of("k", 3)
            engine.fill([0, 1, 2], seed=1)
            before = engine.bytes_of([0, 1, 2])
            assert engine.store("s", keys, [0, 1, 2]) is Outcome.OK
            assert engine.hits("r", keys) == 3
            slow = engine.ranks[1].worker_pid
            os.kill(slow, signal.SIGSTOP)
            ticket = engine.client.load("r", keys, [5, 6, 7])
            engine.step()
            until(lambda: sidecar.status()["jobs"]["loads"] == 1)
            os.kill(sidecar.pid, signal.SIGTERM)
            until(lambda: sidecar.status()["draining"])
            assert engine.hits("new", keys) == 0
            assert sidecar.status()["state"] == "stopping: running copies end"
            os.kill(slow, signal.SIGCONT)
            ends = []

            def is_over() -> bool:
                ends.extend(end for rank in engine.ranks for end in rank.poll().loads)
                return len(ends) == 2

            until(is_over, what="each rank's word on the load")
            assert [(end.ticket, end.ok) for end in ends] == [(ticket, True)] * 2
            assert engine.bytes_of([5, 6, 7]) == before
            assert sidecar.wait() == 0
        assert "3 of 1,638 slots filled" in sidecar.lines[-1]
        assert kvferry("down", "--run-dir", run_dir).returncode == 0
    finally:
        sidecar.kill(files=False)


# ---- by word of an operator ------------------------------------------------------------------------------


def test_a_reset_makes_misses_at_once_and_no_restart_brings_anything_back(sidecar: Sidecar) -> None:
    """Case 39: in constant time, for whoever is attached, and before it is answered."""
    with TinyEngine(sidecar) as engine:
        assert engine.client.wait_attached(30)
        round_trip(engine, "old")
        [space] = sidecar.status()["namespaces"]
        assert kvferry("reset", "--namespace", "ffff0000", "--run-dir", sidecar.run_dir).returncode == 1
        assert kvferry("reset", "--run-dir", sidecar.run_dir).returncode == 2
        assert engine.hits("still", keys_of("old", 3)) == 3
        done = kvferry("reset", "--namespace", space["name"][:12], "--run-dir", sidecar.run_dir)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == f"namespace {space['name'][:12]}: epoch 1\nforgot 3 blocks of 1 namespace\n"
        assert engine.hits("gone", keys_of("old", 3)) == 0
        round_trip(engine, "new")
        os.kill(sidecar.daemon(), signal.SIGKILL)
        until(lambda: not engine.client.attached, what="the loss was noticed")
        hits_again(engine, "new", 20)
        assert engine.hits("gone for ever", keys_of("old", 3)) == 0
        assert [space["epoch"] for space in sidecar.status()["namespaces"]] == [1]


def test_a_drained_sidecar_takes_nothing_until_it_is_resumed(sidecar: Sidecar) -> None:
    with TinyEngine(sidecar) as engine:
        assert engine.client.wait_attached(30)
        round_trip(engine, "kept")
        # A store that no rank begins is what the budget is for.
        engine.client.store("never begun", keys_of("never begun", 2), [20, 21])
        engine.client.end_step()
        until(lambda: sidecar.status()["jobs"]["stores"] == 1)
        done = kvferry("drain", "--timeout", "300ms", "--run-dir", sidecar.run_dir)
        assert done.returncode == 0, done.stderr
        assert "is at rest after " in done.stdout
        assert done.stdout.endswith("; 1 store was dropped\n")
        status = sidecar.status()
        assert status["draining"] is True
        assert status["jobs"]["stores"] == 0
        assert engine.hits("drained", keys_of("kept", 3)) == 0
        assert kvferry("drain", "--resume", "--run-dir", sidecar.run_dir).returncode == 0
        hits_again(engine, "kept", 10)
        round_trip(engine, "again")
