"""Who can reach a sidecar, and what somebody who only takes can do to it."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvferry.net.paths import RunDir
from kvferry.net.peer import Peer
from kvferry.proto.control import Hello, StatusAsk
from kvferry.proto.ids import LinkId
from tests.process.sidecar import Sidecar, until
from tests.process.tiny_engine import TinyEngine, keys_of

pytestmark = pytest.mark.process


def sockets_of(pid: int) -> set[str]:
    """Inodes of a process's sockets."""
    found = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(fd.readlink())
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            found.add(target.removeprefix("socket:[").removesuffix("]"))
    return found


def test_nothing_listens_on_a_network(shared: Sidecar) -> None:
    """Case 132: unix sockets and nothing else, whoever asks."""
    inodes = {inode for pid in [shared.pid, *shared.children()] for inode in sockets_of(pid)}
    assert inodes
    for family in ("tcp", "tcp6", "udp", "udp6"):
        table = Path("/proc/net") / family
        rows = table.read_text().splitlines()[1:] if table.exists() else []
        assert not inodes & {row.split()[9] for row in rows}, f"a socket of {family}"


def test_many_who_ask_and_never_read_hold_nobody_up(shared: Sidecar) -> None:
    """Case 132: their answers are cut off, not waited for."""
    peers = [Peer(RunDir.at(shared.run_dir), LinkId(1000 + number)) for number in range(30)]
    try:
        for peer in peers:
            peer.send(Hello(role="admin", software="deaf", pid=os.getpid()))
            for _ in range(50):
                peer.send(StatusAsk())
            peer.flush()
        with TinyEngine(shared, "between") as engine:
            assert engine.client.wait_attached(30)
            engine.fill([0, 1], seed=1)
            assert engine.store("r", keys_of("between", 2), [0, 1]).name == "OK"
            assert engine.hits("r2", keys_of("between", 2)) == 2
    finally:
        for peer in peers:
            peer.close()
    until(lambda: shared.status()["links"]["admin"] <= 1, 10, "their links are over")


def is_served(engine: TinyEngine) -> bool:
    """Client and ranks agree that they are attached: a rank that gave up on a slow worker tries again."""
    engine.client.poll()
    for rank in engine.ranks:
        rank.poll()
    return engine.client.attached and all(rank.attached for rank in engine.ranks)


class Stream(threading.Thread):
    """One of an engine's many requests: stores and loads without a pause, its bytes compared."""

    def __init__(self, engine: TinyEngine, number: int, until_s: float) -> None:
        super().__init__()
        self.engine, self.number, self.until_s = engine, number, until_s
        self.rounds = 0
        self.lookups: list[float] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while time.monotonic() < self.until_s:
                self.turn()
        except BaseException as error:
            self.error = error

    def turn(self) -> None:
        """One lookup; its answer is all that is asked for: copies of the others go on meanwhile."""
        began = time.perf_counter()
        self.engine.client.lookup(f"ask {self.number}/{self.rounds}", keys_of("shared", 8))
        while not self.engine.client.hits(f"ask {self.number}/{self.rounds}").ready:
            time.sleep(0.0005)
        self.lookups.append(time.perf_counter() - began)
        self.engine.client.finish(f"ask {self.number}/{self.rounds}")
        self.rounds += 1
        time.sleep(0.005)


@pytest.mark.slow
def test_two_engines_with_many_streams_are_answered_while_everything_copies(sidecar: Sidecar) -> None:
    """Case 47: control and copies share no process, so lookups are answered in their time, and nothing stands still.

    Case 125: two clients in one process count for themselves.
    """
    with (
        TinyEngine(sidecar, "one", block_bytes=65536) as one,
        TinyEngine(sidecar, "two", block_bytes=65536) as two,
    ):
        streams: list[Stream] = []
        for engine in (one, two):
            until(lambda e=engine: is_served(e), 30, "both engines are served")  # type: ignore[misc]
            engine.fill(list(range(8)), seed=1)
            engine.store("shared", keys_of("shared", 8), list(range(8)))
            engine.client.finish("shared")
        end = time.monotonic() + 4
        streams = [Stream(engine, number, end) for engine in (one, two) for number in range(4)]
        for stream in streams:
            stream.start()
        copies = 0
        while time.monotonic() < end:
            for name, engine in (("one", one), ("two", two)):
                keys = keys_of(f"{name} {copies}", 8)
                engine.fill(list(range(8)), seed=copies)
                before = engine.bytes_of(list(range(8)))
                assert engine.store(f"s{copies}", keys, list(range(8))).name == "OK"
                held = until(lambda e=engine, k=keys, r=f"l{copies}": e.hits(r, k), 5)  # type: ignore[misc]
                assert held == 8
                assert all(word.ok for word in engine.load(f"l{copies}", keys, list(range(16, 24))))
                assert engine.bytes_of(list(range(16, 24))) == before
                for request in (f"s{copies}", f"l{copies}"):
                    engine.client.finish(request)
            copies += 1
        for stream in streams:
            stream.join(10)
        assert not any(stream.error for stream in streams), [stream.error for stream in streams]
        taken = np.array([seconds for stream in streams for seconds in stream.lookups])
        assert copies >= 3 and len(taken) > 50
        for engine in (one, two):
            asked = sum(stream.rounds for stream in streams if stream.engine is engine)
            assert (engine.client.counters.stores, engine.client.counters.loads) == (copies + 1, copies)
            assert engine.client.counters.lookups >= asked + copies
        assert np.quantile(taken, 0.99) < 0.5, f"99 of 100 lookups within {np.quantile(taken, 0.99):.3f} s"


IN_A_CONTAINER = """
import os, sys
from pathlib import Path
from tests.process.sidecar import until
from tests.process.test_reach import is_served
from tests.process.tiny_engine import TinyEngine, keys_of
class Where: run_dir = Path(sys.argv[1])
name = sys.argv[2]
with TinyEngine(Where, name) as engine:
    until(lambda: is_served(engine), 30, f"served: {engine.notes}")
    engine.fill([0, 1, 2], seed=len(name))
    before = engine.bytes_of([0, 1, 2])
    assert engine.store("r", keys_of(name, 3), [0, 1, 2]).name == "OK"
    print(os.getpid(), flush=True)
    sys.stdin.readline()  # until the other one has stored too
    assert engine.hits("q", keys_of(name, 3)) == 3
    assert all(end.ok for end in engine.load("q", keys_of(name, 3), [5, 6, 7]))
    assert engine.bytes_of([5, 6, 7]) == before
    print("right", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.slow
def test_two_engines_that_are_both_process_1_of_their_containers_do_not_meet(shared: Sidecar) -> None:
    """Case 85: names and ids are the engines' and the daemon's, never a process's number."""
    root = Path(__file__).parents[2]
    command = ["unshare", "-Urpf", "--kill-child", sys.executable, "-c", IN_A_CONTAINER, str(shared.run_dir)]
    if subprocess.run(["unshare", "-Urpf", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no PID namespaces here")
    engines = [
        subprocess.Popen([*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)
        for name in ("left", "right one")
    ]
    try:
        for engine in engines:
            assert engine.stdout is not None
            assert engine.stdout.readline() == "1\n"
        for word in ("right\n", ""):
            for engine in engines:
                assert engine.stdin is not None and engine.stdout is not None
                engine.stdin.write("go on\n")
                engine.stdin.flush()
                assert engine.stdout.readline() == word
        assert [engine.wait(10) for engine in engines] == [0, 0]
    finally:
        for engine in engines:
            engine.kill()
            engine.wait()
            for pipe in (engine.stdin, engine.stdout):
                assert pipe is not None
                pipe.close()
