"""Ranks whose next spare does not start: when it is tried again, and what is said of it. Pure; `core.py` asks.

    a ready spare dies ──▶ the next one at once ─┐
    one dies that starts ──▶ 1 s ──▶ 2 s ──▶ ... ┴──▶ 30 s ──▶ ready, for as long as `window_ns`: forgotten

Where an engine took the GPU's memory after the start, no spare gets a context there any more until it is gone. The
engine is served by the worker it has: so this never ends a sidecar that has once been ready, it is tried for ever.
It is said once, again if the reason is another, and once more when it works; `kvferry status` shows it meanwhile.
"""

from dataclasses import dataclass, field
from typing import Any

from kvferry.supervise.state import Child, Life, Rules, how_ended, name_of


@dataclass(slots=True)
class Lack:
    """One rank's trouble."""

    tries: int = 0
    pause_ns: int = 0  # until the last try; 0: at once
    why: str = ""
    told: str = ""  # how the line that was logged began
    ready_ns: int | None = None  # since when there is a spare again


@dataclass(slots=True)
class Spares:
    """Of all ranks."""

    rules: Rules
    failed: int = 0  # spares that died, ready or not
    _lacks: dict[int, Lack] = field(default_factory=dict)

    def fail(self, one: Child, status: int, now_ns: int) -> tuple[str, int]:
        """A spare died; the line to be logged ("" for none) and the pause before the next one."""
        self.failed += 1
        lack = self._lacks.get(one.rank)
        if lack is None or (lack.ready_ns is not None and now_ns - lack.ready_ns >= self.rules.window_ns):
            lack = self._lacks[one.rank] = Lack()
        lack.tries += 1
        lack.why = how_ended(status, one.kill_why or one.failed_why)
        if lack.tries == 1 and one.life is Life.SPARE:
            lack.ready_ns = None
            return f"{name_of(one)}, a spare, {lack.why}; starting another", 0
        lack.pause_ns = min(max(2 * lack.pause_ns, self.rules.retry_ns), self.rules.retry_most_ns)
        begins = lack.why.partition(": ")[0]  # the rest may have numbers in it
        is_told = lack.told == begins and lack.ready_ns is None
        lack.told, lack.ready_ns = begins, None
        if is_told:
            return "", lack.pause_ns
        most = self.rules.retry_most_ns // 1_000_000_000
        return (
            f"rank {one.rank} has no spare: {name_of(one)} {lack.why}; engines that are served notice nothing, "
            f"a new one waits; tried again, at last every {most} s",
            lack.pause_ns,
        )

    def is_told(self, rank: int) -> bool:
        """Whether the log has this rank's reason already, so that a worker need not repeat it."""
        return self._lacks.get(rank, Lack()).told != ""

    def work(self, rank: int, now_ns: int) -> str:
        """A spare is ready; the line to be logged, if its lack was said."""
        lack = self._lacks.get(rank)
        if lack is None or lack.ready_ns is not None:
            return ""
        lack.ready_ns = now_ns
        return f"rank {rank} has a spare again, after {lack.tries} that failed" if lack.told else ""

    def forget(self, rank: int) -> None:
        """A spare was taken: it works."""
        self._lacks.pop(rank, None)

    def hurry(self, rank: int) -> int | None:
        """The rank's engine is gone, and perhaps what kept the spare out: the pause from now; None if none lacks."""
        lack = self._lacks.get(rank)
        if lack is None or lack.ready_ns is not None:
            return None
        lack.pause_ns = self.rules.retry_ns
        return lack.pause_ns

    def waiting(self) -> set[int]:
        """The ranks that are without a spare for longer than a start takes."""
        return {rank for rank, lack in self._lacks.items() if lack.ready_ns is None and lack.pause_ns}

    def listed(self) -> list[dict[str, Any]]:
        """For `kvferry status`: each rank that has none, how many have failed, and why the last one did."""
        return [
            {"rank": rank, "tries": lack.tries, "why": lack.why}
            for rank, lack in sorted(self._lacks.items())
            if lack.ready_ns is None
        ]
