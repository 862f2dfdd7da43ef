"""The table of all faults, played: every part of sidecar and engine, killed, stopped and ended, at every moment.

    python -m tests.process.fault_table [WORDS ...]     the rows whose names hold all words, as docs/faults.md has them

    Bench ── a sidecar (2 ranks, short deadlines) ── an engine in processes of its own ── keys that it stored once
      └─ play(row):  the moment ─▶ the strike ─▶ the engine's loop goes on ─▶ served again ─▶ bytes, sums, processes

The stored keys are never stored again: each row must find them all after its fault, byte-exact. What every
row must keep is asserted here; the numbers are for people.
"""

import concurrent.futures
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvferry.cli.ask import ask_status
from kvferry.net.paths import RunDir
from kvferry.proto.errors import KvferryError
from tests.process.far_engine import FarEngine
from tests.process.sidecar import Sidecar, alive, kvferry, until

PARTS: Final = ("worker", "daemon", "supervisor", "whole sidecar", "engine scheduler", "engine rank")
BOTH: Final = "sidecar and engine"
KINDS: Final = ("SIGKILL", "SIGSTOP", "clean exit")
MOMENTS: Final = ("idle", "during a store", "during a load", "during attach")

DEADLINE_S: Final = 1.0
GRACE_S: Final = 1.0
STOP_S: Final = 4.0  # longer than deadline and grace together
NOTICE_S: Final = 1.0  # of a death, by the kernel
UNMAP_S: Final = 2.0  # of a dead engine's memory
LOAD_S: Final = 6.0  # its timeout at the rank, the daemon's deadline and grace, and a busy machine
CALL_S: Final = 1.0  # no call of an engine's thread takes longer
RECOVER_S: Final = 40.0  # processes start slowly on a busy machine

STORED: Final = list(range(24))  # blocks whose keys are stored once
MOVING: Final = list(range(24, 48))  # blocks of the store that is under way
TARGET: Final = list(range(48, 72))  # blocks that loads fill


@dataclass(frozen=True, slots=True)
class Row:
    """One fault."""

    part: str
    kind: str
    moment: str

    @property
    def name(self) -> str:
        return f"{self.part}, {self.kind}, {self.moment}"

    @property
    def is_engines(self) -> bool:
        return self.part.startswith("engine")

    @property
    def ends_engine(self) -> bool:
        return (self.is_engines or self.part == BOTH) and self.kind != "SIGSTOP"

    @property
    def ends_sidecar(self) -> bool:
        return self.part in ("supervisor", "whole sidecar", BOTH) and self.kind != "SIGSTOP"


ROWS: Final = [Row(part, kind, moment) for part in PARTS for kind in KINDS for moment in MOMENTS]
ROWS.append(Row(BOTH, "SIGKILL", "during a store"))  # nobody is left who could clean up after the other


@dataclass(slots=True)
class Played:
    """What a row did."""

    outcome: str = ""
    notice_s: float | None = None  # None: nobody needs to notice
    recover_s: float = 0.0  # from the strike, or from the end of a stop, until all keys hit again
    lost: int = 0  # of the stored keys
    in_flight: int = 0  # keys of the store that was under way and was not kept
    effect: str = ""

    def cells(self, row: Row) -> str:
        notice = "—" if self.notice_s is None else f"{self.notice_s:.2f}"
        lost = f"{self.lost} of {len(STORED)}" + (f"; {self.in_flight} in flight" if self.in_flight else "")
        cells = (row.part, row.kind, row.moment, self.outcome, notice, f"{self.recover_s:.2f}", lost, self.effect)
        return "| " + " | ".join(cells) + " |"


HEAD: Final = (
    "| part | kind of fault | moment | outcome | seconds to notice | seconds to recover"
    " | lost blocks | engine effect |\n|---|---|---|---|---:|---:|---|---|"
)


@dataclass(slots=True)
class _Strike:
    """A fault that has happened."""

    at: float
    pids: list[int]
    resumed: threading.Event = field(default_factory=threading.Event)
    resumed_at: float = 0.0
    next_sidecar: "concurrent.futures.Future[Sidecar] | None" = None


class Bench:
    """A sidecar and an engine on which rows are played one after another."""

    def __init__(self) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="kvf-", dir="/tmp")
        self.run_dir = Path(self._home.name) / "run"
        self._past: list[Sidecar] = []
        self._threads = concurrent.futures.ThreadPoolExecutor(2)
        self._number = 0
        self.spare = FarEngine()
        self.engine = FarEngine()
        self.sidecar = self._start()
        self.engine.open(self.run_dir)
        self._store_the_keys()

    def close(self) -> None:
        """Stop all of it; AssertionError if anything is left."""
        try:
            self.engine.close()
            self.spare.end()
            self.sidecar.stop()
            left = self.sidecar.leftovers()
            assert not left, f"left behind: {left}"
        finally:
            self.kill()

    def kill(self) -> None:
        """No questions asked."""
        self._threads.shutdown()
        for engine in (self.engine, self.spare):
            engine.end()
        for sidecar in [*self._past, self.sidecar]:
            sidecar.kill()
        self._home.cleanup()

    # ---- one row -------------------------------------------------------------------------------------

    def play(self, row: Row) -> Played:
        """The whole of it: AssertionError with the reason if a promise is broken."""
        self._number += 1
        self._be_ready()
        played = Played()
        old_workers = list(self.engine.worker_pids)
        ticket, text = 0, f"row {self._number}"
        pids = self._aim(row)
        if row.moment == "during attach":
            self.engine.close()
            until(lambda: len(self.sidecar.children()) == 3, 10, "the engine's workers are gone")
            self.engine, self.spare = self.spare, FarEngine()
            self.engine.start_open(self.run_dir)
            time.sleep(self._number % 5 * 0.004)  # the moment is the point: anywhere in the attachment
        elif row.moment != "idle":
            ticket = self._begin(row.moment, text)
        strike = self._strike(row, pids)
        if row.moment == "during attach":
            if row.kind == "SIGSTOP":
                strike.resumed.wait()
            self.engine.hear_open()
        if row.part == BOTH:
            self._watch_both(strike, played)
        elif row.ends_engine:
            self._watch_engine(row, strike, played, old_workers)
        else:
            self._watch_sidecar(row, strike, played, old_workers, ticket)
        self._judge(row, played, ticket, text)
        return played

    def _be_ready(self) -> None:
        """Served, and with nothing left of the row before."""
        self.be_served()
        self.engine.words.clear()
        self.engine.ends.clear()
        for process in self.engine.processes:
            process.longest_s = 0.0

    def _strike(self, row: Row, pids: list[int]) -> _Strike:
        engine_part = self.engine.scheduler if row.part == "engine scheduler" else self.engine.ranks[1]
        if row.is_engines:
            send = engine_part.signal
        else:

            def send(number: signal.Signals) -> None:
                for pid in pids:
                    if alive(pid):
                        os.kill(pid, number)

        strike = _Strike(time.monotonic(), pids)
        if row.kind == "SIGKILL":
            send(signal.SIGKILL)
        elif row.kind == "SIGSTOP":
            send(signal.SIGSTOP)

            def resume() -> None:
                strike.resumed_at = time.monotonic()
                send(signal.SIGCONT)
                strike.resumed.set()

            threading.Timer(STOP_S, resume).start()
        elif row.is_engines:
            if row.moment == "during attach":
                send(signal.SIGTERM)
            else:
                engine_part.call("close")
                engine_part.wait()
        elif row.part == "whole sidecar":
            self._threads.submit(kvferry, "down", "--keep", "--run-dir", self.run_dir)
        else:
            send(signal.SIGTERM)
        if row.ends_sidecar:
            strike.next_sidecar = self._threads.submit(self._start_again)
        return strike

    def _aim(self, row: Row) -> list[int]:
        """Whom the strike will meet: looked up before the moment, so that it is not over by then."""
        if row.is_engines:
            return []
        if row.part == "daemon":
            return [self.sidecar.daemon()]
        if row.part == "supervisor":
            return [self.sidecar.pid]
        if row.part in ("whole sidecar", BOTH):
            engine = [process.pid for process in self.engine.processes] if row.part == BOTH else []
            return [self.sidecar.pid, *self.sidecar.children(), *engine]
        if row.moment != "during attach":
            return [self.engine.worker_pids[1]]
        # The spare that will serve it.
        return [pid for pid in self.sidecar.workers(1) if pid != self.engine.worker_pids[1]]

    def _begin(self, moment: str, text: str) -> int:
        """A transfer that is under way when this returns; its ticket."""
        if moment == "during a store":
            self.engine.fill(MOVING, seed=self._number)
            ticket = self.engine.begin("store", text, text, MOVING)
        else:
            until(lambda: self.engine.hits(text, "stored", len(STORED), keep=True) == len(STORED), 5, "all keys hit")
            ticket = self.engine.begin("load", text, "stored", TARGET)
        assert ticket, f"the transfer was not taken: {self._where()}"
        time.sleep(0.002)  # the ranks obey and the workers are copying
        return ticket

    def begin_store(self, text: str) -> None:
        """A store that is under way when this returns."""
        self._number += 1
        self._begin("during a store", text)

    def be_served(self) -> None:
        """Wait until all stored keys hit; then their bytes are right."""
        self._until(self._is_served, RECOVER_S, "served again")

    def kill_engine(self, moment: str) -> float:
        """SIGKILL to the whole engine during a transfer; the next one hits. Seconds until its memory was unmapped."""
        self._number += 1
        self.be_served()
        text = f"row {self._number}"
        self._begin(moment, text)
        unmapped_s = self._replace_engine()
        assert self._hits(text, len(MOVING)) in (0, len(MOVING)), "a store is there in part"
        self._compare_all()
        self.come_to_rest()
        return unmapped_s

    def die_together(self, pids: list[int], moment: str) -> Played:
        """SIGKILL to several children of the sidecar during a transfer: what one death must keep, these must."""
        self._number += 1
        self._be_ready()
        text = f"row {self._number}"
        ticket = self._begin(moment, text)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        self._until(lambda: self._is_served() and not set(pids) & set(self.engine.worker_pids), RECOVER_S, "served")
        if moment == "during a load":
            bound = max(0.1, killed + LOAD_S - time.monotonic())
            self._until(lambda: self.engine.look() or self.engine.load_is_over(ticket), bound, "the load's words")
        played = Played(recover_s=time.monotonic() - killed)
        self._judge(Row("worker", "SIGKILL", moment), played, ticket, text)
        return played

    def kill_daemon(self) -> None:
        """SIGKILL to the daemon; it is dead when this returns."""
        pid = self.sidecar.daemon()
        os.kill(pid, signal.SIGKILL)
        until(lambda: not alive(pid), 5, "the daemon is dead")

    def kill_sidecar(self) -> None:
        """SIGKILL to all of the sidecar's processes; the next one is started where it stood."""
        for pid in [self.sidecar.pid, *self.sidecar.children()]:
            os.kill(pid, signal.SIGKILL)
        self._past.append(self.sidecar)
        self.sidecar = self._start_again()

    # ---- watching ------------------------------------------------------------------------------------

    def _watch_sidecar(self, row: Row, strike: _Strike, played: Played, old_workers: list[int], ticket: int) -> None:
        """The engine's loop goes on until it is served as before. Nobody of the engine dies here."""
        if row.kind == "SIGSTOP" and row.part == "worker" and row.moment == "idle":
            # A worker that owes nothing may stand still: the next store shows that it does.
            self.engine.fill(MOVING, seed=self._number)
            self.engine.begin("store", "probe", f"probe {self._number}", MOVING)
        attached_before = row.moment != "during attach"
        load_bound = strike.at + LOAD_S + (STOP_S if row.part == "whole sidecar" and row.kind == "SIGSTOP" else 0)
        is_loading = row.moment == "during a load"
        misses_s = 0.0
        while True:
            before = time.monotonic()
            self.engine.look()
            now = time.monotonic()
            if attached_before and played.notice_s is None:
                changed = self.engine.worker_pids != old_workers and 0 not in self.engine.worker_pids
                if changed or not self.engine.attached or self.engine.ends.get(ticket, "OK") != "OK":
                    played.notice_s = now - strike.at
            if is_loading and not self.engine.load_is_over(ticket) and not row.is_engines:
                assert now < load_bound, f"the load has words of {self.engine.words.get(ticket)} after its bound"
            if strike.next_sidecar is not None and strike.next_sidecar.done():
                self._past.append(self.sidecar)
                self.sidecar, strike.next_sidecar = strike.next_sidecar.result(), None
            is_stopped = row.kind == "SIGSTOP" and not strike.resumed.is_set() and any(map(alive, strike.pids or [1]))
            may_be_over = not is_stopped and strike.next_sidecar is None
            if self._is_served() and may_be_over and now - strike.at > 0.1:
                is_over = not is_loading or self.engine.load_is_over(ticket)
                served_by = self.engine.worker_pids[1]
                is_changed = row.part != "worker" or not attached_before or served_by not in (0, *strike.pids)
                # Its copy was over before the stop came: it owed nothing, and goes on serving.
                is_late = is_loading and row.kind == "SIGSTOP" and self.engine.ends.get(ticket) == "OK"
                if is_over and (is_changed or is_late):
                    break
            elif not self.engine.attached:
                misses_s += time.monotonic() - before
            assert now - strike.at < RECOVER_S + STOP_S, f"not served again: {self._where()}"
            time.sleep(0.002)
        over = time.monotonic()
        is_resumed = row.kind == "SIGSTOP" and (row.is_engines or alive(strike.pids[0]))
        played.recover_s = over - (strike.resumed_at if is_resumed else strike.at)
        if misses_s > 0.05:
            played.effect = f"misses for {misses_s:.1f} s"

    def _watch_engine(self, row: Row, strike: _Strike, played: Played, old_workers: list[int]) -> None:
        """A part of the engine is gone: the sidecar notices, the rest of it ends, the next one hits."""
        gone = {"engine scheduler": self._scheduler_is_gone, "engine rank": self._rank_is_gone}[row.part]
        if row.moment != "during attach":
            self._until(gone, 5, "noticed")
            played.notice_s = time.monotonic() - strike.at
        if row.part == "engine rank":
            until(lambda: not alive(old_workers[1]), UNMAP_S, "the dead rank's worker is gone")
        unmapped_s = self._replace_engine()
        played.recover_s = time.monotonic() - strike.at
        played.effect = f"its memory unmapped after {unmapped_s:.2f} s; the next one hits"

    def _watch_both(self, strike: _Strike, played: Played) -> None:
        """Neither lives to notice. Both are started again at once, and find each other and all keys; no file is new."""
        assert strike.next_sidecar is not None
        where = RunDir.at(self.run_dir)
        ours = sorted([where.table.name, *(where.pool(rank).name for rank in range(2))])
        unmapped_s = self._replace_engine()
        played.recover_s = time.monotonic() - strike.at
        self._past.append(self.sidecar)
        self.sidecar = strike.next_sidecar.result(RECOVER_S)
        left = sorted(path.name for path in where.table.parent.glob(f"kvferry-{where.instance}*"))
        assert left == ours, f"files in /dev/shm: {left}"
        played.effect = f"its memory unmapped after {unmapped_s:.2f} s; the next one hits"

    def _replace_engine(self) -> float:
        """SIGKILL to what lives of the engine; the next one hits. Seconds until nobody maps the dead one's memory."""
        dead, self.engine, self.spare = self.engine, self.spare, FarEngine()
        dead.end()
        ended = time.monotonic()
        self.engine.start_open(self.run_dir)
        until(lambda: not dead.mappers(), UNMAP_S, "no process maps the dead engine's memory")
        unmapped_s = time.monotonic() - ended
        self.engine.hear_open()
        self._until(self._is_served, RECOVER_S, "the next engine is served")
        return unmapped_s

    def _scheduler_is_gone(self) -> bool:
        status = self._status()
        return status is not None and not any(engine["registered"] for engine in status["engines"])

    def _rank_is_gone(self) -> bool:
        status = self._status()
        return status is not None and all(
            engine["attached"] < 2 for engine in status["engines"] if engine["engine_id"] == self.engine.name
        )

    # ---- judging -------------------------------------------------------------------------------------

    def _judge(self, row: Row, played: Played, ticket: int, text: str) -> None:
        """What every row must keep."""
        if row.kind == "SIGKILL" and played.notice_s is not None:
            assert played.notice_s <= NOTICE_S, f"noticed after {played.notice_s:.2f} s"
        engine_died = row.ends_engine
        if not engine_died:
            longest_s = self.engine.longest_s
            assert longest_s < CALL_S, f"a call of the engine took {longest_s:.2f} s"
        played.lost = len(STORED) - self._hits("stored", len(STORED))
        assert played.lost == 0, f"{played.lost} stored keys are gone: {self._where()}"
        played.outcome = "served again" if row.moment != "during attach" else "attached after all"
        if row.moment == "during a store" and not engine_died:
            until(lambda: self.engine.look() or ticket in self.engine.ends, 5, "the store has an end")
            ended, held = self.engine.ends[ticket], self._hits(text, len(MOVING))
            assert held in (0, len(MOVING)), f"{held} of a store's keys: it is there in part"
            assert held or ended != "OK", "a store that ended OK is gone"
            if held:
                assert self._load(text) == self.engine.digests(MOVING), "wrong bytes under the store's keys"
            played.in_flight = len(MOVING) - held
            played.outcome = f"store {'kept' if held else 'not kept'} ({ended})"
        elif row.moment == "during a store":
            held = self._hits(text, len(MOVING))
            assert held in (0, len(MOVING)), f"{held} of a store's keys: it is there in part"
            played.in_flight = len(MOVING) - held
            played.outcome = "store kept" if held else "store not kept"
        elif row.moment == "during a load" and not engine_died:
            words = self.engine.words[ticket].values()
            self.engine.scheduler.call("load_ended", ticket, all(ok for ok, _ in words))
            failed = sorted({outcome for ok, outcome in words if not ok})
            if not failed:
                assert self.engine.digests(TARGET) == self.engine.digests(STORED), "wrong bytes of an OK load"
            played.outcome = f"load failed ({', '.join(failed)})" if failed else "load ok"
            recomputed = f"computes {len(TARGET)} blocks; " if failed else ""
            played.effect = recomputed + (played.effect or ("" if failed else "none"))
        elif row.moment == "during a load":
            played.outcome = "load ended with its engine"
        played.effect = played.effect.strip("; ") or "none"
        self._compare_all()
        self.come_to_rest()

    def come_to_rest(self) -> None:
        """All sums at zero, and nobody there who should not be."""
        self._until(self._is_at_zero, 15, "sums at zero")
        self._until(lambda: len(self.sidecar.children()) == 5, 15, "a daemon, two workers, two spares")

    def _compare_all(self) -> None:
        """The stored keys' bytes. After an engine's death they are its successor's to check: it fills the same."""
        self.engine.fill(STORED, seed=0)
        assert self._load("stored") == self.engine.digests(STORED), "wrong bytes under the stored keys"

    def _load(self, text: str) -> list[str]:
        """Load 24 keys into the target blocks; what each rank holds then."""
        self.engine.fill(TARGET, seed=10**6)
        request = f"check {self._number} {text}"
        held = until(lambda: self.engine.hits(request, text, len(TARGET), keep=True), 5, f"{text} hits")
        assert held == len(TARGET)
        ticket = self.engine.begin("load", request, text, TARGET)
        until(lambda: self.engine.look() or self.engine.load_is_over(ticket), LOAD_S, "the check's load has its words")
        assert all(ok for ok, _ in self.engine.words[ticket].values()), f"{self.engine.words[ticket]}"
        self.engine.scheduler.call("load_ended", ticket, True)
        self.engine.scheduler.call("finish", request)
        return self.engine.digests(TARGET)

    def _hits(self, text: str, count: int) -> int:
        """Hits by an answer of the daemon, however busy the machine is."""
        return self.engine.hits("hits", text, count, patience_s=3.0)

    # ---- looks ---------------------------------------------------------------------------------------

    def _is_served(self) -> bool:
        self.engine.look()
        return self.engine.attached and self.engine.hits("ask", "stored", len(STORED)) == len(STORED)

    def _status(self) -> dict[str, Any] | None:
        try:
            return ask_status(RunDir.at(self.run_dir), 1.0)
        except KvferryError:
            return None

    def _is_at_zero(self) -> bool:
        self.engine.look()
        status = self._status()
        if status is None:
            return False
        slots, jobs = status["slots"], status["jobs"]
        sums = [jobs["stores"], jobs["loads"], jobs["void"], status["fences"], status["leases"], status["requests"]]
        sums += [slots["writing"], slots["quarantined"], slots["pinned"], int(status["restarting"])]
        sums += [engine["in_flight_bytes"] for engine in status["engines"]]
        return not any(sums) and status["links"].get("worker") == 4

    def _until(self, question: Callable[[], object], timeout_s: float, what: str) -> None:
        """`until`, with the whole state of things in the error."""
        try:
            until(question, timeout_s, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._where()}") from None

    def _where(self) -> str:
        said = [process.call("describe") for process in self.engine.processes if process.lives]
        return "\n".join([*map(str, [self._status(), *said]), *self.sidecar.lines[-20:]])

    # ---- sidecars ------------------------------------------------------------------------------------

    def _start(self) -> Sidecar:
        flags = ["--job-deadline", f"{DEADLINE_S}s", "--kill-grace", f"{GRACE_S}s", "--lease", "2s", "--restarts", "99"]
        return Sidecar(*flags, tp_size=2, host_memory="384MiB", run_dir=self.run_dir)

    def _start_again(self) -> Sidecar:
        """What a service manager does: as soon as it has ended, the next one."""
        self.sidecar.wait(20)
        return self._start()

    def _store_the_keys(self) -> None:
        until(lambda: self.engine.look() or self.engine.attached, RECOVER_S, "the first engine is attached")
        self.engine.fill(STORED, seed=0)
        ticket = self.engine.begin("store", "first", "stored", STORED)
        until(lambda: self.engine.look() or ticket in self.engine.ends, 10, "the first store has an end")
        assert self.engine.ends[ticket] == "OK"
        self.engine.scheduler.call("finish", "first")


def chosen(words: list[str]) -> list[Row]:
    """Rows whose names hold all words."""
    return [row for row in ROWS if all(word in row.name for word in words)]


def main(words: list[str], say: Callable[[str], None] = print) -> int:
    """Play and print; the exit code is 1 if a row broke a promise."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended then too
    say(HEAD)
    broken = 0
    bench = Bench()
    try:
        for row in chosen(words):
            try:
                say(bench.play(row).cells(row))
            except AssertionError as error:
                broken += 1
                why = (str(error) or repr(error)).splitlines()[0]
                say(f"| {row.part} | {row.kind} | {row.moment} | BROKEN | | | | {why} |")
                print(f"{row.name}: {error!r}", file=sys.stderr)
                bench.kill()
                bench = Bench()
        bench.close()
    finally:
        bench.kill()
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
