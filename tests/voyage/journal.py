"""The story of each job: one line for every event that touched it, from the wish to the last word.

A log tells who said what to whom; a story tells what became of one ticket, across its client, the daemon, each
rank and worker, and the deaths between. Printed for a failing seed, for the jobs that the failure names.
"""

import re
from typing import Any

from .clock import Clock

MOST_STORIES = 4


class Journal:
    """Stories by job; kept only when somebody will read them."""

    def __init__(self, clock: Clock, keep: bool) -> None:
        self.keep = keep
        self._clock = clock
        self._stories: dict[tuple[str, int], list[str]] = {}  # (engine, ticket) -> lines
        self._names: dict[int, tuple[str, int]] = {}  # job -> (engine, ticket)

    def ask(self, engine: str, ticket: int, text: str, *items: Any) -> None:
        """Something happened to a ticket."""
        if self.keep:
            line = f"{self._clock.now_ns / 1e6:10.3f} {text.format(*items)}"
            self._stories.setdefault((engine, ticket), []).append(line)

    def name(self, job: int, engine: str, ticket: int) -> None:
        """The ticket was accepted as this job."""
        if self.keep:
            self._names[job] = (engine, ticket)

    def tell(self, job: int, text: str, *items: Any) -> None:
        """Something happened to a job."""
        if self.keep and job in self._names:
            self.ask(*self._names[job], text, *items)

    def everybody(self, text: str, jobs: Any) -> None:
        """Something happened to many jobs at once."""
        if self.keep:
            for job in jobs:
                self.tell(job, "{}", text)

    def about(self, failure: str) -> list[str]:
        """The stories that a failure's text names by job or by ticket, the latest first."""
        words = set(re.findall(r"[0-9a-f]{6,}", failure))
        tickets = {int(n) for n in re.findall(r"(?:ticket|store|load|stores|tickets|loads) \[?(\d+)\b", failure)}
        engines = set(re.findall(r"engine\d+[.\w]*?(?=\.rank|\b)", failure))
        jobs = {f"{job:x}": name for job, name in self._names.items()}
        chosen = [jobs[word] for word in words if word in jobs]
        chosen += [n for n in self._stories if n[1] in tickets and (not engines or n[0] in engines) and n not in chosen]
        lines = []
        for engine, ticket in chosen[:MOST_STORIES]:
            lines.append(f"story of {engine} ticket {ticket}")
            lines += [f"  {line}" for line in self._stories.get((engine, ticket), [])]
        return lines
