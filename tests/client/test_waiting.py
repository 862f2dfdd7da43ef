"""Waiting, for programs that may."""

import pytest

from kvferry import wait_for


def test_the_first_answer_that_counts_as_true_is_given() -> None:
    answers = iter([[], [], [7]])
    assert wait_for(lambda: next(answers), "an answer") == [7]


def test_no_answer_in_time_is_an_error_that_names_what_was_awaited() -> None:
    with pytest.raises(TimeoutError, match="not within 0 s: a train"):
        wait_for(lambda: None, "a train", timeout_s=0)
