"""Whether a child that is not dead still lives: what a stop, a deadlock or an endless loop looks like. Pure.

     AWAKE ◀──────────────── answer ─────────────────┐
       └──────── asked, at the next beat ────────▶ ASKED ── enough looks in a row saw no work ──▶ HUNG

Silence alone proves nothing: on a crowded machine a sound process answers late. So each second of silence the
kernel is asked about the one thread that owes the answer, and only a second counts in which that thread
neither used a tick of a CPU, nor waited for one (state R), nor had a page brought in. A starved thread is in
state R, a swapped one brings pages in; neither is ever taken for hung. One that does run and still does not
answer is hung when it has used more CPU for it than any of its turns can need.

Looks are counted, not seconds: whoever did not look, because it stood still itself, has counted nothing.
A serving worker is not asked. It may be inside one long call of its device and sound, and the daemon's
deadlines judge what it owes; but a long call is never in state T: stopped by a signal, it is counted.
A thread that a debugger holds (state t) is somebody's business already and is left alone.
"""

from dataclasses import dataclass
from typing import Final

from kvferry.supervise.api import Vitals

RUNNABLE: Final = "R"
STOPPED: Final = "T"
TRACED: Final = "t"
TICKS_A_SECOND: Final = 100  # USER_HZ, the same on every Linux that matters


@dataclass(slots=True)
class Pulse:
    """One child's."""

    is_asked: bool = False  # and has not answered
    still: int = 0  # looks in a row, the last one included, that saw no work
    _last: Vitals | None = None
    _asked_at_ticks: int = -1  # of CPU used when it was first looked at without an answer

    def ask(self) -> bool:
        """Whether to ask now: never twice for one answer, or a stopped child would find a heap of questions."""
        if self.is_asked:
            return False
        self.is_asked = True
        self.forget()
        return True

    def answer(self) -> None:
        """It has answered."""
        self.is_asked = False
        self.forget()

    def forget(self) -> None:
        """Count anew: what was seen so far says nothing of what comes."""
        self.still, self._last, self._asked_at_ticks = 0, None, -1

    def see(self, now: Vitals | None, looks: int, spin_ticks: int) -> str:
        """One look at a child that owes an answer; why it is hung, or ""."""
        before, self._last = self._last, now
        if now is None or not self.is_asked:
            self.forget()
            return ""
        if self._asked_at_ticks < 0:
            self._asked_at_ticks = now.cpu_ticks
        spun = now.cpu_ticks - self._asked_at_ticks
        if spun >= spin_ticks:
            return f"it ran for {spun // TICKS_A_SECOND} s and answered nothing"
        if before is None:
            return ""
        works = now.state == RUNNABLE or now.cpu_ticks > before.cpu_ticks or now.page_ins > before.page_ins
        self.still = 0 if works or now.state == TRACED else self.still + 1
        return f"no answer for {self.still} s, and it does nothing (state {now.state})" if self.still >= looks else ""

    def see_stopped(self, now: Vitals | None, looks: int) -> str:
        """One look at a worker that serves and is not asked; why it is hung, or ""."""
        self.still = self.still + 1 if now is not None and now.state == STOPPED else 0
        return f"stopped for {self.still} s (state {STOPPED})" if self.still >= looks else ""
