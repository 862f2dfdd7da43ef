"""The stub driver for each test, checked at its end."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cuda.exporter import Exporter
from tests.cuda.stubs import Stub, build


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Stub]:
    """The stub in this process. At the end nothing was misused and nothing is left."""
    made = Stub(tmp_path / "calls")
    yield made
    made.check()
    assert made.leaks() == ""
    made.close()


@pytest.fixture(scope="session")
def exporter() -> Iterator[Exporter]:
    """An engine's process on the stub."""
    made = Exporter(str(build() / "libcuda.so.1"))
    yield made
    made.close()
