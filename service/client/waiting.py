"""For scripts and tests, which may wait. An engine asks once in each of its steps instead."""

import time
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

PAUSE_S: Final = 0.001


def wait_for(question: Callable[[], T], what: str, timeout_s: float = 10.0) -> T:
    """Ask until the answer counts as true, and give it; TimeoutError naming `what` after `timeout_s`."""
    until = time.monotonic() + timeout_s
    while not (answer := question()):
        if time.monotonic() >= until:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(PAUSE_S)
    return answer
