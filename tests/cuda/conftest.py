"""The stub driver for each test, checked at its end."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.cuda.driver import Driver
from tests.cuda.exporter import Exporter
from tests.cuda.node import Node
from tests.cuda.stubs import Stub, build, violations


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Stub]:
    """The stub in this process. At the end nothing was misused and nothing is left."""
    made = Stub(tmp_path / "calls")
    yield made
    made.finish()


@pytest.fixture
def driver(stub: Stub) -> Iterator[Driver]:
    """The driver's calls, with a context current in this thread."""
    made = Driver.load(stub.path)
    made.use(made.retain_context(0))
    yield made
    stub.control()
    made.use(0)
    made.release_context(0)


@pytest.fixture(scope="session")
def exporter() -> Iterator[Exporter]:
    """An engine's process on the stub."""
    made = Exporter(str(build() / "libcuda.so.1"))
    yield made
    made.close()


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """A machine with a stub GPU. At the end no process has misused it, and nothing of this one is left."""
    build()
    with contextlib.ExitStack() as cleanup:
        made = Node(tmp_path, monkeypatch, cleanup)
        yield made
        made.steer()
    made.stub.finish()
    assert violations(made.journal) == []
