"""For those who ask: an engine on a stub of the GPU driver, whose misuse and leaks fail the test; a rank's worker."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvferry import KVMemory, from_arrays, shared_array
from tests.client.dock import Dock
from tests.client.fake_gpu import FakeEngine
from tests.cuda.stubs import Stub


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Stub]:
    made = Stub(tmp_path / "calls")
    yield made
    made.finish()


@pytest.fixture
def engine(stub: Stub) -> Iterator[FakeEngine]:
    made = FakeEngine(stub.path)
    yield made
    made.close()


@pytest.fixture
def dock(tmp_path: Path) -> Iterator[Dock]:
    made = Dock(tmp_path)
    yield made
    made.close()


@pytest.fixture
def memory() -> Iterator[KVMemory]:
    array_, fd = shared_array((16, 64), np.uint8)
    yield from_arrays({"l0": array_}, array_, fd, block_tokens=16)
    os.close(fd)
