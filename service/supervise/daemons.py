"""One daemon after the other: when the next one starts, what is said of it, and when it is enough. Pure.

    it died, or hung for the first time ───▶ the next one at once; more than `restarts` within `window_ns`: over
    it hung again, or while it started ────▶ the next one after 1 s, 2 s, ... 30 s; it serves once it has answered
    it could not be started, nothing ran ──▶ the same, and no death: no process or no descriptor was to be had

What hangs soon after each start, or cannot be had, is tried for ever: engines miss meanwhile, the workers and what the
pool holds stay, and the machine may be well again tomorrow. What is the matter stands in the log and in `status`.
"""

from collections import deque
from dataclasses import dataclass, field

from kvferry.supervise.lack import Lack
from kvferry.supervise.state import Child, Life, Rules

STAY = "the workers and what the pool holds stay"


@dataclass(slots=True)
class Daemons:
    """All daemons of one sidecar."""

    rules: Rules
    restarts: int = 0  # deaths of those that ran
    start_at: int | None = None  # when the next one may start; None: none is waited for
    _deaths: deque[int] = field(default_factory=deque)  # the latest ones' times
    _lack: Lack = field(default_factory=Lack)  # those in a row that hung or never ran

    @property
    def trouble(self) -> str:
        """What is the matter, until one works again; "" if nothing is but a death."""
        lack = self._lack
        again = f", {lack.tries} in a row" if lack.tries > 1 else ""
        return f"the daemon {lack.why}{again}" if lack.lasts else ""

    def die(self, one: Child, how: str, now_ns: int) -> tuple[str, bool]:
        """One ended, or could not be started; the line to be logged ("" for none), and whether it was one too many."""
        if one.pid:
            self.restarts += 1
            self._deaths.append(now_ns)
            while self._deaths[0] <= now_ns - self.rules.window_ns:
                self._deaths.popleft()
            if len(self._deaths) > self.rules.restarts:
                within = f"within {self.rules.window_ns // 1_000_000_000} s"
                return f"giving up: the daemon died {len(self._deaths)} times {within}, the last time it {how}", True
        is_news, pause_ns = False, 0
        if one.kill_why or not one.pid:
            is_news = self._lack.fail(how if one.pid else one.failed_why, one.life is Life.SPARE, self.rules, now_ns)
            pause_ns = self._lack.pause_ns
        self.start_at = now_ns + pause_ns
        if not one.pid:
            most = self.rules.retry_most_ns / 1e9
            return f"{self.trouble}; tried again, at last every {most:g} s; {STAY}" if is_news else "", False
        if pause_ns:
            return f"{self.trouble}; the next one starts in {pause_ns / 1e9:g} s, {STAY}", False
        return f"daemon {how}; another one starts, {STAY}", False

    def is_due(self, now_ns: int) -> bool:
        """Whether the next one is to be started now; asked again it is not."""
        if self.start_at is None or self.start_at > now_ns:
            return False
        self.start_at = None
        return True

    def serves(self, one: Child) -> bool:
        """Whether one that is ready serves. After one that hung it has to answer first: that one was ready too."""
        return one.life is not Life.STARTING and (one.answered or not self._lack.lasts)

    def work(self, now_ns: int) -> None:
        """The one that is there serves."""
        self._lack.work(now_ns)
