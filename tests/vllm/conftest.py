"""Tests of the vLLM connector. Those marked `vllm` need vLLM's own environment: `make test-vllm`.

Elsewhere they are collected and skipped, and vLLM is imported by none of these modules on import. The halves'
own tests (test_halves.py, test_rank_half.py, test_settings.py) need none and run everywhere.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "bench")]  # helpers of these tests, and the lab


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs vLLM where there is none."""
    if item.get_closest_marker("vllm") and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here: `make test-vllm` runs this")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer, for a scheduler that only reads its configuration."""
    from vllm_model import ModelShape, write_model

    return write_model(tmp_path_factory.mktemp("model"), ModelShape(layers=1))


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`vllm_scheduling`, which imports vLLM."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")  # and restore it: an engine here sets it
    import vllm_scheduling

    return vllm_scheduling
