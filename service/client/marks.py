"""Marks: how a rank says from when on a begun copy may touch its blocks.

    word    signal ──the device's stream writes the number into the shared page──▶ the worker waits for it
                   └──▶ Mark(word=n): the begin is sent at once
    host    signal ──an event behind what was launched──▶ Mark(hold=n): the rank keeps the begin back
            passed() reaches n ──▶ the begin is sent, and the worker waits for nothing

On CPU an engine does its work before it calls: it writes the word itself, and that is all (`CpuMarks`). What a
GPU does instead is in `cuda_marks.py`, imported only with such memory.

All calls come from the thread that launches the engine's work, and from no other: a call into a device's
driver from a second thread can end a CUDA graph that is being captured in the first.
"""

from dataclasses import dataclass
from typing import Protocol

from kvferry.proto.page import PageWriter
from kvferry.proto.tether import MarkMode


@dataclass(frozen=True, slots=True)
class Mark:
    """One mark behind everything that was launched so far.

    word: what the worker shall wait for; 0: nothing.  hold: the begin is sent once `passed` is so far; 0: at once.
    """

    word: int
    hold: int = 0


class Marks(Protocol):
    """One rank's marks, for the life of its page."""

    @property
    def mode(self) -> MarkMode:
        """What the worker is told at registration."""

    @property
    def why(self) -> str:
        """Why it is this mode, in a few words; empty where there was no choice."""

    def signal(self) -> Mark:
        """A mark behind everything launched before this call. Queues at most one small thing; never waits."""

    def passed(self) -> int:
        """The highest hold that the device is past. Never waits."""

    def close(self) -> None:
        """The rank ends; idempotent, never waits."""


class CpuMarks:
    """An engine that computes before it calls: a mark is a plain store."""

    mode: MarkMode = "word"
    why = ""

    def __init__(self, page: PageWriter) -> None:
        self._page = page

    def signal(self) -> Mark:
        """Move the word on."""
        return Mark(self._page.signal())

    def passed(self) -> int:
        """Nothing is ever held back."""
        return 0

    def close(self) -> None:
        """Nothing to give back."""
