"""An engine on a GPU that is a stub of the driver, for those who ask. Misuse and leaks fail the test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

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
