"""A rank of an engine, as it is used: `RankCore` with a tether to a worker, a shared page and a clock.

    engine's thread ──revoke, begin, poll──▶ ┌────── one lock ───────────────┐
                                             │ RankCore ── Tether ───────────┼──▶ worker
    own thread ──connect, register, watch──▶ │   └── shared page, Proofs     │
                                             └───────────────────────────────┘

No call of the engine's thread waits. Marks are set and looked at in that thread alone (`marks.py`). The page
is made here once and lives across workers: its mark goes on counting for the next one. Attaching is the same
code the first time and later; only the first attempt runs in the caller's thread, while the engine is still
idle, and so may write the probes into its blocks.

What ends a load whose worker says nothing, tether or not: its death, which `poll` sees, after `close` too. Nobody
here brings it about. A worker that runs leaves by itself within seconds of its tether's end. One that hangs is
killed at the daemon's wish: it owes its word past deadline and grace, is silent past its link's bound, or has not
drained for the next daemon; one that was stopped, by the supervisor's own. A supervisor that gives up or dies takes
all workers with it. So a load stays open for longer only while the supervisor itself stands still, or the worker's
process cannot be killed: then its blocks stay taken, its request waits, and the engine serves all others.
"""

import logging
import mmap
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from kvferry.client.arguments import check_rank
from kvferry.client.marks import CpuMarks, Mark, Marks
from kvferry.client.memory import KVMemory
from kvferry.client.proofs import Proofs
from kvferry.client.rank_core import RankCore
from kvferry.client.search import Missed, Search
from kvferry.client.tether import Tether
from kvferry.client.types import Directive, RankCounters, RankReport
from kvferry.net.paths import RunDir
from kvferry.proto import limits
from kvferry.proto.page import PageWriter
from kvferry.proto.tether import RankRegister

log = logging.getLogger("kvferry.client")

WATCH_S: Final = 0.050  # how often the own thread looks while a worker serves us
VERDICT_S: Final = 30.0  # a worker may take this long to map our memory when nobody waits for it
CLOSE_S: Final = 1.0
HELD_LOOK_S: Final = 0.001  # how often `wait` asks the device while a begin waits for it

# Closed, but some worker may still touch their memory: it stays allocated until that worker is known to be dead.
_left_behind: set["RankClient"] = set()


class RankClient:
    """One rank's half. Its calls belong to the thread that launches the engine's forward passes.

    In a step: `revoke` before anything is launched that overwrites blocks; `begin_loads`; the forward;
    `begin_stores`; `poll`. Each with the directive that `Client.end_step` gave for that step.

    Waits for the verdict at most `attach_timeout_s` if a sidecar listens, not at all if none does; later
    attempts run in the background. `load_timeout_s`: when a load is cancelled; it stays open until its
    worker's word or proven death. `on_note`: as for `Client`.
    """

    def __init__(
        self,
        engine_id: str,
        rank: int,
        *,
        world_size: int,
        memory: KVMemory,
        facts: Mapping[str, str] | None = None,
        run_dir: str | Path | None = None,
        attach_timeout_s: float = 5.0,
        load_timeout_s: float = 5.0,
        on_note: Callable[[str], None] | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
        start: bool = True,
    ) -> None:
        check_rank(engine_id, rank, world_size, facts or {})
        self._path = RunDir.at(run_dir).rank(rank)
        self._page_fd = os.memfd_create("kvferry-page", os.MFD_CLOEXEC)
        os.ftruncate(self._page_fd, limits.PAGE_BYTES)
        self._page_map = mmap.mmap(self._page_fd, limits.PAGE_BYTES)
        self._page = PageWriter(memoryview(self._page_map))
        try:
            self._marks: Marks = CpuMarks(self._page)
            if memory.marking is not None:
                self._marks = memory.marking(self._page, self._page_map)
        except BaseException:
            os.close(self._page_fd)
            raise
        self._drop_page_fd = weakref.finalize(self, os.close, self._page_fd)
        self._register = RankRegister(
            engine_id=engine_id,
            rank=rank,
            world_size=world_size,
            layout=memory.layout,
            facts=dict(facts or {}),
            mark_mode=self._marks.mode,
            pid=os.getpid(),
            pid_ns=_pid_namespace(),
        )
        self._core = RankCore(int(load_timeout_s * 1e9))
        self._now_ns = now_ns
        self._on_note = on_note
        self._lock = threading.RLock()
        self._tether: Tether | None = None
        self._search = Search(self._path, self._register, memory, self._page_fd)
        self._proofs = Proofs()
        self._notes: list[tuple[int, str]] = []  # (log level, line)
        self._last_note = ""
        self._closed = False
        self._wake = threading.Event()
        self._thread = threading.Thread(
            target=_serve, args=(weakref.ref(self), self._wake), name=f"kvferry-rank-{rank}", daemon=True
        )
        self._wait_s = self._attach(attach_timeout_s, is_idle=True)
        self._tell()
        if start:
            self._thread.start()

    # ---- in a step -----------------------------------------------------------------------------------

    def revoke(self, directive: Directive) -> None:
        """Tell the worker which stores may read mixed bytes from now on. Before anything overwrites their blocks."""
        if directive.revokes:
            with self._lock:
                self._page.revoke(directive.revokes)
                self._core.withdraw(directive.revokes)

    def begin_loads(self, directive: Directive) -> None:
        """The blocks of the directive's loads may be written: nothing launched earlier touches them any more."""
        if not (directive.loads or directive.failed_loads or directive.cancels):
            return
        with self._lock:
            mark = self._signal() if directive.loads else Mark(0)
            word, hold = (mark.word, mark.hold) if mark is not None else (None, 0)
            self._core.begin_loads(directive, word, self._now_ns(), hold)
            self._guarded(self._let_go)
        self._tell()

    def begin_stores(self, directive: Directive) -> None:
        """The blocks of the directive's stores are written: the forward that fills them is done or launched."""
        if not directive.stores:
            return
        with self._lock:
            mark = self._signal()
            word, hold = (mark.word, mark.hold) if mark is not None else (None, 0)
            self._core.begin_stores(directive, word, hold)
            self._guarded(self._let_go)
        self._tell()

    def poll(self) -> RankReport:
        """What ended at this rank since the last call. Never waits."""
        with self._lock:
            if self._core.has_held:
                self._guarded(self._let_go)
            self._guarded(self._watch)
            report = self._core.poll()
        self._tell()
        return report

    def wait(self, timeout_s: float) -> None:
        """Wait until the worker says something, at most `timeout_s`; then `poll`.

        Only for an engine step that has nothing to compute: it gives the processor to the copies instead of
        asking again and again. Returns at once if an end is known already or nobody could say one.
        """
        until = time.monotonic() + timeout_s
        while (left := until - time.monotonic()) > 0:
            with self._lock:
                if self._core.has_held:
                    self._guarded(self._let_go)
                # The serving worker's pidfd is among them, and those of lost ones that still owe a word.
                watched = self._proofs.filenos
                if not watched or self._core.has_ends:
                    return
                if self._tether is not None:
                    if self._tether.ended:
                        return
                    watched.append(self._tether.fileno())
                is_held = self._core.has_held
                poller = select.poll()
                for fd in watched:
                    poller.register(fd, select.POLLIN)
            # Our own thread may close one of them meanwhile: then this ends by its bound.
            if poller.poll(min(left, HELD_LOOK_S) * 1000 if is_held else left * 1000):
                return

    # ---- as a whole ----------------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """Whether a worker serves this rank."""
        return self._core.attached

    @property
    def counters(self) -> RankCounters:
        return self._core.counters

    @property
    def holding(self) -> bool:
        """Whether a begin waits for the device: then `poll` must be called on, in idle steps too."""
        return self._core.has_held

    @property
    def open_loads(self) -> frozenset[int]:
        """Loads whose blocks still belong to a transfer: begun, and without a worker's word or its proven death."""
        with self._lock:
            return self._core.open_loads

    @property
    def worker_pid(self) -> int:
        """Process id of the worker that serves this rank; 0 if none does."""
        return self._tether.pid if self._tether is not None else 0

    def describe(self) -> dict[str, Any]:
        """State as plain values."""
        with self._lock:
            return {
                "rank": self._register.rank,
                "attached": self.attached,
                "worker": self._core.worker,
                "worker_pid": self.worker_pid,
                "open_loads": len(self._core.open_loads),
                "mark": self._page.mark(),
                "mark_mode": self._marks.mode,
                "holding": self.holding,
            }

    def close(self, wait_s: float = CLOSE_S) -> None:
        """Detach: ask the worker to end, and wait at most `wait_s` for it, and for the own thread. Idempotent.

        Loads that are open then stay open: a worker that hangs may still write. `poll` goes on to look for its death,
        and until it has told of the last one, their blocks are nobody else's. Stores that are open are revoked: the
        memory may mean something else from here on.
        """
        with self._lock:
            if self._closed:
                return
            self._guarded(self._watch)  # what was said before counts
            self._closed = True
            self._core.detach()
            tether = self._tether
            self._guarded(self._send)
        self._search.end()
        self._wake.set()
        last_words = tether.drain(wait_s) if tether is not None else []
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(wait_s)
        with self._lock:
            if tether is not None:
                self._guarded(lambda: self._hear(last_words, tether.worker))
            self._lose()
            self._page.revoke(sorted(self._core.open_stores))
            self._guarded(self._look_for_proof)
            if self._core.awaited_workers():
                _left_behind.add(self)
                with suppress(RuntimeError):  # no thread is to be had: `poll` looks, or the process ends
                    threading.Thread(target=_see_off, args=(self,), name="kvferry-left-behind", daemon=True).start()
            if not self._thread.is_alive():  # else it may be about to show it to a worker
                self._drop_page_fd()
            self._marks.close()

    def __enter__(self) -> "RankClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- inside --------------------------------------------------------------------------------------

    def _signal(self) -> Mark | None:
        """A mark behind all that was launched; None, and one line, if the device gives none."""
        if self._closed:  # the page is not the device's to write any more
            return None
        try:
            return self._marks.signal()
        except Exception as error:  # a device in trouble: the engine will hear of it by itself
            self._note(f"no mark could be set: {error}", logging.WARNING)
            return None

    def _let_go(self) -> None:
        """Send what may go: of held begins those that the device is past. In the engine's thread only."""
        if self._core.has_held:
            self._core.release(self._marks.passed())
        self._send()

    def _guarded(self, deed: Callable[[], None]) -> None:
        """Do it, and let nothing of ours reach the engine as an error: the tether is dropped instead."""
        try:
            deed()
        except Exception as error:
            log.debug("error inside the rank client", exc_info=error)
            self._note(f"lost the worker: {type(error).__name__}: {error}", logging.WARNING)
            self._lose()

    def _send(self) -> None:
        messages = self._core.outgoing()
        if self._tether is not None:
            for message in messages:
                self._tether.queue(message)
            self._tether.flush()

    def _watch(self) -> None:
        """Read words, notice ends, apply deadlines."""
        if self._tether is not None:
            self._hear(self._tether.receive(), self._tether.worker)
            if self._tether.ended:
                self._note("the worker went away; looking for another one")
                self._lose()
        self._core.tick(self._now_ns())
        self._send()
        self._look_for_proof()

    def _hear(self, messages: list[Any], worker: int) -> None:
        for message in messages:
            self._core.on_message(message, worker)

    def _look_for_proof(self) -> None:
        for worker in self._proofs.dead():
            # The kernel delivers what was written before the death first: read it before judging.
            if self._tether is not None and self._tether.worker == worker:
                self._hear(self._tether.receive(), worker)
                self._lose()
            self._core.dead(worker)
        awaited = self._core.awaited_workers()
        self._proofs.keep(awaited | {self._core.worker})
        if not awaited:
            _left_behind.discard(self)

    def _lose(self) -> None:
        self._core.lost()
        if self._tether is not None:
            self._tether.close()
            self._tether = None
        self._wake.set()

    def _attach(self, timeout_s: float, *, is_idle: bool = False) -> float:
        """Try one worker; seconds until the next look. The same path at start and after each loss."""
        found = self._search.attempt(timeout_s, is_idle=is_idle)
        with self._lock:
            if isinstance(found, Missed):
                if found.text and not self._closed:
                    self._note(found.text, found.level)
                return found.wait_s
            tether, pidfd = found
            if self._closed:
                tether.close()
                os.close(pidfd)
                return WATCH_S
            self._tether = tether
            self._proofs.add(tether.worker, pidfd)
            self._core.attach(tether.worker)
            self._guarded(self._send)
            how = f"; marks: {self._marks.mode} ({self._marks.why})" if self._marks.why else ""
            self._note(f"attached to worker {tether.pid} at {self._path}{how}")
        return WATCH_S

    def _housekeep(self) -> float:
        """The own thread's turn; seconds until the next one."""
        with self._lock:
            if self._closed:
                return WATCH_S
            self._guarded(self._watch)
            is_attached = self._tether is not None
        self._tell()
        if is_attached:
            return WATCH_S
        wait_s = self._attach(VERDICT_S)
        self._tell()
        return wait_s

    def _note(self, text: str, level: int = logging.INFO) -> None:
        if text != self._last_note:
            self._last_note = text
            self._notes.append((level, f"rank {self._register.rank}: {text}"))

    def _tell(self) -> None:
        while self._notes:
            level, text = self._notes.pop(0)
            try:
                if self._on_note is not None:
                    self._on_note(text)
                else:
                    log.log(level, "%s", text)
            except Exception:  # a listener's error is not the engine's
                log.debug("on_note failed", exc_info=True)


def _pid_namespace() -> int:
    """Tells this process's number from an equal one elsewhere; 0 if the system does not say."""
    with suppress(OSError):
        return Path("/proc/self/ns/pid").stat().st_ino
    return 0


def _serve(owner: "weakref.ref[RankClient]", wake: threading.Event) -> None:
    """The own thread: holds the rank client only while it works."""
    client = owner()
    wait_s = client._wait_s if client is not None else 0.0
    del client
    while True:
        wake.wait(wait_s)
        client = owner()
        if client is None or client._closed:
            return
        wake.clear()
        wait_s = client._housekeep()
        del client


def _see_off(client: RankClient) -> None:
    """For a closed client that nobody polls any more: keep its memory until no worker may touch it."""
    while client in _left_behind:
        time.sleep(WATCH_S)
        with client._lock:
            client._guarded(client._look_for_proof)
