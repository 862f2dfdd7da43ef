"""Makes the helpers beside these tests importable, and gives them a sidecar that leaves nothing behind."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.process.sidecar import Sidecar


@pytest.fixture
def sidecar() -> Iterator[Sidecar]:
    """`kvferry up` with two ranks and 64 MiB; whatever the test did to it, nothing may be left at the end."""
    with Sidecar() as one:
        yield one


@pytest.fixture(scope="module")
def shared() -> Iterator[Sidecar]:
    """One sidecar for all tests of a module that leave it as they found it."""
    with Sidecar() as one:
        yield one
