"""SIGKILL of an engine's rank during its stores and loads, again and again over one pool file."""

import json
import os
import random
import select
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kvferry.proto.columns import u8, u64
from kvferry.proto.control import Attach, Attached, RankGone
from kvferry.proto.hot import Done
from kvferry.proto.outcome import Kind, Outcome
from tests.worker.engine_process import NUM_BLOCKS, SLOT_BYTES, crc_of, stamped
from tests.worker.sidecar import ROOT, WORKER_ID, Sidecar, wait_for

pytestmark = pytest.mark.process

NUM_ROUNDS, NUM_SLOTS, NUM_KEPT = 20, 12, 4


class Engine:
    """The other end of `engine_process`."""

    def __init__(self, sidecar: Sidecar) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.worker.engine_process", str(sidecar.run_dir.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        self.sidecar = sidecar
        self.unread = b""

    def tell(self, **words) -> None:
        self.process.stdin.write(json.dumps(words).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self) -> dict:
        def ask():
            self.sidecar.daemon.turn()
            if select.select([self.process.stdout], [], [], 0)[0]:
                self.unread += os.read(self.process.stdout.fileno(), 1 << 16)
            return b"\n" in self.unread

        wait_for(ask, "word of the engine")
        line, self.unread = self.unread.split(b"\n", 1)
        return json.loads(line)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def mappers_of(name: str) -> list[int]:
    """Processes that have an engine's memory mapped or open."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            if f"/memfd:{name} " in (proc / "maps").read_text() or any(
                fd.readlink().name.startswith(f"memfd:{name} ") for fd in (proc / "fd").iterdir()
            ):
                found.append(int(proc.name))
        except OSError:
            continue  # gone, or not ours
    return found


class Rounds:
    """One pool file, one daemon, an engine and a worker for each round; what the slots are known to hold."""

    def __init__(self, path: Path) -> None:
        self.sidecar = Sidecar(path, pool_bytes=NUM_SLOTS * SLOT_BYTES)
        self.known: dict[int, tuple[int, int]] = {}  # slot -> generation, crc
        self.luck = random.Random(3)
        self.generation = 0
        self.ticket = 0
        self.num_loaded = 0
        self.took_s: list[float] = []  # from each engine's death to the end of who mapped its memory
        self.engine = self.next_engine = Engine(self.sidecar)

    def close(self) -> None:
        for engine in {self.engine, self.next_engine}:
            engine.end()
        self.sidecar.close()

    def play(self, number: int) -> None:
        """A new engine hits what the earlier ones stored, works, and is killed in the middle of it."""
        sidecar, self.engine = self.sidecar, self.next_engine
        name = f"kv-round-{number}"
        worker = sidecar.processes[number]
        self.engine.tell(connect=name)
        assert sidecar.daemon.take(Attach).worker == WORKER_ID + number
        sidecar.daemon.send(Attached(slots=NUM_SLOTS))
        sidecar.hear("taken", number)
        assert self.engine.hear() == {"pid": worker.pid}
        link = sidecar.daemon.link
        sidecar.spawn(WORKER_ID + number + 1)
        self.next_engine = Engine(sidecar)

        self.load_all_that_is_known()
        assert len(mappers_of(name)) == 2
        stores = self.begin_work(number)
        time.sleep(self.luck.random() * 0.03 if number else 1)
        self.engine.process.kill()
        killed = time.monotonic()
        self.engine.process.wait()

        def ask():
            sidecar.daemon.turn()  # which acknowledges the worker's last words
            return worker.poll() is not None

        wait_for(ask, "end of the worker")
        self.took_s.append(time.monotonic() - killed)
        assert worker.returncode == 0 and mappers_of(name) == []
        self.engine.end()

        sidecar.daemon.link = link
        sidecar.daemon.take(RankGone)
        for job, outcome in self.dones():
            if outcome is Outcome.OK and job in stores:
                self.known |= stores[job]
        # The spare that takes over.
        sidecar.make_spare(number + 1)

    def load_all_that_is_known(self) -> None:
        """Byte-exact, by the checksum of what the engine sees in its blocks."""
        begun, wanted = {}, {}
        for slot, (generation, crc) in self.known.items():
            self.ticket += 1
            block = len(begun) % NUM_BLOCKS
            self.sidecar.plan(self.ticket, Kind.LOAD, [block], [slot], generation)
            begun[self.ticket], wanted[str(self.ticket)] = [block], [int(Outcome.OK), crc]
        if not begun:
            return
        self.engine.tell(begin=begun)
        ended: dict = {}
        while len(ended) < len(begun):
            ended |= self.engine.hear()["ended"]
        assert ended == wanted
        self.num_loaded += len(ended)
        assert {outcome for _, outcome in self.dones(len(ended))} == {Outcome.OK}

    def begin_work(self, number: int) -> dict[int, dict[int, tuple[int, int]]]:
        """Stores to half of the slots and loads from the others, all at once; what each store's job would give.

        The first slots are stored once and loaded ever after.
        """
        self.engine.tell(stamp=number)
        bytes_of = stamped(number)
        slots = list(range(NUM_SLOTS))
        self.luck.shuffle(slots)
        begun, stores = {}, {}
        for block, slot in enumerate(slots):
            self.ticket += 1
            begun[self.ticket] = [block]
            if slot in self.known and (slot < NUM_KEPT or block >= NUM_SLOTS // 2):
                self.sidecar.plan(self.ticket, Kind.LOAD, [block], [slot], self.known[slot][0])
                continue
            self.generation += 1
            self.known.pop(slot, None)
            self.sidecar.plan(self.ticket, Kind.STORE, [block], [slot], self.generation)
            made = (self.generation, crc_of(bytes_of, [block]))
            stores[self.sidecar.job(self.ticket)] = {slot: made}
        self.engine.tell(begin=begun)
        return stores

    def dones(self, at_least: int = 0) -> list[tuple[int, Outcome]]:
        """What the daemon has been told; waits for so many."""
        rows: list[tuple[int, Outcome]] = []

        def ask():
            self.sidecar.daemon.turn()
            for entry in [entry for entry in self.sidecar.daemon.inbox if isinstance(entry[1], Done)]:
                self.sidecar.daemon.inbox.remove(entry)
                jobs, outcomes = u64(entry[1].jobs).tolist(), u8(entry[1].outcomes).tolist()
                rows.extend(zip(jobs, map(Outcome, outcomes), strict=True))
            return len(rows) >= at_least

        wait_for(ask, "dones")
        return rows


def test_twenty_engines_killed_in_the_middle_of_their_work_leave_a_whole_pool_and_no_mapping(tmp_path):
    """Case 30, I8: each time the mappings are gone within two seconds, and the next engine hits what was committed."""
    rounds = Rounds(tmp_path)
    try:
        rounds.sidecar.make_spare()
        for number in range(NUM_ROUNDS):
            rounds.play(number)
        print(f"mappings gone after {max(rounds.took_s):.3f} s at most")
        assert max(rounds.took_s) < 2
        assert rounds.num_loaded >= NUM_KEPT * (NUM_ROUNDS - 1)
        assert np.all([process.poll() == 0 for process in rounds.sidecar.processes[:-1]])
    finally:
        rounds.close()


def test_an_engine_killed_while_it_registers_leaves_no_mapping_either(tmp_path):
    """Case 30: death in the warm-up is seen as any other; nothing waits for a first transfer or a first ping."""
    sidecar = Sidecar(tmp_path, pool_bytes=NUM_SLOTS * SLOT_BYTES)
    engine = Engine(sidecar)
    try:
        sidecar.make_spare()
        engine.tell(connect="kv-warm-up")
        sidecar.daemon.take(Attach)
        assert len(mappers_of("kv-warm-up")) == 2
        engine.process.kill()
        assert sidecar.wait_exit(2) == 0
        engine.process.wait()
        assert mappers_of("kv-warm-up") == []
    finally:
        engine.end()
        sidecar.close()
