"""Each story in this folder is replayed; its replies must be those of the file, to the letter.

`KVFERRY_REWRITE=1 pytest tests/transcripts` writes what is said now; read the difference before you keep it.
"""

import os
from pathlib import Path

import pytest

from .stage import replay

STORIES = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_the_story_is_told_as_it_was(path: Path):
    said, says = replay(path)
    if os.environ.get("KVFERRY_REWRITE"):
        path.write_text(says)
    else:
        assert says == said, f"{path.name} is told otherwise now; KVFERRY_REWRITE=1 rewrites it"


def test_there_are_stories():
    assert len(STORIES) >= 5
