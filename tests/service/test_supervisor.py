"""The supervisor's table, walked: who is started, told, killed and given up."""

import itertools
from collections.abc import Callable

from kvferry.supervise.api import (
    Action,
    AtRest,
    Begin,
    Event,
    Exited,
    Failed,
    Finish,
    Kill,
    KillWanted,
    Note,
    Ready,
    SpawnDaemon,
    Spawned,
    SpawnWorker,
    Stop,
    Taken,
    Tell,
    TellReady,
    Terminate,
    TimePassed,
)
from kvferry.supervise.core import Supervisor
from kvferry.supervise.state import Phase, Rules

S = 1_000_000_000


class Drill:
    """A supervisor with its children as names, and a clock that is moved by hand."""

    def __init__(self, tp_size: int = 2, restarts: int = 5) -> None:
        numbers = itertools.count(1)
        self.core = Supervisor(Rules(tp_size=tp_size, restarts=restarts), new_id=lambda: next(numbers))
        self.now = 100 * S
        self.daemon = 0
        self.spares: dict[int, int] = {}
        self.last: list[Action] = []

    def do(self, event: Event) -> list[Action]:
        """One event; spawns are answered with a pid, as the shell does."""
        self.last = self.core.step(event, self.now)
        for action in list(self.last):
            if isinstance(action, SpawnDaemon):
                self.daemon = action.child
            elif isinstance(action, SpawnWorker):
                self.spares[action.rank] = action.child
            if isinstance(action, SpawnDaemon | SpawnWorker):
                self.last += self.core.step(Spawned(action.child, 1000 + action.child), self.now)
        return self.last

    def serve(self) -> "Drill":
        """Up to the ready line."""
        self.do(Begin())
        self.do(Ready(self.daemon))
        for child in self.spares.values():
            self.do(Ready(child))
        assert self.core.phase is Phase.SERVING
        return self

    def of(self, kind: type[Action]) -> list[Action]:
        return [action for action in self.last if isinstance(action, kind)]

    def told(self, what: str) -> list[dict[str, object]]:
        return [a.message for a in self.last if isinstance(a, Tell) and a.message["event"] == what]

    def end_all(self) -> None:
        for child in list(self.core.children):
            self.do(Exited(child, 0))


def test_the_daemon_is_started_first_and_hears_of_nobody_then_one_spare_a_rank() -> None:
    core = Supervisor(Rules(tp_size=3), new_id=itertools.count(1).__next__)
    daemon, *spares = core.step(Begin(), S)
    assert isinstance(daemon, SpawnDaemon)
    assert [a.rank for a in spares if isinstance(a, SpawnWorker)] == [0, 1, 2]
    [told] = core.step(Spawned(daemon.child, 1000), S)
    assert isinstance(told, Tell) and told.message["workers"] == []


def test_ready_is_said_once_when_the_last_spare_is_ready() -> None:
    drill = Drill()
    drill.do(Begin())
    drill.do(Ready(drill.daemon))
    drill.do(Ready(drill.spares[0]))
    assert not drill.of(TellReady)
    drill.do(Ready(drill.spares[1]))
    assert drill.of(TellReady) == [TellReady(again=False)]
    drill.do(Ready(drill.spares[1]))
    assert not drill.last


def test_a_taken_spare_is_replaced_at_once_and_the_daemon_hears_who_serves() -> None:
    drill = Drill().serve()
    taken = drill.spares[0]
    drill.do(Taken(taken, "engine-a", lent_bytes=4096))
    assert [a.rank for a in drill.of(SpawnWorker)] == [0]
    listed = drill.told("workers")[-1]
    states = {w["worker"]: (w["state"], w["engine"]) for w in listed["workers"]}
    assert states[taken] == ("taken", "engine-a")
    lent = {w["worker"]: w["lent_bytes"] for w in listed["workers"]}
    assert [worker for worker, nbytes in lent.items() if nbytes] == [taken]
    assert states[drill.spares[0]][0] == "starting"


def test_a_worker_whose_rank_left_is_reaped_and_told_and_nothing_else_happens() -> None:
    drill = Drill().serve()
    taken = drill.spares[1]
    drill.do(Taken(taken, "a"))
    drill.do(Ready(drill.spares[1]))
    drill.do(Exited(taken, 0))
    assert drill.told("reaped") == [{"event": "reaped", "worker": taken}]
    assert not drill.of(SpawnWorker)
    assert not drill.of(Note)
    assert drill.core.phase is Phase.SERVING


def test_a_taken_workers_death_is_told_after_the_reap_and_never_gives_up() -> None:
    """One engine whose ranks kill workers for ever must not end the sidecar of its neighbours."""
    drill = Drill().serve()
    for _ in range(50):
        taken = drill.spares[0]
        drill.do(Taken(taken, "bad"))
        drill.now += 2 * S
        drill.do(TimePassed())
        drill.do(Ready(drill.spares[0]))
        drill.do(Exited(taken, -9))
        assert drill.told("reaped")
        assert drill.core.phase is Phase.SERVING
    assert drill.core.workers_died == 50


def test_a_hard_death_delays_nobody_the_rank_has_its_spare_and_that_ones_successor_starts_when_it_is_taken() -> None:
    drill = Drill(tp_size=1).serve()
    first = drill.spares[0]
    drill.do(Taken(first, "a"))
    second = drill.spares[0]
    drill.do(Ready(second))
    drill.do(Exited(first, -11))
    assert not drill.of(SpawnWorker)
    drill.do(Taken(second, "a"))
    assert [a.rank for a in drill.of(SpawnWorker)] == [0]


def test_a_dead_spare_is_replaced() -> None:
    drill = Drill().serve()
    drill.do(Exited(drill.spares[0], -9))
    assert [a.rank for a in drill.of(SpawnWorker)] == [0]
    assert drill.told("reaped")


def test_a_child_that_dies_before_the_first_ready_ends_the_start_with_its_name() -> None:
    for tp_size, victim in ((1, "daemon"), (1, "rank 0")):
        drill = Drill(tp_size)
        drill.do(Begin())
        drill.do(Exited(drill.daemon if victim == "daemon" else drill.spares[0], 1))
        drill.end_all()
        [finish] = drill.of(Finish)
        assert isinstance(finish, Finish)
        assert finish.code == 1
        assert finish.text.startswith(victim)
        assert "exited with code 1 before kvferry was ready" in finish.text


def test_a_spare_that_was_taken_and_has_ended_when_both_are_read_is_no_spare_that_failed() -> None:
    """As after a stop of the supervisor itself: the words come in one breath, the last of them before the reap."""
    drill = Drill().serve()
    worker = drill.spares[0]
    drill.do(Taken(worker, "a"))
    next_one = drill.spares[0]
    assert next_one != worker
    drill.do(Exited(worker, 0))
    assert not drill.of(Note)
    assert drill.spares[0] == next_one, "one is on its way already"
    [listed] = drill.told("workers")
    assert listed["no_spare"] == [] and listed["spares_failed"] == 0


def test_a_dead_daemon_is_replaced_at_once_and_nobody_else_ends() -> None:
    """Case 45."""
    drill = Drill().serve()
    taken = drill.spares[0]
    drill.do(Taken(taken, "a"))
    drill.do(Ready(drill.spares[0]))
    dead = drill.daemon
    drill.do(Exited(dead, -9))
    assert drill.daemon != dead
    assert not drill.told("stop")
    assert not drill.of(Kill)
    assert drill.core.phase is Phase.RESTARTING
    drill.do(Ready(drill.daemon))
    assert drill.of(TellReady) == [TellReady(again=True)]
    assert drill.core.phase is Phase.SERVING
    assert drill.core.restarts == 1


def test_the_first_that_a_new_daemon_hears_is_who_lives() -> None:
    drill = Drill().serve()
    living = {*drill.spares.values()}
    drill.do(Taken(drill.spares[0], "a"))
    living.add(drill.spares[0])
    drill.core.step(Exited(drill.daemon, -9), drill.now)
    [new] = [child for child in drill.core.children.values() if child.rank < 0]
    first = drill.core.step(Spawned(new.id, 4000), drill.now)[0]
    assert isinstance(first, Tell)
    assert first.child == new.id
    assert first.message["event"] == "workers"
    assert {worker["worker"] for worker in first.message["workers"]} == living


def test_a_worker_that_dies_while_the_daemon_is_away_is_told_to_the_next_one_as_reaped() -> None:
    drill = Drill().serve()
    taken = drill.spares[0]
    drill.do(Taken(taken, "a"))
    drill.do(Exited(drill.daemon, -9))
    drill.do(Exited(taken, -11))
    assert [a for a in drill.of(Tell) if isinstance(a, Tell) and a.child == drill.daemon]
    assert drill.told("reaped") == [{"event": "reaped", "worker": taken}]


def restart(drill: Drill) -> None:
    drill.do(Exited(drill.daemon, -9))
    drill.do(Ready(drill.daemon))


def test_five_deaths_of_the_daemon_within_thirty_seconds_are_survived_and_the_sixth_gives_up_in_one_line() -> None:
    drill = Drill().serve()
    for _ in range(5):
        drill.now += S
        restart(drill)
        assert drill.core.phase is Phase.SERVING
    drill.now += S
    drill.do(Exited(drill.daemon, -9))
    drill.end_all()
    [finish] = drill.of(Finish)
    assert finish == Finish(1, "giving up: the daemon died 6 times within 30 s, the last time it ended by signal 9")


def test_deaths_that_are_far_apart_are_survived_for_ever() -> None:
    drill = Drill().serve()
    for _ in range(40):
        drill.now += 7 * S
        restart(drill)
        assert drill.core.phase is Phase.SERVING


def fail(
    drill: Drill, why: str = "device.open: no memory is left on the GPU\n  fix: less", code: int = 2
) -> list[Action]:
    """Rank 0's worker that starts says why it cannot, and exits."""
    drill.do(Failed(drill.spares[0], why))
    return drill.do(Exited(drill.spares[0], code))


def test_a_spare_that_never_starts_is_tried_again_for_ever_and_whoever_is_served_notices_nothing() -> None:
    """An engine has taken the GPU's memory: the pause doubles to half a minute, and nothing else happens."""
    drill = Drill(tp_size=1).serve()
    serving = drill.spares[0]
    drill.do(Taken(serving, "a"))
    pauses = []
    for _ in range(50):
        assert not [a for a in fail(drill) if isinstance(a, SpawnWorker | Kill | Terminate)]
        assert not drill.told("stop") and drill.core.phase is Phase.SERVING
        failed_at = drill.now
        while not drill.of(SpawnWorker):
            due = drill.core.next_due_ns()
            assert due is not None and due > drill.now
            drill.now = due
            drill.do(TimePassed())
        pauses.append((drill.now - failed_at) // S)
    assert pauses[:7] == [1, 2, 4, 8, 16, 30, 30] and set(pauses[6:]) == {30}
    assert serving in drill.core.children


def test_a_rank_without_a_spare_is_said_once_with_its_reason_and_once_more_when_it_has_one() -> None:
    drill = Drill(tp_size=1).serve()
    drill.do(Taken(drill.spares[0], "a"))
    notes: list[str] = []
    for tries in range(1, 4):
        notes += [a.text for a in fail(drill) if isinstance(a, Note)]
        shown = drill.told("workers")[-1]
        why = "exited with code 2 (device.open: no memory is left on the GPU)"
        assert shown["no_spare"] == [{"rank": 0, "tries": tries, "why": why}]
        assert shown["spares_failed"] == tries
        drill.now += 40 * S
        drill.do(TimePassed())
        assert drill.of(SpawnWorker) == [SpawnWorker(drill.spares[0], 0, is_retry=True)]
    assert len(notes) == 1
    assert notes[0].startswith("rank 0 has no spare: ") and "(device.open: no memory" in notes[0]
    [again] = [a.text for a in fail(drill, "device.pin: refused") if isinstance(a, Note)]
    assert "device.pin" in again, "another reason is news"
    drill.now += 40 * S
    drill.do(TimePassed())
    drill.do(Ready(drill.spares[0]))
    assert [a.text for a in drill.last if isinstance(a, Note)] == ["rank 0 has a spare again, after 4 that failed"]
    assert drill.told("workers")[-1]["no_spare"] == []


def test_the_end_of_the_ranks_worker_makes_the_next_try_come_soon() -> None:
    """With its engine goes what kept the spare out."""
    drill = Drill(tp_size=1).serve()
    serving = drill.spares[0]
    drill.do(Taken(serving, "a"))
    for _ in range(8):
        fail(drill)
        drill.now += 30 * S
        drill.do(TimePassed())
    fail(drill)
    drill.do(Exited(serving, 0))
    assert not drill.of(SpawnWorker)
    drill.now += S
    drill.do(TimePassed())
    assert drill.of(SpawnWorker)
    drill.do(Ready(drill.spares[0]))
    drill.do(Taken(drill.spares[0], "b"))
    assert drill.told("workers")[-1]["no_spare"] == []


def test_a_spare_that_cannot_be_ready_holds_up_no_daemon_and_no_other_rank() -> None:
    drill = Drill(tp_size=2).serve()
    drill.do(Exited(drill.spares[0], -9))
    fail(drill)
    drill.do(Exited(drill.daemon, -9))
    drill.do(Ready(drill.daemon))
    assert drill.of(TellReady) == [TellReady(again=True)]
    assert drill.core.phase is Phase.SERVING
    drill.do(Taken(drill.spares[1], "a"))
    assert [a.rank for a in drill.of(SpawnWorker)] == [1]


def test_spares_that_are_ready_and_die_each_time_wait_longer_each_time() -> None:
    drill = Drill(tp_size=1).serve()
    started: list[int] = []
    for _ in range(6):
        drill.do(Exited(drill.spares[0], -9))
        while not drill.of(SpawnWorker):
            drill.now = drill.core.next_due_ns() or 0
            drill.do(TimePassed())
        started.append(drill.now // S)
        drill.do(Ready(drill.spares[0]))
    assert [b - a for a, b in itertools.pairwise(started)] == [1, 2, 4, 8, 16]
    drill.now += 40 * S
    drill.do(Exited(drill.spares[0], -9))
    assert drill.of(SpawnWorker), "one that stood for long is replaced at once"


def test_stop_tells_all_then_terminates_then_kills_then_leaves() -> None:
    drill = Drill(tp_size=1).serve()
    children = set(drill.core.children)
    drill.do(Stop("on SIGTERM"))
    drill.do(AtRest(drill.daemon))
    assert {a.child for a in drill.last if isinstance(a, Tell)} == children
    seen: list[type[Action]] = []
    while drill.core.phase is not Phase.OVER:
        due = drill.core.next_due_ns()
        assert due is not None
        assert due > drill.now
        drill.now = due
        drill.do(TimePassed())
        seen.append(type(drill.last[0]))
    assert seen == [Terminate, Kill, Finish]
    assert drill.now <= 110 * S
    [finish] = drill.of(Finish)
    assert isinstance(finish, Finish)
    assert all(str(1000 + child) in finish.text for child in children)


def test_stop_is_over_as_soon_as_all_are_reaped() -> None:
    drill = Drill().serve()
    drill.do(Stop("on SIGINT", keep=False))
    drill.do(AtRest(drill.daemon))
    drill.do(Stop("on SIGINT", keep=False))
    assert not drill.last
    drill.end_all()
    assert drill.last == [Finish(0, "on SIGINT", keep=False)]
    assert drill.do(Begin()) == []


def test_a_stop_lets_the_daemon_come_to_rest_first() -> None:
    drill = Drill().serve()
    drill.do(Stop("on SIGTERM"))
    assert drill.last == [Tell(drill.daemon, {"event": "drain", "budget_ms": 2000})]
    drill.do(AtRest(777))
    assert not drill.last
    drill.do(Exited(drill.spares[0], -9))
    assert not drill.of(SpawnWorker)
    assert drill.told("reaped"), "the daemon may wait for exactly this"
    drill.do(AtRest(drill.daemon))
    assert len(drill.told("stop")) == 2
    drill.end_all()
    assert drill.last == [Finish(0, "on SIGTERM", keep=True)]


def test_a_drain_ends_by_its_bound_by_a_second_stop_or_with_the_daemon() -> None:
    for end in (TimePassed(), Stop("on SIGTERM"), None):
        drill = Drill().serve()
        drill.do(Stop("on SIGTERM"))
        due = drill.core.next_due_ns()
        assert due == drill.now + 3 * S
        drill.now = due - 1
        drill.do(TimePassed())
        assert not drill.last
        drill.now = due
        drill.do(end or Exited(drill.daemon, -9))
        assert len(drill.told("stop")) == (3 if end else 2)
        assert drill.core.phase is Phase.STOPPING


def test_what_is_given_up_keeps_the_pool_for_whoever_starts_it_again() -> None:
    drill = Drill(tp_size=1)
    drill.do(Begin())
    drill.do(Exited(drill.daemon, 1))
    drill.end_all()
    [finish] = drill.of(Finish)
    assert isinstance(finish, Finish)
    assert finish.keep


def test_stop_while_starting_or_restarting_ends_all_the_same() -> None:
    steps: list[Callable[[Drill], object]] = [
        lambda d: d.do(Begin()),
        lambda d: (d.do(Begin()), d.do(Ready(d.daemon))),
        lambda d: (d.serve(), d.do(Exited(d.daemon, -9))),
    ]
    for bring in steps:
        drill = Drill()
        bring(drill)
        drill.do(Stop("on SIGTERM"))
        assert not drill.of(SpawnWorker)
        drill.end_all()
        assert drill.core.phase is Phase.OVER
        assert not drill.core.children


def test_stop_with_nobody_started_is_over_at_once() -> None:
    assert Drill().do(Stop("on SIGINT")) == [Finish(0, "on SIGINT")]


def test_the_daemons_wish_to_kill_is_carried_out_once_and_answered_by_the_reap() -> None:
    drill = Drill().serve()
    worker = drill.spares[0]
    drill.do(Taken(worker, "a"))
    drill.do(KillWanted(worker, "owes a word since 5 s"))
    assert drill.of(Kill) == [Kill(worker)]
    drill.do(KillWanted(worker, "again"))
    assert not drill.last
    drill.do(Exited(worker, -9))
    assert drill.told("reaped") == [{"event": "reaped", "worker": worker}]
    [note] = drill.of(Note)
    assert isinstance(note, Note)
    assert "owes a word" in note.text


def test_a_wish_to_kill_one_already_reaped_is_answered_at_once() -> None:
    drill = Drill().serve()
    drill.do(KillWanted(777, "late"))
    assert not drill.of(Kill)
    assert drill.told("reaped") == [{"event": "reaped", "worker": 777}]


def test_the_daemon_itself_is_never_killed_on_its_own_wish() -> None:
    drill = Drill().serve()
    drill.do(KillWanted(drill.daemon, "odd"))
    assert not drill.of(Kill)


def test_words_of_unknown_children_change_nothing() -> None:
    drill = Drill().serve()
    before = dict(drill.core.children)
    for event in (Ready(99), Taken(99, "x"), Exited(99, 0)):
        assert drill.do(event) == []
    assert drill.core.children == before


def test_a_stop_does_not_wait_for_a_spare_that_is_still_starting() -> None:
    """It reads its channel only when everything is imported: seconds, on a busy machine, for nothing."""
    drill = Drill().serve()
    ready = set(drill.spares.values())
    drill.do(Taken(drill.spares[0], "an engine"))
    [starting] = set(drill.spares.values()) - ready
    drill.do(Stop("on SIGTERM"))
    drill.do(AtRest(drill.daemon))
    assert [action.child for action in drill.of(Terminate) if isinstance(action, Terminate)] == [starting]
    assert len(drill.told("stop")) == len(drill.core.children)
