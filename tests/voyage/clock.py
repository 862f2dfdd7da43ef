"""Simulated time: one queue of events, run in order of their time and then of their entry.

A fault is an event like any other: whoever wants a crash at some moment puts it into the queue.

    Clock   true time, and the one queue        Party   a process: a clock of its own, and whether it runs at all
"""

import heapq
from collections import deque
from collections.abc import Callable
from typing import Any

US = 1_000
MS = 1_000_000
S = 1_000_000_000


class Clock:
    """The queue and its present moment."""

    def __init__(self) -> None:
        self.now_ns = 1 * S  # not 0: a zero is "none" in many fields
        self.num_run = 0
        self._queue: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._entered = 0

    def at(self, when_ns: int, deed: Callable[..., None], *args: Any) -> None:
        """Run `deed(*args)` at `when_ns`, or now if that is over."""
        self._entered += 1
        heapq.heappush(self._queue, (max(when_ns, self.now_ns), self._entered, deed, args))

    def after(self, delay_ns: int, deed: Callable[..., None], *args: Any) -> None:
        """Run `deed(*args)` in `delay_ns`."""
        self.at(self.now_ns + delay_ns, deed, *args)

    def run_one(self) -> bool:
        """Run the next event; False if there is none."""
        if not self._queue:
            return False
        self.now_ns, _, deed, args = heapq.heappop(self._queue)
        self.num_run += 1
        deed(*args)
        return True


class Party:
    """One process. Its clock is set otherwise than others' and may run faster or slower than true time.

    Everything that a process does or hears goes through its party: one that was stopped (SIGSTOP) does it when it
    goes on, one that has ended (SIGKILL) never.
    """

    def __init__(self, clock: Clock, offset_ns: int = 0, ppm: int = 0) -> None:
        self.ended = False
        self.stopped = False
        self.starved = False  # it stands still for want of a processor, not by a signal
        self.is_awake_clock = False  # its clock leaves out what it stood through (`kvferry.net.awake`)
        self.went_on_ns = 0  # true time at which it was last let go on; 0: it never stood still
        self._clock = clock
        self._offset_ns = offset_ns
        self._rate = 1_000_000 + ppm
        self._stopped_ns = 0  # true time at which it was stopped
        self._waiting: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()

    @property
    def now_ns(self) -> int:
        """The time as this process reads it."""
        return self._offset_ns + self._clock.now_ns * self._rate // 1_000_000

    def at(self, when_ns: int, deed: Callable[..., None], *args: Any) -> None:
        """Run `deed(*args)` when this process's clock shows `when_ns`."""
        true_ns = -((self._offset_ns - when_ns) * 1_000_000 // self._rate)
        self._clock.at(true_ns, self.run, deed, *args)

    def after(self, delay_ns: int, deed: Callable[..., None], *args: Any) -> None:
        """Run `deed(*args)` in `delay_ns` of true time."""
        self._clock.after(delay_ns, self.run, deed, *args)

    def run(self, deed: Callable[..., None], *args: Any) -> None:
        """Run `deed(*args)` now, or as soon as this process goes on."""
        if self.ended:
            return
        if self.stopped:
            self._waiting.append((deed, args))
        else:
            deed(*args)

    def stop(self, *, starved: bool = False) -> None:
        """SIGSTOP; or no processor, which looks otherwise from outside and feels the same."""
        if not self.stopped:
            self._stopped_ns = self._clock.now_ns
        self.stopped, self.starved = True, starved

    def go_on(self) -> None:
        """SIGCONT: what has come meanwhile is done, in its order."""
        if not self.stopped:
            return
        self.stopped = self.starved = False
        self.went_on_ns = self._clock.now_ns
        if self.is_awake_clock:
            self._offset_ns -= (self.went_on_ns - self._stopped_ns) * self._rate // 1_000_000
        while self._waiting:
            deed, args = self._waiting.popleft()
            self._clock.after(0, self.run, deed, *args)

    def end(self) -> None:
        """SIGKILL."""
        self.ended = True
        self._waiting.clear()
