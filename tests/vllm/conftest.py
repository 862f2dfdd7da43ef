"""Tests of the vLLM connector. Those marked `vllm` need vLLM's own environment: `make test-vllm`.

Elsewhere they are collected and skipped, and vLLM is imported by none of these modules on import. The halves'
own tests (test_halves.py, test_rank_half.py, test_settings.py) need no vLLM and run everywhere.
"""

import importlib.util
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "bench")]  # helpers of these tests, and the lab


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs vLLM where there is none."""
    if item.get_closest_marker("vllm") and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here: `make test-vllm` runs this")
