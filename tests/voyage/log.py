"""A voyage's log: kept only when somebody will read it, and the same bytes for the same seed."""

import hashlib
from typing import Any

from kvferry.proto.codec import describe

from .clock import Clock


class Log:
    """Lines of (moment, party, what)."""

    def __init__(self, clock: Clock, keep: bool) -> None:
        self.lines: list[str] = []
        self._clock = clock
        self.keep = keep

    def __call__(self, who: str, text: str, *items: Any) -> None:
        """Note one line; messages are described field by field."""
        if self.keep:
            said = text.format(*(_text(item) for item in items))
            self.lines.append(f"{self._clock.now_ns / 1e6:10.3f} {who}: {said}")

    def digest(self) -> str:
        """One number for the whole log."""
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()


def _text(item: Any) -> Any:
    return describe(item) if hasattr(item, "TAG") else item
