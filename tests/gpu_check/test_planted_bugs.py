"""The items have teeth: a worker with a bug fails those that are there for it."""

from pathlib import Path

import pytest

from kvferry.gpu_check.plan import chosen
from kvferry.gpu_check.runner import Choices, run

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("bug", "items", "words"),
    [
        ("marks_are_ignored", "2,4", ("before the stream had come to its mark", "of 20")),
        ("revokes_are_ignored", "13", ("said OK and hold mixed bytes",)),
        ("generations_are_ignored", "13", ("should be TORN",)),
        ("neighbours_are_joined_too_eagerly", "3", ("byte",)),
    ],
)
def test_a_planted_bug_fails_the_items_that_are_there_for_it(
    bug: str, items: str, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if {'kvferry.gpu_worker', 'kvferry.gpu_check.worker', 'kvferry.gpu_check.copier'} & set(sys.orig_argv):\n"
        "    from tests.gpu_check.planted import BUGS\n"
        f"    BUGS[{bug!r}]()\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    choices = Choices("cpu", "cpu", "0", chosen(items), None, is_fast=True, is_small=True, judges_speed=False)
    report = run(choices, lambda text: None)
    assert not report.passed
    for result, said in zip(report.results, words, strict=True):
        assert result.status == "fail" and said in result.text, result
