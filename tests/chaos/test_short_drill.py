"""The drill in a minute and a half: what must hold under every fault is asserted, what is only a goal is printed."""

import importlib.util

import pytest

from .drill import Plan, run
from .faults import KINDS
from .report import passes, table, verdict

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here: `make test-vllm`"),
]


def test_no_request_fails_and_no_answer_is_wrong_while_everything_is_killed_and_stopped() -> None:
    """Cases 45, 46, 48, 53: deaths and stalls of each part under load. The engine's own death costs two starts
    more and is left to `make chaos`.
    """
    kinds = tuple(kind for kind in KINDS if "engine" not in kind.name)
    found = run(Plan(minutes=0.5, users=3, talks=8, turns=(600, 60), seed=1, kinds=kinds))
    said = table(found)
    print(said)
    assert not found.failed, said
    assert not found.wrong, said
    assert passes(verdict(found)), said
