"""What several rooms of these tests stand on."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contracts.conftest import CpuLab
from tests.worker.fakes import Bench
from tests.worker.sidecar import Sidecar


@pytest.fixture
def bench() -> Bench:
    """A worker's core at a bench."""
    return Bench()


@pytest.fixture
def lab() -> Iterator[CpuLab]:
    """The CPU device, with its knobs."""
    made = CpuLab()
    yield made
    made.close()


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    """A real worker process, a spare, between a daemon and a supervisor that the test plays."""
    made = Sidecar(tmp_path)
    yield made
    made.close()
