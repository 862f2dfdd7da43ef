"""A tiny engine whose scheduler and ranks are processes of their own, so that each can be killed or stopped.

    the test ──lines of JSON──▶ scheduler (Client) · rank 0 (RankClient, numbers for a KV cache) · rank 1 · ...

    engine = FarEngine(ranks=2)                its processes start and import; nothing is attached yet
    engine.open(sidecar.run_dir)               Client and RankClients are made, each in its process
    engine.begin("store", keys, blocks)        a step with this one transfer; ranks obey its directive
    engine.look()                              every process that lives polls; what was learned

An error inside any of the processes is an AssertionError here: no fault of the sidecar may raise in an engine.
"""

import dataclasses
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvferry import Client, Directive, RankClient, shared_array
from kvferry.client.memory import from_arrays
from tests.process.sidecar import alive, environment

ROOT: Final = Path(__file__).parents[2]
BLOCK_BYTES: Final = 1 << 20
NUM_BLOCKS: Final = 96
ANSWER_S: Final = 30.0


def keys_of(text: str, count: int) -> list[bytes]:
    """A chain of block keys."""
    return [hashlib.sha256(f"{text}/{i}".encode()).digest() for i in range(count)]


# ---- in the engine's processes ---------------------------------------------------------------------


class Scheduler:
    """What the scheduler's process is told."""

    def open(self, run_dir: str, name: str, world: int) -> None:
        self.notes: list[str] = []
        self.client = Client(
            name,
            world_size=world,
            key_bytes=32,
            num_blocks=NUM_BLOCKS,
            block_tokens=16,
            run_dir=run_dir,
            patience_s=5.0,  # `hits` here has a patience of its own
            on_note=lambda text: self.notes.append(f"{time.monotonic():.2f} {text}"),
        )

    def begin(self, kind: str, request: str, text: str, blocks: list[int]) -> dict[str, Any]:
        """One step with one transfer; its ticket (0: not taken) and the ranks' directive."""
        ask = self.client.store if kind == "store" else self.client.load
        ticket = ask(request, keys_of(text, len(blocks)), blocks)
        return {"ticket": ticket, "directive": dataclasses.asdict(self.client.end_step())}

    def hits(self, request: str, text: str, count: int, patience_s: float) -> int:
        """How many of the chain's keys are held; 0 without an answer in time. The request keeps its lease."""
        end = time.monotonic() + patience_s
        self.client.lookup(request, keys_of(text, count))
        while not (hits := self.client.hits(request)).ready and time.monotonic() < end:
            self.client.end_step()
            time.sleep(0.001)
        return hits.count

    def finish(self, request: str) -> None:
        self.client.finish(request)
        self.client.end_step()

    def load_ended(self, ticket: int, ok: bool) -> None:
        self.client.load_ended(ticket, ok)

    def poll(self) -> dict[str, Any]:
        ends = [[end.ticket, end.outcome.name] for end in self.client.poll()]
        return {"ends": ends, "attached": self.client.attached}

    def describe(self) -> dict[str, Any]:
        counters = dataclasses.asdict(self.client.counters)
        return {**self.client.describe(), "counters": counters, "notes": self.notes[-8:]}

    def close(self) -> None:
        self.client.close()


class Rank:
    """What a rank's process is told."""

    def __init__(self) -> None:
        self.array, self.fd = shared_array((NUM_BLOCKS, BLOCK_BYTES), np.uint8)
        self.rank = 0

    def open(self, run_dir: str, name: str, world: int, rank: int) -> int:
        """The inode of its memory, by which a mapping of it is known."""
        self.rank = rank
        memory = from_arrays({"layer": self.array}, self.array, self.fd, block_tokens=16)
        self.notes: list[str] = []
        self.client = RankClient(
            name,
            rank,
            world_size=world,
            memory=memory,
            run_dir=run_dir,
            load_timeout_s=2.0,
            on_note=lambda text: self.notes.append(f"{time.monotonic():.2f} {text}"),
        )
        return os.fstat(self.fd).st_ino

    def fill(self, blocks: list[int], seed: int) -> None:
        rng = np.random.default_rng([seed, self.rank])
        for block in blocks:
            self.array[block] = np.tile(rng.integers(0, 256, 4096, dtype=np.uint8), BLOCK_BYTES // 4096)

    def digest(self, blocks: list[int]) -> str:
        return hashlib.sha256(self.array[blocks]).hexdigest()

    def begin(self, directive: dict[str, Any]) -> None:
        order = Directive(**directive)
        self.client.revoke(order)
        self.client.begin_loads(order)
        self.client.begin_stores(order)

    def poll(self) -> dict[str, Any]:
        words = [[end.ticket, end.ok, end.outcome.name] for end in self.client.poll().loads]
        return {"words": words, "attached": self.client.attached, "worker": self.client.worker_pid}

    def describe(self) -> dict[str, Any]:
        return {**self.client.describe(), "notes": self.notes[-8:]}

    def close(self) -> None:
        self.client.close()


def serve(part: Scheduler | Rank) -> None:
    """Obey lines until there are no more; each is answered, with how long it took."""
    for line in sys.stdin:
        name, arguments = json.loads(line)
        began = time.monotonic()
        try:
            answer: dict[str, Any] = {"is": getattr(part, name)(*arguments)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps({**answer, "call": name, "s": time.monotonic() - began}), flush=True)
        if name == "close":
            return


# ---- in the test -----------------------------------------------------------------------------------


class Process:
    """One of the engine's processes, seen from the test."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.longest_s = 0.0  # that a call of an engine's step took
        self.stopped = False
        self._owed = 0  # answers not heard yet
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "tests.process.far_engine", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=environment(),
        )
        self.pid = self._popen.pid

    @property
    def lives(self) -> bool:
        """Whether it runs and can be spoken to."""
        return not self.stopped and self._popen.poll() is None

    def tell(self, name: str, *arguments: Any) -> None:
        """Say a line; `hear` its answer, or let the next call do it."""
        self._owed += 1
        assert self._popen.stdin is not None
        self._popen.stdin.write(json.dumps([name, arguments]).encode() + b"\n")
        self._popen.stdin.flush()

    def hear(self, timeout_s: float = ANSWER_S) -> Any:
        """The answer to the line said last."""
        out = self._popen.stdout
        assert out is not None
        assert select.select([out], [], [], timeout_s)[0], f"the engine's {self.kind} hangs"
        self._owed -= 1
        line = out.readline()
        assert line, f"the engine's {self.kind} is gone"
        answer = json.loads(line)
        assert "error" not in answer, f"raised in the engine's {self.kind}:\n{answer['error']}"
        if answer["call"] in ("begin", "poll", "finish", "load_ended"):
            self.longest_s = max(self.longest_s, answer["s"])
        return answer["is"]

    def call(self, name: str, *arguments: Any) -> Any:
        """Say and hear."""
        while self._owed:
            self.hear()
        self.tell(name, *arguments)
        return self.hear()

    def signal(self, number: signal.Signals) -> None:
        if number is signal.SIGSTOP:
            self.stopped = True
        if self._popen.poll() is None:
            self._popen.send_signal(number)
        if number is signal.SIGCONT:
            self.stopped = False
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.wait()

    def end(self) -> None:
        """No questions asked."""
        self._popen.kill()
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue

    def wait(self, timeout_s: float = 10.0) -> None:
        self._popen.wait(timeout_s)


class FarEngine:
    """Scheduler and ranks together: what an engine's loop does, one call a deed."""

    def __init__(self, ranks: int = 2, name: str = "far") -> None:
        self.name = name
        self.scheduler = Process("scheduler")
        self.ranks = [Process("rank") for _ in range(ranks)]
        self.inodes: list[int] = []
        self.worker_pids = [0] * ranks
        self.rank_attached = [False] * ranks
        self.client_attached = False
        self.ends: dict[int, str] = {}  # ticket -> outcome, as the scheduler heard it
        self.words: dict[int, dict[int, tuple[bool, str]]] = {}  # ticket -> rank -> its word on a load

    @property
    def processes(self) -> list[Process]:
        return [self.scheduler, *self.ranks]

    @property
    def attached(self) -> bool:
        """As of the last look."""
        return self.client_attached and all(self.rank_attached)

    @property
    def longest_s(self) -> float:
        return max(process.longest_s for process in self.processes)

    def start_open(self, run_dir: Path) -> None:
        """Make the clients, in all processes at once."""
        self.scheduler.tell("open", str(run_dir), self.name, len(self.ranks))
        for number, rank in enumerate(self.ranks):
            rank.tell("open", str(run_dir), self.name, len(self.ranks), number)

    def hear_open(self) -> None:
        """Wait for those that live until they are made."""
        if self.scheduler.lives:
            self.scheduler.hear()
        self.inodes = [rank.hear() for rank in self.ranks if rank.lives]

    def open(self, run_dir: Path) -> None:
        self.start_open(run_dir)
        self.hear_open()

    def fill(self, blocks: list[int], seed: int) -> None:
        for rank in self.ranks:
            rank.call("fill", blocks, seed)

    def digests(self, blocks: list[int]) -> list[str]:
        return [rank.call("digest", blocks) for rank in self.ranks]

    def hits(self, request: str, text: str, count: int, *, keep: bool = False, patience_s: float = 0.05) -> int:
        """Leading keys held; the request is over after it unless `keep`."""
        found: int = self.scheduler.call("hits", request, text, count, patience_s)
        if not keep:
            self.scheduler.call("finish", request)
        return found

    def begin(self, kind: str, request: str, text: str, blocks: list[int]) -> int:
        """One step with one transfer on all ranks that live; its ticket, 0 if it was not taken.

        Does not wait until the ranks have obeyed: what comes next may meet them in the middle of it.
        """
        said = self.scheduler.call("begin", kind, request, text, blocks)
        for rank in self.ranks:
            if rank.lives:
                rank.tell("begin", said["directive"])
        ticket: int = said["ticket"]
        return ticket

    def look(self) -> None:
        """Poll whatever lives."""
        for number, rank in enumerate(self.ranks):
            if rank.lives:
                said = rank.call("poll")
                self.rank_attached[number], self.worker_pids[number] = said["attached"], said["worker"]
                for ticket, ok, outcome in said["words"]:
                    words = self.words.setdefault(ticket, {})
                    assert number not in words, "a second word on one load"
                    words[number] = (ok, outcome)
        if self.scheduler.lives:
            said = self.scheduler.call("poll")
            self.client_attached = said["attached"]
            for ticket, outcome in said["ends"]:
                assert ticket not in self.ends, "a second end of one ticket"
                self.ends[ticket] = outcome

    def load_is_over(self, ticket: int) -> bool:
        """Whether every rank has spoken on it."""
        return len(self.words.get(ticket, {})) == len(self.ranks)

    def mappers(self) -> list[int]:
        """Processes beside the engine's own that have its memory mapped."""
        own = {process.pid for process in self.processes}
        words = [f" {inode} " for inode in self.inodes]
        found = []
        for process in Path("/proc").iterdir():
            if process.name.isdigit() and int(process.name) not in own:
                try:
                    lines = [line for line in (process / "maps").read_text().splitlines() if "memfd:kvferry-kv" in line]
                except OSError:
                    continue  # gone, or not ours
                if any(word in line for word in words for line in lines):
                    found.append(int(process.name))
        return found

    def close(self) -> None:
        """Leave politely with what lives, then take the processes away."""
        for process in self.processes:
            if process.lives:
                process.tell("close")
        for process in self.processes:
            if process.lives:
                process.wait()
        self.end()

    def end(self) -> None:
        """SIGKILL to all of it."""
        for process in self.processes:
            process.end()
        assert not any(alive(process.pid) for process in self.processes)


if __name__ == "__main__":
    serve(Scheduler() if sys.argv[1] == "scheduler" else Rank())
