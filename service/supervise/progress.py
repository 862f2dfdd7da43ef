"""Progress where a person waits: a bar on a terminal (if tqdm is installed), else one line per tenth."""

import contextlib
import importlib
import sys
from typing import Any, TextIO

from kvferry.logs import say
from kvferry.units import format_bytes


class Progress:
    """Bytes of one long deed, of `total`."""

    def __init__(self, title: str, total: int, stream: TextIO | None = None) -> None:
        stream = stream or sys.stderr
        self._title = title
        self._total = total
        self._done = 0
        self._tenths = 0
        self._stream = stream
        self._bar: Any = None
        if stream is not None and stream.isatty():
            try:
                tqdm = importlib.import_module("tqdm")
            except ImportError:
                return
            self._bar = tqdm.tqdm(
                total=total, desc=title, unit="B", unit_scale=True, unit_divisor=1024, leave=False, file=stream
            )

    def reach(self, done: int) -> None:
        """`done` bytes are done by now, of the total."""
        step, self._done = done - self._done, done
        if self._bar is not None:
            try:
                self._bar.update(step)
            except OSError:  # the terminal is gone
                self._bar = None
            return
        tenths = 10 * done // self._total if self._total else 10
        if tenths > self._tenths:
            self._tenths = tenths
            # Small pools are done at once: one line says it.
            if tenths == 10 or self._total > 4 << 30:
                say(f"{self._title}: {self.text}", self._stream)

    @property
    def text(self) -> str:
        """How far it is: "3.0 GiB of 8.0 GiB"."""
        return f"{format_bytes(self._done)} of {format_bytes(self._total)}"

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.close()
