"""How items end, which of them fail a run, and that each result is on disk when the next item begins."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from kvferry.gpu_check.plan import ITEMS, Item, chosen
from kvferry.gpu_check.results import Failed, Report, Result, Skipped, Status, Void, table_of
from kvferry.gpu_check.runner import Choices, run
from kvferry.gpu_check.stage import Stage
from kvferry.proto.errors import ConfigError


def result(number: int, status: Status, *, must: bool = True) -> Result:
    return Result(number, f"item {number}", must, status, "said", 0.5, 10.0)


def test_a_run_fails_by_a_must_item_that_failed_or_proved_nothing_and_by_no_other() -> None:
    for status, passes in ((Status.PASS, True), (Status.FAIL, False), (Status.VOID, False), (Status.SKIPPED, True)):
        assert Report({}, [result(1, status)]).passed is passes
        assert Report({}, [result(1, status, must=False)]).passed


def test_the_table_is_by_number_and_names_what_failed() -> None:
    lines = table_of(Report({}, [result(13, Status.VOID), result(1, Status.PASS), result(4, Status.FAIL)])).split("\n")
    assert [line.split()[0] for line in lines[:3]] == ["1", "4", "13"]
    assert lines[3] == "gpu-check failed: item 13, 4"


def test_items_go_in_the_order_of_their_value_and_can_be_chosen() -> None:
    assert [item.number for item in ITEMS] == [0, 1, 2, 3, 4, 13, 14, 10, 5, 6, 9, 7, 11, 8, 12]
    assert [item.number for item in chosen("13, 0-2")] == [0, 1, 2, 13]
    assert chosen(None) == ITEMS


@pytest.mark.parametrize("text", ["", "x", "1-", "-1", "15", "0-99"])
def test_an_item_that_there_is_not_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        chosen(text)
    assert caught.value.code == "check.items" and caught.value.fix


def play(items: list[Item], out: Path | None = None) -> Report:
    choices = Choices("cpu", "cpu", "0", items, out, is_fast=False, is_small=False, judges_speed=True)
    return run(choices, lambda text: None)


def test_each_ending_is_told_with_what_was_found_until_then(tmp_path: Path) -> None:
    def ends(how: Exception) -> Any:
        def item(stage: Stage, facts: dict[str, Any]) -> str:
            facts["found"] = 1
            raise how

        return item

    out = tmp_path / "found.json"
    seen: list[int] = []

    def looks(stage: Stage, facts: dict[str, Any]) -> str:
        seen.append(len(json.loads(out.read_text())["items"]))
        return "all is on disk"

    items = [
        Item(1, "fails", 5, ends(Failed("wrong bytes"))),
        Item(2, "void", 5, ends(Void("no race"))),
        Item(3, "skipped", 5, ends(Skipped("only on a GPU"))),
        Item(4, "breaks", 5, ends(RuntimeError("as it was"))),
        Item(5, "looks", 5, looks),
    ]
    report = play(items, out)
    assert [one.status for one in report.results] == ["fail", "void", "skipped", "fail", "pass"]
    assert [one.facts["found"] for one in report.results[:4] if one.facts] == [1] * 4
    assert "RuntimeError: as it was" in report.results[3].text
    assert seen == [4]
    told = json.loads(out.read_text())
    assert told["passed"] is False and len(told["items"]) == 5


def test_an_item_that_hangs_is_over_at_its_limit_and_the_next_one_runs() -> None:
    def hangs(stage: Stage, facts: dict[str, Any]) -> str:
        time.sleep(30)
        return "never"

    report = play([Item(1, "hangs", 0.2, hangs), Item(2, "goes on", 5, lambda stage, facts: "fine")])
    first, second = report.results
    assert (first.status, second.status) == ("fail", "pass")
    assert "not over within its 0.2 s" in first.text and first.seconds < 5
