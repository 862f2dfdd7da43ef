"""Voyages of engines whose device cannot write marks: a rank holds its begins until it finds the device past them."""

from typing import Any

import pytest

from kvferry.client.rank_core import RankCore

from .voyage import sail

CHUNK = 50
FIRST_SEEDS = range(0, 150, CHUNK)


@pytest.mark.slow
@pytest.mark.parametrize("first", FIRST_SEEDS, ids=lambda first: f"seeds_{first}_to_{first + CHUNK - 1}")
def test_every_promise_holds_where_begins_are_held_back(first: int) -> None:
    """Cases 1, 4, 20: reuse, revokes, deaths and restarts between a begin's asking and its sending."""
    for seed in range(first, first + CHUNK):
        outcome = sail(seed, is_held=True)
        if outcome.failure:
            story = sail(seed, is_held=True, keep_log=True).story
            pytest.fail("\n".join([outcome.failure, *story, f"sail({seed}, is_held=True)"]))


@pytest.mark.slow
def test_begins_that_do_not_wait_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a rank that sends at once what the device is not past."""
    begin = RankCore._begin

    def at_once(self: RankCore, tickets: Any, mark: int | None, hold: int) -> None:
        begin(self, tickets, mark, 0)

    monkeypatch.setattr(RankCore, "_begin", at_once)
    failures = (sail(seed, is_held=True).failure for seed in range(40))
    assert any("before its mark" in failure for failure in failures)
