"""One that does not start, or does not stay: when the next try is, and whether there is news of it. Pure.

    fails ──▶ 1 s ──▶ 2 s ──▶ ... ──▶ 30 s ──▶ works, for as long as `window_ns`: forgotten
      └─ the first one that had worked: the next at once

It is tried for ever: the machine may have again tomorrow what it lacks today, and engines are served or miss meanwhile.
"""

from dataclasses import dataclass

from kvferry.supervise.state import Rules


@dataclass(slots=True)
class Lack:
    """Of a rank's spare, or of the daemon."""

    tries: int = 0  # that failed, one after the other
    pause_ns: int = 0  # from the last failure to the next try; 0: at once
    why: str = ""  # the last one failed
    told: str = ""  # how the reason that was logged begins
    ready_ns: int | None = None  # since when it works again

    @property
    def lasts(self) -> bool:
        """Whether it has failed and does not work yet."""
        return self.tries > 0 and self.ready_ns is None

    def fail(self, why: str, had_worked: bool, rules: Rules, now_ns: int) -> bool:
        """One more has failed; whether the log lacks the reason. `pause_ns` says when the next may start."""
        if self.ready_ns is not None and now_ns - self.ready_ns >= rules.window_ns:
            self.tries, self.pause_ns, self.told = 0, 0, ""
        begins = why.partition(": ")[0]  # the rest may have numbers in it
        is_news = self.told != begins or self.ready_ns is not None
        self.tries, self.why, self.ready_ns = self.tries + 1, why, None
        if self.tries > 1 or not had_worked:
            self.pause_ns = min(max(2 * self.pause_ns, rules.retry_ns), rules.retry_most_ns)
            self.told = begins
        return is_news

    def work(self, now_ns: int) -> bool:
        """It works; whether it had not."""
        was_lacking = self.lasts
        if was_lacking:
            self.ready_ns = now_ns
        return was_lacking
