"""Who is taken for hung and who is not: silence, what the kernel says of it, and a supervisor that stood still."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvferry.supervise import vitals
from kvferry.supervise.api import Answered, Exited, Kill, Look, Note, Seen, Stop, Taken, Tell, TimePassed, Vitals
from kvferry.supervise.pulse import TICKS_A_SECOND, Pulse
from kvferry.supervise.state import LOOKS, Phase
from tests.service.test_supervisor import Drill

S = 1_000_000_000
ASLEEP, STOPPED, ON_DISK, QUEUED, TRACED = (Vitals(state, 10, 0) for state in "STDRt")


def beat(drill: Drill, of: Callable[[int], Vitals | None], late_ns: int = 0) -> None:
    """Let one beat pass; `of` is what a look at a child sees."""
    due = drill.core.next_due_ns()
    assert due is not None
    drill.now = due + late_ns
    drill.do(TimePassed())
    done = list(drill.last)
    for action in list(drill.last):
        if isinstance(action, Look):
            done += drill.do(Seen(action.child, of(action.child)))
    drill.last = done


def answer(drill: Drill, *silent: int) -> None:
    for child in list(drill.core.children):
        if child not in silent:
            drill.do(Answered(child))


def beats_until_killed(drill: Drill, victim: int, seen: Vitals, most: int = 40) -> int:
    """Beats until the silent one is killed; 0: it was not."""
    for number in range(1, most + 1):
        beat(drill, lambda child: seen if child == victim else ASLEEP)
        killed = [action.child for action in drill.last if isinstance(action, Kill)]
        if killed:
            assert killed == [victim]
            return number
        answer(drill, victim)
    return 0


# ---- the supervisor ------------------------------------------------------------------------------------


def test_each_beat_asks_everyone_who_can_answer_and_nobody_twice() -> None:
    drill = Drill().serve()
    beat(drill, lambda _: ASLEEP)
    assert {action.child for action in drill.last if isinstance(action, Tell)} == set(drill.core.children)
    beat(drill, lambda _: ASLEEP)
    assert not drill.of(Tell), "a child that is stopped finds one question, not a heap"
    answer(drill)
    beat(drill, lambda _: ASLEEP)
    assert {action.child for action in drill.last if isinstance(action, Tell)} == set(drill.core.children)


@pytest.mark.parametrize("seen", [STOPPED, ASLEEP, ON_DISK], ids=lambda seen: seen.state)
def test_a_silent_daemon_that_does_nothing_is_killed_and_replaced_and_the_workers_stay(seen: Vitals) -> None:
    """Case 48: stopped, in a deadlock, or in a call that does not return."""
    drill = Drill().serve()
    daemon, spares = drill.daemon, set(drill.spares.values())
    # The first beat asks and looks for comparison; then each one counts.
    assert beats_until_killed(drill, daemon, seen) == 1 + LOOKS
    [note] = drill.of(Note)
    assert note == Note(f"killing daemon: no answer for {LOOKS} s, and it does nothing (state {seen.state})")
    drill.do(Exited(daemon, -9))
    assert drill.core.phase is Phase.RESTARTING
    assert drill.daemon != daemon and spares < set(drill.core.children)
    [note] = drill.of(Note)
    assert isinstance(note, Note) and "another one starts" in note.text and "no answer" in note.text


def test_a_silent_spare_is_killed_and_replaced() -> None:
    drill = Drill().serve()
    spare = drill.spares[1]
    assert beats_until_killed(drill, spare, STOPPED) == 1 + LOOKS
    drill.do(Exited(spare, -9))
    assert drill.spares[1] != spare


def test_one_that_waits_for_a_processor_or_for_its_pages_is_not_hung() -> None:
    drill = Drill().serve()
    assert not beats_until_killed(drill, drill.daemon, QUEUED)
    for number in range(40):
        beat(drill, lambda _, number=number: Vitals("D", 10, number))  # type: ignore[misc]
        assert not drill.of(Kill)
    for number in range(40):
        beat(drill, lambda _, number=number: Vitals("S", 10 + number, 0))  # type: ignore[misc]
        assert not drill.of(Kill)


def test_one_that_a_debugger_holds_is_left_alone() -> None:
    drill = Drill().serve()
    assert not beats_until_killed(drill, drill.daemon, TRACED)


def test_one_that_runs_and_never_answers_is_hung_by_the_processor_time_it_took() -> None:
    drill = Drill().serve()
    spin_s = drill.core.rules.spin_s
    for second in range(spin_s):
        beat(drill, lambda child, second=second: Vitals("R", (child == drill.daemon) * second * TICKS_A_SECOND, 0))  # type: ignore[misc]
        answer(drill, drill.daemon)
        assert not drill.of(Kill)
    beat(drill, lambda child: Vitals("R", (child == drill.daemon) * spin_s * TICKS_A_SECOND, 0))
    assert drill.of(Kill) == [Kill(drill.daemon)]


def test_an_answer_ends_the_count() -> None:
    drill = Drill().serve()
    for _ in range(5):
        for _ in range(LOOKS):
            beat(drill, lambda _: ASLEEP)
            assert not drill.of(Kill)
        answer(drill)


def test_a_supervisor_that_stood_still_itself_counts_anew() -> None:
    """What it did not see, it cannot hold against anybody: all of the sidecar may have been stopped with it."""
    drill = Drill().serve()
    for _ in range(10):
        for _ in range(LOOKS - 1):
            beat(drill, lambda _: ASLEEP)
            assert not drill.of(Kill)
        beat(drill, lambda _: ASLEEP, late_ns=3600 * S)
        assert not drill.of(Kill)


def test_a_crowded_supervisor_judges_nobody() -> None:
    drill = Drill().serve()
    for _ in range(50):
        beat(drill, lambda _: ASLEEP, late_ns=drill.core.rules.late_ns + 1)
        assert not drill.of(Kill)


@pytest.mark.parametrize(("seen", "looks"), [(ON_DISK, 30), (ASLEEP, 30), (STOPPED, LOOKS)])
def test_one_that_starts_is_given_more_time_unless_it_is_stopped(seen: Vitals, looks: int) -> None:
    """It may import from a slow disk; no disk stops it."""
    drill = Drill().serve()
    drill.do(Exited(drill.daemon, -9))
    assert beats_until_killed(drill, drill.daemon, seen) == 1 + looks


def test_a_serving_worker_is_never_asked_and_killed_only_if_it_is_stopped_for_long() -> None:
    """Inside one long call of its device it is sound, and answers nobody."""
    drill = Drill().serve()
    serving = drill.spares[0]
    drill.do(Taken(serving, "a"))
    for seen in (ASLEEP, ON_DISK, QUEUED, TRACED):
        assert not beats_until_killed(drill, serving, seen)
    assert not [action for action in drill.of(Tell) if isinstance(action, Tell) and action.child == serving]
    assert beats_until_killed(drill, serving, STOPPED) == drill.core.rules.looks_serving


def test_the_hung_one_is_killed_once_and_may_take_its_time_to_die() -> None:
    drill = Drill().serve()
    assert beats_until_killed(drill, drill.daemon, ON_DISK)
    for _ in range(50):
        beat(drill, lambda _: ON_DISK)
        answer(drill)
        assert not drill.of(Kill)


def test_nobody_is_asked_or_judged_once_all_ends() -> None:
    drill = Drill().serve()
    for _ in range(LOOKS):
        beat(drill, lambda _: ASLEEP)
    drill.do(Stop("on SIGTERM"))
    drill.do(Seen(drill.daemon, ASLEEP))
    assert not drill.of(Kill)
    assert drill.core.next_due_ns() == drill.now + drill.core.rules.drain_ns


def test_a_child_of_which_nothing_can_be_seen_is_judged_by_its_death_alone() -> None:
    drill = Drill().serve()
    for _ in range(40):
        beat(drill, lambda _: None)
        assert not drill.of(Kill)
    drill.do(Seen(999, ASLEEP))
    drill.do(Answered(999))


# ---- the pulse and the look ------------------------------------------------------------------------------


def test_a_pulse_that_was_not_asked_owes_nothing() -> None:
    pulse = Pulse()
    assert [pulse.see(ASLEEP, 1, 1) for _ in range(9)] == [""] * 9


@pytest.fixture
def sleeper() -> Iterator[int]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process.pid
        process.kill()


def test_a_look_tells_a_sleeper_from_a_stopped_one_and_from_nobody(sleeper: int) -> None:
    def state() -> str:
        seen = vitals.look(sleeper)
        assert seen is not None
        return seen.state

    for number, expected in ((signal.SIGSTOP, "T"), (signal.SIGCONT, "S")):
        os.kill(sleeper, number)
        end = time.monotonic() + 10
        while state() != expected:
            assert time.monotonic() < end
    assert vitals.look(2**22 + 1) is None


def test_a_look_counts_the_ticks_of_the_first_thread() -> None:
    before = vitals.look(os.getpid())
    assert before is not None
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    after = vitals.look(os.getpid())
    assert after is not None
    assert before.cpu_ticks < after.cpu_ticks


def test_what_cannot_be_read_is_nothing_seen(tmp_path: Path) -> None:
    place = tmp_path / "7" / "task" / "7"
    place.mkdir(parents=True)
    for text in ("", "7 (a) b) S", "7 (x) S " + "x " * 30):
        (place / "stat").write_text(text)
        assert vitals.look(7, tmp_path) is None
    (place / "stat").write_text("7 (odd) name) D 1 2 3 4 5 6 7 8 91 10 20 30 0 0")
    assert vitals.look(7, tmp_path) == Vitals("D", 50, 91)
