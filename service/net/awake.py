"""The time of a loop that may itself stand still: monotonic time without what it slept through.

A process that was stopped for a minute, or got no processor for one, finds a minute gone. Held against others it
would be wrong: their acknowledgements and last words have come meanwhile and wait in its sockets. So the time in
which a loop neither worked nor slept as it meant to does not count, but for its first moment: all deadlines that it
keeps wait.

    look ── work ── look ── sleep, planned ── look ── work ─ ─ ─ stopped ─ ─ ─ look
         counted          counted, if not far over          not counted
"""

import time
from collections.abc import Callable
from typing import Final

# One turn, or a sleep beyond its plan. Turns take some milliseconds; a crowded machine adds tens.
STALL_NS: Final = 250_000_000


class AwakeClock:
    """Ask it at the beginning of each turn and before each sleep."""

    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.stood_ns = 0  # that do not count, so far
        self._now_ns = now_ns
        self._last_ns = now_ns()

    def __call__(self, slept_ns: int = 0) -> int:
        """The time, which never jumps. `slept_ns`: of the time since the last look, what was meant to be slept."""
        now_ns = self._now_ns()
        over_ns = now_ns - self._last_ns - slept_ns
        self._last_ns = now_ns
        if over_ns > STALL_NS:
            self.stood_ns += over_ns - STALL_NS  # never all of it: time moves, however slow all turns are
        return now_ns - self.stood_ns
