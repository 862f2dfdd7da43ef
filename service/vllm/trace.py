"""Where a load's time went, as one JSON line each, and why there was none: off unless `kvferry.trace` names a file.

    asked ──lookup──▶ answered ──▶ allocated ──▶ told ──the ranks: wait, copy──▶ received

Times are milliseconds since the lookup was sent; `wait` and `copy` are the slowest rank's.
"""

import json
import time
from pathlib import Path
from typing import IO, Any

from kvferry.client.types import Hits
from kvferry.vllm.work import LoadTimes


class LoadTrace:
    """Writes a line for each load that ended; does nothing without a file."""

    def __init__(self, path: str | None) -> None:
        self._file: IO[str] | None = Path(path).open("a", buffering=1) if path else None  # noqa: SIM115
        self._marks: dict[str, dict[str, Any]] = {}

    def asked(self, name: str) -> None:
        """The lookup goes out."""
        if self._file is not None:
            self._marks[name] = {"asked": time.perf_counter(), "questions": 0}

    def answered(self, name: str, hits: Hits, num_blocks: int) -> None:
        """The scheduler has the answer: so many blocks to load. None is a line of its own."""
        self._mark(name, "answered")
        marks = self._marks.get(name)
        if not num_blocks and marks is not None and self._file is not None:
            waited = round((marks["answered"] - marks["asked"]) * 1e3, 3)
            line = {"request": name, "blocks": 0, "hits": hits.count, "next": hits.next.name, "answered_ms": waited}
            self._file.write(json.dumps({**line, "reason": hits.reason.name}) + "\n")

    def allocated(self, name: str, num_blocks: int) -> None:
        """The engine gave the load its blocks."""
        self._mark(name, "allocated")
        if name in self._marks:
            self._marks[name]["blocks"] = num_blocks

    def told(self, name: str) -> None:
        """The orders go to the ranks."""
        self._mark(name, "told")

    def received(self, name: str, times: LoadTimes, *, ok: bool) -> None:
        """All ranks have spoken."""
        self._mark(name, "received")
        marks = self._marks.pop(name, None)
        if marks is None or self._file is None:
            return
        start = marks["asked"]
        line = {
            "request": name,
            "ok": ok,
            "blocks": marks.get("blocks", 0),
            **{f"{key}_ms": round((marks[key] - start) * 1e3, 3) for key in _STEPS if key in marks},
            "wait_ms": times.wait_us / 1e3,
            "copy_ms": times.copy_us / 1e3,
            "rank_ms": times.seen_us / 1e3,
        }
        self._file.write(json.dumps(line) + "\n")

    def forget(self, name: str) -> None:
        """The request ended without a load, or before its end."""
        self._marks.pop(name, None)

    def close(self) -> None:
        """No more lines."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _mark(self, name: str, key: str) -> None:
        marks = self._marks.get(name)
        if marks is not None:
            marks[key] = time.perf_counter()


_STEPS = ("answered", "allocated", "told", "received")
