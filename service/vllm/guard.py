"""Keeps what goes wrong in kvferry out of vLLM: an exception out of a connector's hook ends the engine.

    @guarded(lambda self: (0, False))
    def get_num_new_matched_tokens(self, ...): ...

The first failure is logged with its traceback and told to the object's `on_failure`, which switches caching
off; the hook then answers as one without a cache would.
"""

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=Any)


def guarded(
    otherwise: Callable[[Any], Any],
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Let no exception out of a method; its answer is then `otherwise(self)`, or None if that fails too."""

    def wrap(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(method)
        def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                answer: R = _answer(self, method.__name__, error, otherwise)
                return answer

        return call

    return wrap


def _answer(self: Any, name: str, error: Exception, otherwise: Callable[[Any], Any]) -> Any:
    try:
        self.on_failure(name, error)
        return otherwise(self)
    except Exception as second:
        self.on_failure(f"{name}, on its way out", second)
        return None
