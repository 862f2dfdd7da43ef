"""One daemon after the other: those that hang soon after each start, and those that cannot be started at all."""

import pytest

from kvferry.supervise.api import (
    Action,
    Answered,
    Exited,
    Failed,
    Finish,
    Note,
    Ready,
    SpawnDaemon,
    SpawnWorker,
    Stop,
    Taken,
    TellReady,
    TimePassed,
)
from kvferry.supervise.state import Phase
from tests.service.test_pulse import ASLEEP, STOPPED, answer, beat, beats_until_killed
from tests.service.test_supervisor import Drill

S = 1_000_000_000
WHY = "cannot be started: [Errno 11] Resource temporarily unavailable"


class Poor(Drill):
    """A machine that has no process for a daemon while `poor`, as the shell tells it."""

    poor = False

    def do(self, event: object) -> list[Action]:
        done = super().do(event)  # type: ignore[arg-type]
        for action in list(done):
            if self.poor and isinstance(action, SpawnDaemon):
                self.core.children[action.child].pid = 0
                done += self.core.step(Failed(action.child, WHY), self.now)
                done += self.core.step(Exited(action.child, 71), self.now)
        self.last = done
        return done


def until_a_daemon_starts(drill: Drill) -> int:
    """Let time pass; how many nanoseconds it was. Each due time must lie ahead, or the shell would turn in circles."""
    began = drill.now
    while not drill.of(SpawnDaemon):
        due = drill.core.next_due_ns()
        assert due is not None and due > drill.now
        drill.now = due
        drill.do(TimePassed())
        last = drill.last
        answer(drill, drill.daemon)
        drill.last = last
    return drill.now - began


def texts(drill: Drill) -> list[str]:
    return [action.text for action in drill.last if isinstance(action, Note)]


def test_a_daemon_that_cannot_be_started_is_tried_again_with_a_growing_pause_and_never_gives_up() -> None:
    drill = Poor().serve()
    drill.poor = True
    drill.do(Exited(drill.daemon, -9))
    pauses = []
    for _ in range(40):
        assert drill.core.phase is Phase.RESTARTING
        drill.last = []
        pauses.append(until_a_daemon_starts(drill) // S)
    assert pauses[:7] == [1, 2, 4, 8, 16, 30, 30] and set(pauses[6:]) == {30}
    assert drill.core.restarts == 1, "one has died; the others never lived"
    drill.poor, drill.last = False, []
    until_a_daemon_starts(drill)
    drill.do(Ready(drill.daemon))
    drill.do(Answered(drill.daemon))
    assert drill.core.phase is Phase.SERVING and not drill.core.trouble


def test_its_reason_is_said_once_and_to_whoever_asks_meanwhile() -> None:
    drill = Poor().serve()
    drill.poor = True
    drill.do(Exited(drill.daemon, -9))
    stay = "the workers and what the pool holds stay"
    died = f"daemon ended by signal 9; another one starts, {stay}"
    assert texts(drill) == [died, f"the daemon {WHY}; tried again, at last every 30 s; {stay}"]
    assert drill.core.trouble == f"the daemon {WHY}"
    for tries in (2, 3):
        drill.last = []
        until_a_daemon_starts(drill)
        assert texts(drill) == []
        assert drill.core.trouble == f"the daemon {WHY}, {tries} in a row"


def test_spares_are_replaced_and_taken_while_no_daemon_can_be_had() -> None:
    drill = Poor().serve()
    drill.poor = True
    drill.do(Exited(drill.daemon, -9))
    drill.do(Exited(drill.spares[0], -9))
    assert [a.rank for a in drill.of(SpawnWorker) if isinstance(a, SpawnWorker)] == [0]
    drill.do(Taken(drill.spares[1], "a"))
    assert [a.rank for a in drill.of(SpawnWorker) if isinstance(a, SpawnWorker)] == [1]
    drill.do(Exited(drill.spares[0], 2))
    for _ in range(3):
        drill.last = []
        until_a_daemon_starts(drill)


def test_a_stop_while_no_daemon_can_be_had_ends_all_at_once_and_keeps_the_pool() -> None:
    drill = Poor().serve()
    drill.poor = True
    drill.do(Exited(drill.daemon, -9))
    drill.do(Stop("on SIGTERM"))
    assert drill.core.phase is Phase.STOPPING
    drill.end_all()
    assert drill.last == [Finish(0, "on SIGTERM", keep=True)]


def hang(drill: Drill) -> None:
    """The daemon is taken for hung, killed and reaped."""
    assert beats_until_killed(drill, drill.daemon, STOPPED)
    drill.do(Exited(drill.daemon, -9))


def test_a_daemon_that_hangs_right_after_each_start_is_replaced_more_and_more_slowly_and_for_ever() -> None:
    drill = Drill().serve()
    pauses = []
    for _ in range(20):
        hang(drill)
        assert drill.core.phase is Phase.RESTARTING
        pauses.append(until_a_daemon_starts(drill) // S)
        drill.do(Ready(drill.daemon))
        assert not drill.of(TellReady), "the one before it was ready too"
    assert pauses[:8] == [0, 1, 2, 4, 8, 16, 30, 30] and set(pauses[8:]) == {30}
    assert drill.core.restarts == 20


def test_how_often_it_has_hung_is_said_with_each_and_to_whoever_asks() -> None:
    drill = Drill().serve()
    how = "ended by signal 9 (no answer for 5 s, and it does nothing (state T))"
    hang(drill)
    assert texts(drill) == [f"daemon {how}; another one starts, the workers and what the pool holds stay"]
    drill.do(Ready(drill.daemon))
    assert drill.core.trouble == f"the daemon {how}"
    hang(drill)
    assert texts(drill) == [
        f"the daemon {how}, 2 in a row; the next one starts in 1 s, the workers and what the pool holds stay"
    ]
    until_a_daemon_starts(drill)
    drill.do(Ready(drill.daemon))
    assert drill.core.trouble == f"the daemon {how}, 2 in a row"
    drill.do(Answered(drill.daemon))
    assert drill.of(TellReady) == [TellReady(again=True)]
    assert drill.core.trouble == "" and drill.core.phase is Phase.SERVING


@pytest.mark.parametrize(("stood_s", "pause_s"), [(3, 1), (31, 0)])
def test_one_that_answered_and_hangs_again_soon_has_its_pause_and_one_that_stood_for_long_is_replaced_at_once(
    stood_s: int, pause_s: int
) -> None:
    drill = Drill().serve()
    hang(drill)
    drill.do(Ready(drill.daemon))
    drill.do(Answered(drill.daemon))
    for _ in range(stood_s - 6 if stood_s > 6 else 0):
        beat(drill, lambda _: ASLEEP)
        answer(drill)
    hang(drill)
    assert until_a_daemon_starts(drill) == pause_s * S


def test_one_that_hangs_before_it_is_ready_has_its_pause_too() -> None:
    drill = Drill().serve()
    drill.do(Exited(drill.daemon, -9))
    hang(drill)
    assert until_a_daemon_starts(drill) == S


def test_one_that_dies_by_itself_is_replaced_at_once_whatever_was_before_it() -> None:
    drill = Drill().serve()
    for _ in range(2):
        hang(drill)
        until_a_daemon_starts(drill)
        drill.do(Ready(drill.daemon))
    drill.do(Exited(drill.daemon, -11))
    assert drill.of(SpawnDaemon)


def test_those_that_hang_within_the_window_count_like_those_that_die() -> None:
    drill = Drill(tp_size=1, restarts=1).serve()
    hang(drill)
    drill.do(Ready(drill.daemon))
    hang(drill)
    assert drill.core.phase is Phase.STOPPING
