"""The table that `kvferry status` prints."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.cli import status
from kvferry.cli.main import main
from kvferry.cli.status import amiss, found, table
from kvferry.net.paths import RunDir
from kvferry.supervise.rundir import SERVING, Lock


def test_plain_values_come_first_then_one_block_for_each_map_and_list() -> None:
    lines = table(
        {
            "slots": {"total": 1638, "free": 0},
            "state": "serving",
            "pid": 12345,
            "engines": [
                {"engine_id": "e", "registered": True, "namespace": "a" * 64, "ranks": [{"rank": 0, "state": "lost"}]}
            ],
            "counters": {},
            "namespaces": [],
        }
    )
    assert lines == [
        "state  serving",
        "pid    12345",
        "",
        "slots",
        "  total  1,638",
        "  free   0",
        "",
        "engines",
        "  engine_id  registered  namespace     ranks",
        "  e          yes         aaaaaaaaaaaa  rank=0 state=lost",
        "",
        "counters: none",
        "",
        "namespaces: none",
    ]


def test_the_share_of_keys_that_were_found_is_told_and_of_none_there_is_no_share() -> None:
    assert found({}) == "nothing was asked for yet"
    assert found({"lookup_keys": 1_200, "lookup_keys_hit": 1_000}) == "83.3% of 1,200 keys asked for"
    assert found({"lookup_keys": 1}) == "0.0% of 1 key asked for"


def test_what_is_amiss_has_a_line_each_and_nothing_has_none() -> None:
    """Case 53: the state of each rank, for an alarm."""
    engine = {"engine_id": "e", "registered": True, "attached": 1, "world_size": 1}
    well = {
        "no_spare": [],
        "restarting": False,
        "draining": False,
        "refused": [],
        "engines": [{**engine, "ranks": [{"rank": 0, "state": "attached"}]}],
    }
    assert amiss(well) == []
    ill = {
        "no_spare": [{"rank": 1, "tries": 3, "why": "exited with code 2 (device.open: no room)"}],
        "restarting": True,
        "draining": True,
        "refused": [{"engine_id": "f", "half": "rank 0", "code": "layout.slot_bytes", "text": "too large", "ago_s": 4}],
        "engines": [
            {**engine, "world_size": 2, "ranks": [{"rank": 0, "state": "lost"}, {"rank": 1, "state": "attached"}]},
            {**engine, "engine_id": "f", "attached": 0, "ranks": []},
            {**engine, "engine_id": "gone", "registered": False, "attached": 0, "ranks": []},
        ],
    }
    assert amiss(ill) == [
        "rank 1 has no spare: exited with code 2 (device.open: no room)",
        "engine 'e': 1 of 2 ranks attached, it runs without a cache",
        "engine 'e': rank 0 is lost",
        "engine 'f': 0 of 1 ranks attached, it runs without a cache",
        "engine 'f': its rank 0 is refused: layout.slot_bytes: too large",
        "draining: takes nothing new until `kvferry drain --resume`",
        "a new daemon waits for workers of the old one",
    ]


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[Lock]:
    """An `up` that holds its lock; no daemon answers."""
    held = Lock(RunDir.at(tmp_path))
    yield held
    held.release()


def asked(tmp_path: Path, *flags: str) -> int:
    return main(["status", *flags, "--run-dir", str(tmp_path)])


@pytest.mark.parametrize("flags", [["--json"], ["--json", "--check"]])
@pytest.mark.parametrize("doing", [SERVING, "starting again: the daemon cannot be started: no room, 3 in a row"])
def test_a_program_is_told_in_json_what_a_person_is_told_in_words_with_the_same_exit_code(
    flags: list[str], doing: str, lock: Lock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock.say(doing)
    code = asked(tmp_path)
    words = capsys.readouterr()
    assert words.out == ""
    assert asked(tmp_path, *flags) == code == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["text"] == words.err.rstrip("\n")
    assert answer["state"] == ("daemon.lost" if doing == SERVING else doing)
    assert answer["kept"] is None


def test_where_none_runs_and_where_a_flag_cannot_be_json_is_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked(tmp_path, "--json") == 1
    assert json.loads(capsys.readouterr().out)["state"] == "absent"
    assert main(["status", "--json", "--run-dir", ""]) == 2
    said = capsys.readouterr()
    assert json.loads(said.out)["state"] == "settings.run_dir" and said.err == ""


@pytest.mark.parametrize("lacking", [[], [{"rank": 1, "tries": 3, "why": "exited with code 2"}]])
def test_a_check_is_json_too_if_it_is_asked_for_so(
    lacking: list[object],
    lock: Lock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lock.say(SERVING)
    answer = {"no_spare": lacking, "engines": [], "restarting": False, "refused": [], "draining": False}
    monkeypatch.setattr(status, "ask_status", lambda _: answer)
    assert asked(tmp_path, "--check", "--json") == len(lacking)
    said = json.loads(capsys.readouterr().out)
    assert said["state"] == SERVING and said["amiss"] == amiss(answer)
