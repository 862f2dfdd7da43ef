"""The drill's own judgement, without an engine: what it calls wrong, a leak, a failure."""

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .census import Growth, Sample, growth, of_files, of_processes
from .drill import _Tail, lateness
from .faults import KINDS, Bag, Kind
from .report import Fault, Findings, Wait, as_json, passes, table, verdict
from .talks import Answer, difference, make_talks


def test_a_talk_is_the_same_each_time_and_its_prompts_hold_what_was_said() -> None:
    [talk], [again] = (make_talks(1, 3, (4, 2), 1) for _ in range(2))
    assert talk == again
    first, second = talk.turns
    assert talk.prompt(1, [Answer((7,), (0.0,))]) == [*first, 7, *second]
    assert make_talks(1, 4, (4, 2), 1) != [talk]


@pytest.mark.parametrize(
    ("mine", "said"),
    [
        (Answer((1, 2), (-0.1, -0.2)), ""),
        (Answer((1, 2), (-0.1, -0.20005)), ""),
        (Answer((1, 2), (-0.1, -0.3)), "a log probability is off by 0.1"),
        (Answer((1, 3), (-0.1, -0.2)), "token 1 of 2 differs"),
        (Answer((1,), (-0.1,)), "token 1 of 2 differs"),
    ],
)
def test_an_answer_is_wrong_by_a_token_or_by_more_than_noise(mine: Answer, said: str) -> None:
    assert difference(mine, Answer((1, 2), (-0.1, -0.2))) == said


def test_growth_is_seen_within_one_life_and_a_peak_is_none() -> None:
    leaky = [Sample("daemon 1", {"fds": 20.0 + n}) for n in range(9)]
    steady = [Sample("daemon 2", {"fds": 90.0 if n == 4 else 40.0}) for n in range(9)]
    short = [Sample("daemon 3", {"fds": 100.0 * n}) for n in range(3)]
    found = {one.subject: one.is_leak for one in growth([*leaky, *steady, *short])}
    assert found == {"daemon 1": True, "daemon 2": False}


def test_the_census_counts_what_a_process_holds(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        seen = of_processes("child", [child.pid])
        assert seen is not None
        assert seen.values["threads"] >= 1 and seen.values["fds"] >= 1
        child.send_signal(signal.SIGKILL)
    assert of_processes("child", [child.pid]) is None
    assert of_processes("nobody", []) is None
    (tmp_path / "one").write_bytes(bytes(1 << 20))
    assert of_files("files", tmp_path.iterdir()).values == {"files": 1, "file_mib": 1.0}


def test_every_kind_of_fault_comes_before_any_comes_more_often_than_its_weight() -> None:
    kinds = tuple(Kind(kind.name, kind.weight, kind.inflict) for kind in KINDS)
    bag = Bag(kinds, random.Random(1))
    drawn = [bag.draw(float(n)).name for n in range(sum(kind.weight for kind in kinds))]
    assert {name: drawn.count(name) for name in set(drawn)} == {kind.name: kind.weight for kind in kinds if kind.weight}


def test_the_supervisors_ceiling_is_never_reached() -> None:
    bag, deaths = Bag(KINDS, random.Random(2)), []
    for second in range(300):
        deaths += [second] * bag.draw(float(second)).deaths
        assert sum(second - moment <= 30 for moment in deaths) <= 5


def test_a_trace_is_read_line_by_line_as_it_grows(tmp_path: Path) -> None:
    tail = _Tail(tmp_path / "trace")
    assert tail.lines() == []
    with tail.path.open("w", buffering=1) as file:
        file.write('{"a": 1}\n{"a"')
        file.flush()
        assert tail.lines() == [{"a": 1}]
        file.write(": 2}\n")
        assert tail.lines() == [{"a": 2}]


def fine() -> Findings:
    fault = Fault("all SIGKILL, up", True, 1.0, 2.0, 0.5, True, 3.0)
    return Findings(seconds=60, asked=10, answered=10, loads=3, loaded_blocks=9, faults=[fault])


def test_a_good_run_passes_with_all_goals_met_and_says_so() -> None:
    lines = verdict(fine())
    assert passes(lines)
    assert all(line.ok for line in lines)
    assert "goal not met" not in table(fine())
    assert as_json(fine())["passes"] is True


def test_musts_fail_the_run_and_goals_do_not() -> None:
    for spoil in ("failed", "wrong"):
        found = fine()
        getattr(found, spoil).append("request 7")
        assert not passes(verdict(found))
        assert f"{spoil}: request 7" in table(found)
    idle = fine()
    idle.answered = 0
    assert not passes(verdict(idle))
    slow = fine()
    slow.waits.append(Wait(7.5, "1.0-3, token 0", "daemon SIGSTOP"))
    slow.faults.append(Fault("daemon SIGKILL", True, 5.0, 6.0, None, True, 26.0))
    slow.starved.append("killing rank 0 worker 7")
    slow.growth.append(Growth("engine 1 VLLM::Worker", "private_mib", 9, 500, 600))
    assert passes(verdict(slow))
    not_met = {line.name for line in verdict(slow) if not line.ok}
    assert not_met == {
        "longest wait of a request",
        "cache used again after a return",
        "workers killed for want of a processor",
        "growth of the engine's memory",
    }
    assert table(slow).count("goal not met") == 4
    assert not passes(verdict(slow), strict=True)
    assert passes(verdict(fine()), strict=True)


def test_what_stays_behind_or_grows_or_is_complained_of_fails_the_run() -> None:
    spoilt = [fine() for _ in range(6)]
    spoilt[0].left.append("process 12")
    spoilt[1].at_rest["fences"] = 1
    spoilt[2].complaints.append("exit code 1 after SIGTERM")
    spoilt[3].growth.append(Growth("daemon 7", "private_mib", 9, 50, 100))
    spoilt[4].growth.append(Growth("engine 1 VLLM::Worker", "fds", 9, 50, 100))
    spoilt[5].growth.append(Growth("the sidecar's files", "files", 9, 2, 3))
    for found in spoilt:
        assert not passes(verdict(found))
        assert "FAILED" in table(found)


def test_how_late_a_sleeper_woke_up_is_asked_of_the_time_in_question() -> None:
    late = [(1.0, 0.1), (2.0, 0.9), (3.0, 0.2)]
    assert lateness(late, 0, 9) == 0.9
    assert lateness(late, 2.5, 9) == 0.2
    assert lateness(late, 0, 1.0) == 0.1
    assert lateness(late, 0, 1.2) == 0.9, "it slept through that moment"
    assert lateness([], 0, 9) == 0
