"""Two thousand voyages in the test run. Each failure prints the one line that replays it, and its jobs' stories."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.client.fence import FenceMirror

from .planting import kinds_of
from .voyage import sail, story_of

ROOT = Path(__file__).parents[2]
CHUNK = 50
FIRST_SEEDS = range(0, 2000, CHUNK)


@pytest.mark.slow
@pytest.mark.parametrize("first", FIRST_SEEDS, ids=lambda first: f"seeds_{first}_to_{first + CHUNK - 1}")
def test_every_promise_holds_on_every_seed(first: int) -> None:
    for seed in range(first, first + CHUNK):
        outcome = sail(seed)
        if outcome.failure:
            pytest.fail("\n".join([outcome.failure, *story_of(seed), f"make voyage SEED={seed}"]))


@pytest.mark.slow
def test_the_same_seed_has_the_same_log_byte_for_byte_whatever_the_hash_seed() -> None:
    """Two processes with different string hashes: an order taken from a set of bytes would show here."""
    heard = []
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-m", "tests.voyage", "--seeds", "5-9", "--verbose"],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            timeout=120,
            check=True,
        )
        heard.append(done.stdout)
    assert heard[0] == heard[1]
    assert heard[0].count(b"\nlog ") == 5


def test_watching_a_voyage_does_not_change_it() -> None:
    seed = 3
    quiet, told = sail(seed), sail(seed, keep_log=True)
    assert not quiet.lines and told.lines
    assert (quiet.num_events, quiet.tally) == (told.num_events, told.tally)


def test_different_seeds_are_different_voyages() -> None:
    assert len({sail(seed, keep_log=True).digest for seed in range(5)}) == 5


def test_about_half_of_all_voyages_have_faults_and_all_kinds_of_them_occur() -> None:
    kinds = [kinds_of(seed) for seed in range(400)]
    assert 0.4 < sum(map(bool, kinds)) / len(kinds) < 0.7
    assert len(set().union(*kinds)) == 21


def test_the_story_of_a_failing_voyage_tells_of_its_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure names a job; its story goes from the client's wish to the last word."""
    monkeypatch.setattr(FenceMirror, "readers", lambda self, blocks: set())
    seed = next(seed for seed in range(100) if sail(seed).failure)
    story = "\n".join(story_of(seed))
    assert "story of engine" in story and "is asked for" in story and "is accepted as job" in story
