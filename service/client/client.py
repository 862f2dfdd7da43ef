"""The scheduler side of an engine, as it is used: `ClientCore` with a link to the daemon and a clock.

    engine's thread ──lookup, hits, end_step, ...──▶ ┌────── one lock ──────┐
                                                     │ ClientCore ── Peer ──┼──▶ daemon
    own thread ──renew, drain, reconnect───────────▶ └──────────────────────┘

The engine's thread sends at once and never waits, but for `hits`: that waits for an answer on its way, at
most what is left of the step's budget. The own thread does what must not hang on the engine's calls: it
renews leases, collects ends, notices a dead daemon and looks for the next one.

Nothing is raised for what the sidecar did or did not do: an error inside is noted, the link is dropped and
the engine goes on with misses. Only the caller's own mistakes raise (ArgumentError, a ValueError;
ConfigError for a run directory that cannot work).
"""

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final

from kvferry.client.arguments import check_settings
from kvferry.client.background import close_at_exit, close_pipe, serve
from kvferry.client.carrier import Carrier, connect
from kvferry.client.core import ClientCore, ClientSettings, State
from kvferry.client.types import ArgumentError, ClientCounters, Directive, Hits, JobEnd
from kvferry.net.paths import RunDir
from kvferry.proto.errors import LostError
from kvferry.proto.schema import Message

log = logging.getLogger("kvferry.client")

IDLE_S: Final = 0.050  # how long the own thread sleeps when nothing is due
RETRY_S: Final = 0.1  # first wait before looking for a daemon again; grows up to the next one
RETRY_MAX_S: Final = 1.0
RETRY_GROWTH: Final = 1.25  # a fifth of the time that a daemon was away is what finding it again may cost
REFUSED_RETRY_S: Final = 10.0  # a refusal stands until somebody changes something
# Refusals that pass by themselves: the daemon has not yet noticed that an earlier link of ours is over.
PASSING: Final = frozenset({"register.engine_taken", "frame.link", "daemon.lost"})
# A daemon that took the link but does not answer is given up after this: before the link gives itself up.
HANDSHAKE_S: Final = 4.5

_tickets = count(1)  # one sequence for the process: a second client of an engine says no ticket of the first again


class Client:
    """One engine's scheduler half. Thread-safe.

    In a step: `hits` and `load` for requests that begin, `written` for blocks given to new owners, `store`
    for blocks that this step fills, `finish` and its siblings; then `end_step`, whose directive the engine
    carries to its ranks. `load_ended` when all ranks have reported a load; `poll` for what ended.

    key_bytes: width of every key.  num_blocks: of the engine's KV cache; block ids are 0..num_blocks-1.
    block_tokens: tokens of one block.  facts, salt: what the meaning of a key depends on beyond what the
    ranks report; engines share what they stored only if both agree.
    step_budget_s: what all `hits` calls of one step may wait together.  patience_s: how long one request
    is told "not ready" before the answer becomes "no hits".
    on_note: gets one line per change of state; without it they go to the log "kvferry.client", refusals and
    other trouble as warnings.

    In `lookup`, `load` and `store` keys are n bytes objects of key_bytes each, or one of n * key_bytes. `load`
    and `store` take the common part of keys and blocks: more of either is no mistake, and the rest is ignored.
    """

    def __init__(
        self,
        engine_id: str,
        *,
        world_size: int,
        key_bytes: int,
        num_blocks: int,
        block_tokens: int,
        run_dir: str | Path | None = None,
        facts: Mapping[str, str] | None = None,
        salt: bytes = b"",
        step_budget_s: float = 0.002,
        patience_s: float = 0.020,
        on_note: Callable[[str], None] | None = None,
        connect: Callable[[RunDir], Carrier] = connect,
        now_ns: Callable[[], int] = time.monotonic_ns,
        start: bool = True,
    ) -> None:
        self._run_dir = RunDir.at(run_dir)
        settings = ClientSettings(
            engine_id=engine_id,
            world_size=world_size,
            key_bytes=key_bytes,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            facts=dict(facts or {}),
            salt=salt,
            patience_ns=int(patience_s * 1e9),
        )
        check_settings(settings)
        self._core = ClientCore(settings, _tickets)
        self._connect = connect
        self._now_ns = now_ns
        self._on_note = on_note
        self._budget_ns = self._budget_left_ns = int(step_budget_s * 1e9)
        self._lock = threading.RLock()
        self._peer: Carrier | None = None
        self._unsent: deque[Message] = deque()
        self._notes: list[tuple[int, str]] = []  # (log level, line)
        self._last_note = ""
        self._retry_s = RETRY_S
        self._retry_at_ns = 0
        self._handshake_since_ns = 0
        self._is_silent = False  # somebody took the last link and said nothing
        self._was_attached = False
        self._closed = False
        self._stop, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=serve, args=(weakref.ref(self),), name="kvferry-client", daemon=True)
        self._at_exit = weakref.finalize(self, close_pipe, self._stop, self._wake)
        close_at_exit(self)
        self.housekeep()
        if start:
            self._thread.start()

    # ---- per request ---------------------------------------------------------------------------------

    def lookup(self, request: str, keys: Sequence[bytes] | bytes, *, group: int = 0) -> None:
        """Ask how many leading keys are held. Sends at once, waits for nothing.

        keys: (n,) in prefix order, or one byte string of n * key_bytes. A second call for the same request
        restarts it.
        """
        with self._turn() as now_ns:
            self._core.lookup(request, keys, now_ns, group=group)

    def hits(self, request: str, *, idle_s: float = 0.0) -> Hits:
        """How many leading keys of the request's lookup can be loaded.

        Waits at most what is left of this step's budget, or `idle_s`, within the patience, if that is more: of an
        engine that has nothing else to do. `ready` False: ask again in the next step; after the request's
        patience the answer is ready, with what is known by then.
        """
        found = Hits(True)
        with self._turn(receive=True) as now_ns:
            found = self._core.hits(request, now_ns)
            self._send()
            left_ns = max(self._budget_left_ns, min(int(idle_s * 1e9), self._core.settings.patience_ns))
            while not found.ready and self._peer and left_ns > 0 and self._core.is_awaited(request):
                self._peer.wait(left_ns / 1e9)
                before_ns, now_ns = now_ns, self._now_ns()
                waited_ns = max(now_ns - before_ns, 1)
                left_ns -= waited_ns
                self._budget_left_ns -= waited_ns
                self._receive(now_ns)
                found = self._core.hits(request, now_ns)
        return found

    def load(self, request: str, keys: Sequence[bytes] | bytes, blocks: Sequence[int], *, group: int = 0) -> int:
        """Bring keys into blocks, key i into blocks[i], for the common part of both; a ticket > 0.

        ArgumentError if a block is named twice.
        Uses the lease of the request's lookup. The blocks belong to the transfer until every rank has
        reported the ticket (`RankClient.poll`); then say `load_ended`. Without a sidecar the ranks report it failed.
        """
        with self._turn() as now_ns:
            return self._core.load(request, keys, blocks, now_ns, group=group)
        # An error inside has dropped the link: asked again, the core has the ranks fail the load.
        return self._core.load(request, keys, blocks, self._now_ns(), group=group)

    def store(self, request: str, keys: Sequence[bytes] | bytes, blocks: Sequence[int], *, group: int = 0) -> int:
        """Keep blocks[i] under key i, for the common part of both; a ticket, or 0 if it was not taken (counted)."""
        with self._turn() as now_ns:
            return self._core.store(request, keys, blocks, now_ns, group=group)
        return 0

    def forget(self, request: str) -> None:
        """Drop lookup and lease without ending the request."""
        with self._turn() as now_ns:
            self._core.forget(request, now_ns)

    def finish(self, request: str) -> None:
        """The request is over. Its stores go on."""
        with self._turn() as now_ns:
            self._core.finish(request, now_ns)

    def abort(self, request: str) -> None:
        """The request was given up. Its stores go on; its load is cancelled and still reported by the ranks."""
        with self._turn() as now_ns:
            self._core.abort(request, now_ns)

    def preempt(self, request: str) -> None:
        """The request lost its blocks and will come back as a new attempt."""
        with self._turn() as now_ns:
            self._core.preempt(request, now_ns)

    def cancel(self, ticket: int) -> None:
        """Nobody wants this transfer any more: a store stays unpublished, a load still gets its word."""
        with self._turn() as now_ns:
            self._core.cancel(ticket, now_ns)

    # ---- per step ------------------------------------------------------------------------------------

    def written(self, blocks: Iterable[int]) -> frozenset[int]:
        """Blocks whose contents a new owner replaces from this step on; the stores that lose by it.

        Call it before the new owner's own stores of the step. The losers' blocks may be written once every
        rank has obeyed this step's directive: they are revoked, or were withdrawn.
        """
        with self._turn():
            return self._core.written(blocks)
        return frozenset()

    def storing(self, blocks: Iterable[int]) -> frozenset[int]:
        """Unended stores that read these blocks. Only a question."""
        with self._turn():
            return self._core.storing(blocks)
        return frozenset()

    def end_step(self) -> Directive:
        """Send what this step has to say, if anything, and give the ranks' part. Never waits."""
        self._budget_left_ns = self._budget_ns
        with self._turn() as now_ns:
            return self._core.end_step(now_ns)
        return Directive(0)

    def load_ended(self, ticket: int, ok: bool) -> None:
        """Every rank has given its word on this load: ok if all said so."""
        with self._turn():
            self._core.load_ended(ticket, ok)

    def poll(self) -> list[JobEnd]:
        """Tickets that ended since the last call. Never waits.

        The end of a load here says nothing of its blocks: those are the ranks' to give back.
        """
        with self._turn(receive=True):
            return self._core.poll()
        return []

    def rotate(self, salt: bytes) -> None:
        """The weights, or the cache's meaning, changed: this engine alone moves to a fresh namespace.

        Its unended stores are revoked in the next directive, its lookups are forgotten.
        """
        with self._turn() as now_ns:
            self._core.rotate(salt, now_ns)

    # ---- as a whole ----------------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """Whether lookups may hit: registered with a daemon, and all ranks served."""
        return self._core.attached

    @property
    def counters(self) -> ClientCounters:
        return self._core.counters

    @property
    def is_closed(self) -> bool:
        return self._closed

    def describe(self) -> dict[str, Any]:
        """State as plain values, for logs and status pages."""
        with self._lock:
            return {"run_dir": str(self._run_dir.path), **self._core.describe()}

    def wait_attached(self, timeout_s: float) -> bool:
        """Wait until lookups may hit; False at the timeout. For start-up and tests, not for a step."""
        end = time.monotonic() + timeout_s
        while True:
            with self._turn(receive=True):
                self.housekeep()
            if self.attached or self._closed or time.monotonic() >= end:
                return self.attached
            time.sleep(0.005)

    def close(self) -> None:
        """Say goodbye and stop; idempotent. Later calls answer as if there were no sidecar."""
        with self._turn() as now_ns:
            if not self._closed:
                self._closed = True
                last = self._core.close(now_ns)
                if self._peer is not None:
                    for message in last:
                        self._peer.send(message)
                    self._peer.flush()
                    self._peer.close()
                    self._peer = None
                self._unsent.clear()
        if self._at_exit.alive:
            os.write(self._wake, b"x")
            if self._thread.is_alive() and self._thread is not threading.current_thread():
                self._thread.join(1.0)
            self._at_exit()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- inside --------------------------------------------------------------------------------------

    @contextmanager
    def _turn(self, *, receive: bool = False) -> Iterator[int]:
        """One call: the lock, the time, and the promise that nothing of ours reaches the engine as an error."""
        with self._lock:
            now_ns = self._now_ns()
            if receive:
                try:
                    self._receive(now_ns)
                except Exception as error:
                    self._fail(error)
            try:
                yield now_ns
                self._send()
            except ArgumentError:
                raise
            except Exception as error:
                self._fail(error)
        self._tell()

    def _receive(self, now_ns: int) -> None:
        if self._peer is None:
            return
        for message in self._peer.receive():
            self._core.on_message(message, now_ns)
        if self._peer.refusal is not None and self._core.state is not State.REFUSED:
            self._core.refused(self._peer.refusal, now_ns)
        if self._core.state is State.REFUSED or not self._peer.alive:
            self._drop(now_ns)
        self._note_change()

    def _send(self) -> None:
        self._unsent.extend(self._core.outgoing())
        if self._peer is None:
            self._unsent.clear()
            return
        while self._unsent and self._peer.send(self._unsent[0]):
            self._unsent.popleft()
        self._peer.flush()

    def _drop(self, now_ns: int, *, is_silent: bool = False) -> None:
        """The link is over, for whatever reason: end what hung on it and look again later."""
        if self._peer is not None:
            self._peer.close()
            self._peer = None
        self._is_silent = is_silent
        self._unsent.clear()
        refusal = self._core.refusal if self._core.state is State.REFUSED else None
        is_refused = refusal is not None and refusal.code not in PASSING
        if refusal is None:
            self._core.lost(now_ns)
        self._plan_retry(now_ns, REFUSED_RETRY_S if is_refused else None)

    def _plan_retry(self, now_ns: int, wait_s: float | None = None) -> None:
        self._retry_at_ns = now_ns + int((wait_s if wait_s is not None else self._retry_s) * 1e9)
        self._retry_s = min(self._retry_s * RETRY_GROWTH, RETRY_MAX_S)

    def _fail(self, error: Exception) -> None:
        log.debug("error inside the client", exc_info=error)
        self._note(f"internal error, going on without the sidecar: {type(error).__name__}: {error}", logging.WARNING)
        self._drop(self._now_ns())
        self._plan_retry(self._now_ns(), REFUSED_RETRY_S)

    def housekeep(self) -> float:
        """What does not hang on the engine's calls; seconds until there is more to do."""
        due_ns: int | None = None
        with self._turn(receive=True) as now_ns:
            if self._closed:
                return IDLE_S
            if self._peer is None and now_ns >= self._retry_at_ns:
                self._attach(now_ns)
            if self._peer is not None:
                self._core.tick(now_ns)
                self._send()
                self._peer.tick()
                in_handshake = self._core.state in (State.HELLO, State.REGISTERING)
                is_silent = in_handshake and now_ns - self._handshake_since_ns > int(HANDSHAKE_S * 1e9)
                if is_silent or not self._peer.alive:
                    self._drop(now_ns, is_silent=is_silent)
                    self._note_change()
            due_ns = self._core.next_due_ns()
        return IDLE_S if due_ns is None else min(max((due_ns - self._now_ns()) / 1e9, 0.001), IDLE_S)

    def _attach(self, now_ns: int) -> None:
        """Try one link. The same path at start and after each loss."""
        try:
            self._peer = self._connect(self._run_dir)
        except LostError:
            self._is_silent = False
            self._plan_retry(now_ns)
            self._note_change()
            return
        self._handshake_since_ns = now_ns
        self._core.attach(now_ns, software="kvferry-client", pid=os.getpid())
        self._send()

    def _note_change(self) -> None:
        core = self._core
        if core.attached:
            self._retry_s = RETRY_S
            self._note(f"attached to the sidecar at {self._run_dir.path}: {core.registration.slots} slots")
        elif core.state is State.REFUSED and (refusal := core.refusal) is not None:
            fix = f" (fix: {refusal.fix})" if refusal.fix else ""
            self._note(f"the sidecar refused this engine: {refusal.code}: {refusal.text}{fix}", logging.WARNING)
        elif core.state is State.REGISTERED:
            self._note(f"registered; {core.registration.num_attached} of {core.settings.world_size} ranks attached")
        elif core.state is State.OFF and self._is_silent and not self._closed:
            text = f"the daemon at {self._run_dir.path} does not answer: every lookup is a miss until it does"
            self._note(text, logging.WARNING)
        elif core.state is State.OFF and not self._closed:
            self._note(f"no sidecar at {self._run_dir.path}: every lookup is a miss until there is one")

    def _note(self, text: str, level: int = logging.INFO) -> None:
        if text != self._last_note:
            self._last_note = text
            self._notes.append((level, text))

    def _tell(self) -> None:
        """Hand notes over outside the lock: the listener may call us."""
        while self._notes:
            level, text = self._notes.pop(0)
            try:
                if self._on_note is not None:
                    self._on_note(text)
                else:
                    log.log(level, "%s", text)
            except Exception:  # a listener's error is not the engine's
                log.debug("on_note failed", exc_info=True)

    def wait_fds(self) -> list[int]:
        """What ends the own thread's sleep early: a call of `close`, the end of the daemon."""
        with self._lock:
            tether = self._peer.tether_fileno() if self._peer is not None else -1
            return [self._stop, tether] if tether >= 0 else [self._stop]
