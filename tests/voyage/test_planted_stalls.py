"""Bugs planted on purpose in who notices that somebody stands still, and in who is taken for it."""

from typing import Any

import pytest

from kvferry.supervise.api import Vitals
from kvferry.supervise.core import Supervisor
from kvferry.supervise.daemons import Daemons
from kvferry.supervise.pulse import Pulse
from kvferry.supervise.spares import Spares
from kvferry.supervise.state import Child, Life

from .clock import MS, S
from .planting import Plant, find


def nobody_is_ever_hung(patch: pytest.MonkeyPatch) -> None:
    """The looks are made and nothing comes of them."""
    patch.setattr(Pulse, "see", lambda self, now, looks, spin_ticks: "")


def spares_are_not_asked(patch: pytest.MonkeyPatch) -> None:
    """They owe nobody anything, it seems: their rank waits at the door for ever."""
    seen = Supervisor._seen

    def see_daemons(self: Supervisor, child: int, vitals: Vitals | None) -> Any:
        one = self.children.get(child)
        return [] if one is not None and one.rank >= 0 and one.life is Life.SPARE else seen(self, child, vitals)

    patch.setattr(Supervisor, "_seen", see_daemons)


def want_of_a_processor_is_taken_for_a_hang(patch: pytest.MonkeyPatch) -> None:
    """Silence alone counts: on a crowded machine the sidecar kills itself again and again."""
    see = Pulse.see

    def see_nothing(self: Pulse, now: Vitals | None, looks: int, spin_ticks: int) -> str:
        return see(self, None if now is None else Vitals("S", 0, 0), looks, spin_ticks)

    patch.setattr(Pulse, "see", see_nothing)


def silence_is_measured_by_the_clock(patch: pytest.MonkeyPatch) -> None:
    """The supervisor holds the time in which it stood still itself against its children."""
    asked_at: dict[int, int] = {}
    now = [0]
    step, ask = Supervisor.step, Pulse.ask

    def step_and_look_at_the_clock(self: Supervisor, event: Any, now_ns: int) -> Any:
        now[0] = now_ns
        return step(self, event, now_ns)

    def note_when(self: Pulse) -> bool:
        is_asked = ask(self)
        if is_asked:
            asked_at[id(self)] = now[0]
        return is_asked

    def see(self: Pulse, vitals: Vitals | None, looks: int, spin_ticks: int) -> str:
        runs = vitals is None or vitals.state == "R"
        is_silent = self.is_asked and now[0] - asked_at[id(self)] > looks * 100 * MS
        return "silent for long" if is_silent and not runs else ""

    patch.setattr(Supervisor, "step", step_and_look_at_the_clock)
    patch.setattr(Pulse, "ask", note_when)
    patch.setattr(Pulse, "see", see)


def a_hung_daemon_is_killed_and_not_replaced(patch: pytest.MonkeyPatch) -> None:
    """Its end was our own deed, so nobody looks after it."""
    died = Supervisor._daemon_died
    patch.setattr(
        Supervisor,
        "_daemon_died",
        lambda self, one, how, now_ns: [] if "no answer" in how else died(self, one, how, now_ns),
    )


def a_daemon_that_could_not_be_started_is_not_tried_again(patch: pytest.MonkeyPatch) -> None:
    """Nobody has died, so nobody is missed."""
    die = Daemons.die

    def die_if_it_lived(self: Daemons, one: Child, how: str, now_ns: int) -> tuple[str, bool]:
        told, is_over = die(self, one, how, now_ns)
        self.start_at = self.start_at if one.pid else None
        return told, is_over

    patch.setattr(Daemons, "die", die_if_it_lived)


def a_spare_that_does_not_start_is_not_tried_again(patch: pytest.MonkeyPatch) -> None:
    """Or in an hour, which is the same to whoever knocks."""
    fail = Spares.fail

    def fail_for_long(self: Spares, one: Child, status: int, now_ns: int) -> tuple[str, int]:
        told, pause_ns = fail(self, one, status, now_ns)
        return told, 3600 * S if pause_ns else 0

    patch.setattr(Spares, "fail", fail_for_long)


PLANTS: list[tuple[Plant, str, tuple[tuple[str, ...], ...]]] = [
    (nobody_is_ever_hung, "liveness", (("daemon_hang", "spare_hang"),)),
    (spares_are_not_asked, "liveness", (("spare_hang",),)),
    (want_of_a_processor_is_taken_for_a_hang, "which lives", (("daemon_stall",),)),
    (silence_is_measured_by_the_clock, "which lives", (("sidecar_stall",),)),
    (a_hung_daemon_is_killed_and_not_replaced, "liveness", (("daemon_hang",),)),
    (a_daemon_that_could_not_be_started_is_not_tried_again, "liveness", (("daemon_crash", "daemon_hang"),)),
    (a_spare_that_does_not_start_is_not_tried_again, "liveness", (("worker_crash", "sidecar_crash"),)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "promise", "needs"), PLANTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_bug_is_found(
    plant: Plant, promise: str, needs: tuple[tuple[str, ...], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    find(plant, promise, monkeypatch, needs)
