"""Ranks whose next spare does not start: when it is tried again, and what is said of it. Pure; `core.py` asks.

Where an engine took the GPU's memory after the start, no spare gets a context there any more until it is gone. The
engine is served by the worker it has: so this never ends a sidecar that has once been ready, it is tried for ever
(`lack.py`). It is said once, again if the reason is another, and once more when it works; `kvferry status` shows it
meanwhile.
"""

from dataclasses import dataclass, field
from typing import Any

from kvferry.supervise.lack import Lack
from kvferry.supervise.state import Child, Life, Rules, how_ended, name_of


@dataclass(slots=True)
class Spares:
    """Of all ranks."""

    rules: Rules
    failed: int = 0  # spares that died, ready or not
    _lacks: dict[int, Lack] = field(default_factory=dict)

    def fail(self, one: Child, status: int, now_ns: int) -> tuple[str, int]:
        """A spare died; the line to be logged ("" for none) and the pause before the next one."""
        self.failed += 1
        lack = self._lacks.setdefault(one.rank, Lack())
        why = how_ended(status, one.kill_why or one.failed_why)
        is_news = lack.fail(why, one.life is Life.SPARE, self.rules, now_ns)
        if not lack.pause_ns:
            return f"{name_of(one)}, a spare, {why}; starting another", 0
        if not is_news:
            return "", lack.pause_ns
        most = self.rules.retry_most_ns // 1_000_000_000
        return (
            f"rank {one.rank} has no spare: {name_of(one)} {why}; engines that are served notice nothing, "
            f"a new one waits; tried again, at last every {most} s",
            lack.pause_ns,
        )

    def is_told(self, rank: int) -> bool:
        """Whether the log has this rank's reason already, so that a worker need not repeat it."""
        return self._lacks.get(rank, Lack()).told != ""

    def work(self, rank: int, now_ns: int) -> str:
        """A spare is ready; the line to be logged, if its lack was said."""
        lack = self._lacks.get(rank)
        if lack is None or not lack.work(now_ns):
            return ""
        return f"rank {rank} has a spare again, after {lack.tries} that failed" if lack.told else ""

    def forget(self, rank: int) -> None:
        """A spare was taken: it works."""
        self._lacks.pop(rank, None)

    def hurry(self, rank: int) -> int | None:
        """The rank's engine is gone, and perhaps what kept the spare out: the pause from now; None if none lacks."""
        lack = self._lacks.get(rank)
        if lack is None or not lack.lasts:
            return None
        lack.pause_ns = self.rules.retry_ns
        return lack.pause_ns

    def waiting(self) -> set[int]:
        """The ranks that are without a spare for longer than a start takes."""
        return {rank for rank, lack in self._lacks.items() if lack.lasts and lack.pause_ns}

    def listed(self) -> list[dict[str, Any]]:
        """For `kvferry status`: each rank that has none, how many have failed, and why the last one did."""
        return [
            {"rank": rank, "tries": lack.tries, "why": lack.why}
            for rank, lack in sorted(self._lacks.items())
            if lack.lasts
        ]
