"""Makes the helpers beside these tests importable, and gives them a sidecar that leaves nothing behind."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.process.fault_table import Bench
from tests.process.sidecar import Sidecar


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Minutes of faults are for `make faults`: without asking for them (-m faults) they are left out."""
    if "faults" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("faults")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


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


@pytest.fixture(scope="session")
def benches() -> Iterator[list[Bench]]:
    """The one bench of this run, once somebody needs it; nothing may be left of it at the end."""
    made: list[Bench] = []
    yield made
    for one in made:
        one.close()


@pytest.fixture
def bench(benches: list[Bench]) -> Iterator[Bench]:
    """A sidecar and an engine for faults, at rest. One that a test has left broken is not given to the next."""
    if not benches:
        benches.append(Bench())
    one = benches[0]
    yield one
    try:
        one.come_to_rest()
    except BaseException:
        benches.clear()
        one.kill()
        raise
