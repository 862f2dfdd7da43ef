"""The table of all faults: some rows of it here, all of them by `make faults`; and the page that holds them."""

import re
from pathlib import Path

import pytest

from tests.process.fault_table import BOTH, HEAD, MOMENTS, ROWS, Bench, Row

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"

# One of each part and kind, and each moment several times: what a change breaks first.
SHORT = [
    Row("worker", "SIGKILL", "during a load"),
    Row("worker", "SIGKILL", "during a store"),
    Row("worker", "SIGSTOP", "during a load"),
    Row("worker", "clean exit", "idle"),
    Row("engine rank", "SIGKILL", "during a store"),
    Row("engine scheduler", "SIGKILL", "during a load"),
    Row("engine rank", "clean exit", "idle"),
    Row("daemon", "SIGKILL", "during a store"),
    Row("daemon", "SIGKILL", "during attach"),
    Row("daemon", "SIGSTOP", "idle"),
    Row("supervisor", "SIGSTOP", "during a load"),
    Row("supervisor", "clean exit", "idle"),
    Row("whole sidecar", "SIGKILL", "during a load"),
    Row(BOTH, "SIGKILL", "during a store"),
]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("row", SHORT, ids=lambda row: row.name)
def test_a_fault_costs_a_miss_and_nothing_else(row: Row, bench: Bench) -> None:
    """Cases 30, 32, 43, 45 and 53, and rules 1, 4 and 10: what `Bench.play` asserts of every row."""
    print(bench.play(row))


def test_the_page_has_every_row_once_and_under_the_same_head() -> None:
    """The names, not the times: those are of the machine that said them."""
    text = PAGE.read_text()
    assert HEAD in text
    found = re.findall(r"^\| ([a-z ]+) \| (SIGKILL|SIGSTOP|clean exit) \| ([a-z ]+) \|", text, re.MULTILINE)
    assert [Row(*cells) for cells in found] == ROWS
    assert "BROKEN" not in text
    assert all(any(row.moment == moment for row in SHORT) for moment in MOMENTS)
