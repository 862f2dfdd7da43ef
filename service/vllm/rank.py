"""The rank half: carries a step's orders to `kvferry.RankClient` and its words to vLLM. Imports no vLLM.

    revoke ──▶ begin_loads ──▶ (forward) ──▶ begin_stores ──▶ finished, failed_blocks

Each load of each step is reported as finished exactly once, whatever happens: a second time would end the
engine, none would leave its request waiting for ever. What may still be written is never reported: a load that the
rank client holds open ends by its worker's word or proven death and by nothing else, in here too. Nothing waits but
a step that has nothing to compute, and that for milliseconds.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from kvferry.client.types import Directive, RankReport
from kvferry.vllm.work import LoadTimes, RankWords, StepWork

# After a failure of our own this rank serves on until no load is open, and no longer than this: then its worker is
# asked to go, which ends what that still copies.
LAST_WORD_NS: Final = 10_000_000_000
# While loads are all there is to do, vLLM runs a thousand empty steps a second, and its ranks spin between them:
# on a machine with few cores that starves the very copies they wait for. So a rank sleeps in such a step until
# its worker speaks of a load. A request that arrives meanwhile waits as long, so it is short; but the next empty step
# looks only 2.5 ms after this one has ended, so it is not much shorter than a load of some 30 MiB.
IDLE_WAIT_S: Final = 0.008
# The same while the sidecar's answer to a lookup, or another rank's load, is all there is to wait for: a rank
# cannot see it come. One rank that spins is enough to starve the copy that the other one waits for.
IDLE_SLEEP_S: Final = 0.002
# A row of idle steps ends with a pause between two of them: the engine had nothing to do at all.
QUIET_NS: Final = 100_000_000
# What takes long is slept through in longer pieces, an eighth of the time waited so far, up to this.
IDLE_MOST_S: Final = 0.020


class RankClientLike(Protocol):
    """What is used of `kvferry.RankClient`."""

    def revoke(self, directive: Directive) -> None: ...
    def begin_loads(self, directive: Directive) -> None: ...
    def begin_stores(self, directive: Directive) -> None: ...
    def wait(self, timeout_s: float) -> None: ...
    def poll(self) -> RankReport: ...
    def close(self, wait_s: float = ...) -> None: ...

    @property
    def holding(self) -> bool: ...
    @property
    def open_loads(self) -> frozenset[int]: ...


@dataclass(frozen=True, slots=True)
class _Loading:
    name: str
    blocks: tuple[int, ...]
    since_ns: int


class RankHalf:
    """See the module's text. Without a client every load fails at once."""

    def __init__(self, client: RankClientLike | None, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._client = client
        self._now_ns = now_ns
        self._loading: dict[int, _Loading] = {}
        self._finished: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._times: dict[str, LoadTimes] = {}
        self._unbegun: tuple[int, ...] = ()  # stores of this step, until its forward is launched
        self._broken_ns: int | None = None
        self._is_idle_step = self._is_waiting_step = self._was_holding = False
        self._idle_since_ns: int | None = None  # start of the present row of idle steps
        self._stepped_ns = 0  # the last step

    @property
    def is_idle(self) -> bool:
        """Whether no load's word is due."""
        return not (self._loading or self._finished)

    def revoke(self, work: StepWork) -> None:
        """Before anything of this step is launched."""
        if self._client is not None and work.directive:
            self._client.revoke(work.directive)

    def begin_loads(self, work: StepWork) -> None:
        """Before the forward, after fresh blocks were zeroed."""
        for name, blocks in work.failed.items():
            self._fail(name, blocks)
        self._is_idle_step = work.is_idle
        self._is_waiting_step = work.is_idle and work.is_waiting
        now = self._now_ns()
        if not work.is_idle:
            self._idle_since_ns = None
        elif self._idle_since_ns is None or now > self._stepped_ns + QUIET_NS:
            self._idle_since_ns = now
        self._stepped_ns = now
        for ticket, blocks in (*work.directive.loads, *work.directive.failed_loads):
            self._loading[ticket] = _Loading(work.names[ticket], blocks, now)
        if self._client is None:
            self._fail_all()
            return
        if self._unbegun:
            late = Directive(work.directive.step, stores=self._unbegun, revokes=work.directive.revokes)
            self._client.begin_stores(late)
        if work.directive:
            self._client.begin_loads(work.directive)
        self._unbegun = work.directive.stores

    def begin_stores(self, work: StepWork) -> None:
        """After the forward was launched.

        An engine that speculates comes to it late, after `finished` and `words` of its step; stages of a pipeline
        before the last do not come to it at all. Then they begin with the next step, and one is asked for.
        """
        self._unbegun = ()
        if self._client is not None and work.directive:
            self._client.begin_stores(work.directive)

    def finished(self) -> set[str]:
        """Requests whose load is over at this rank, each once. Its invalid blocks are in `failed_blocks` now."""
        if self._client is not None:
            if self._loading:
                self._hear(self._client)
                if self._is_idle_step:
                    self._wait(self._client)
            else:
                if self._is_waiting_step:
                    time.sleep(self._pause_s(IDLE_SLEEP_S))
                self._client.poll()  # words on stores; nobody waits for them
            if self._broken_ns is not None and (not self._loading or self._now_ns() > self._broken_ns + LAST_WORD_NS):
                self._client.close(wait_s=0)
        finished, self._finished = self._finished, set()
        return finished

    def failed_blocks(self) -> set[int]:
        """Blocks that a load could not fill, of the requests that the last `finished` named."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def words(self) -> RankWords | None:
        """How long the loads took that ended since the last call; whether begins are held back, or no more."""
        times, self._times = self._times, {}
        is_holding = self._client is not None and (self._client.holding or bool(self._unbegun))
        was_holding, self._was_holding = self._was_holding, is_holding
        return RankWords(times, is_holding) if times or is_holding or was_holding else None

    def switch_off(self) -> None:
        """Something went wrong in here: serve no longer than for the loads that run, see LAST_WORD_NS."""
        if self._broken_ns is None:
            self._broken_ns = self._now_ns()

    def close(self) -> None:
        """The engine ends. A worker that hangs may write on, into memory that it keeps mapped by itself."""
        if self._client is not None:
            self._client.close()

    def _wait(self, client: RankClientLike) -> None:
        """Sleep until a load ends or the pause is over. A word on a store alone is no reason to end the step."""
        left_s = self._pause_s(IDLE_WAIT_S)
        while left_s > 0 and not self._finished:
            since_ns = self._now_ns()
            client.wait(left_s)
            if not self._hear(client):
                break  # time is over, or nobody is there to say anything
            left_s -= (self._now_ns() - since_ns) / 1e9

    def _hear(self, client: RankClientLike) -> bool:
        """Take the worker's words; whether there were any."""
        now = self._now_ns()
        # Before the report: what ends between the two is in it.
        open_loads = client.open_loads if self._broken_ns is not None else None
        report = client.poll()
        for end in report.loads:
            loading = self._loading.pop(end.ticket, None)
            if loading is None:
                continue
            if not end.ok:
                self._failed_blocks.update(end.failed_blocks or loading.blocks)
            self._finished.add(loading.name)
            self._times[loading.name] = LoadTimes(end.wait_us, end.copy_us, (now - loading.since_ns) // 1000)
        if open_loads is not None:
            # Lost in the failure, between the engine's orders and the client: no worker was told to write these.
            for ticket in self._loading.keys() - open_loads:
                loading = self._loading.pop(ticket)
                self._fail(loading.name, loading.blocks)
        return bool(report)

    def _pause_s(self, least: float) -> float:
        waited_s = (self._now_ns() - self._idle_since_ns) / 1e9 if self._idle_since_ns is not None else 0.0
        return min(max(waited_s / 8, least), IDLE_MOST_S)

    def _fail(self, name: str, blocks: tuple[int, ...]) -> None:
        self._finished.add(name)
        self._failed_blocks.update(blocks)

    def _fail_all(self) -> None:
        for loading in self._loading.values():
            self._fail(loading.name, loading.blocks)
        self._loading.clear()
