"""kvferry: a sidecar that keeps the KV cache of LLM inference servers beyond GPU memory.

Public names are those of `kvferry.client` and the errors of `kvferry.proto.errors`, imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvferry.client import (
        Client,
        ClientCounters,
        Directive,
        Hits,
        JobEnd,
        KVMemory,
        LoadEnd,
        RankClient,
        RankCounters,
        RankReport,
        View,
        from_arrays,
        from_views,
        shared_array,
        wait_for,
    )
    from kvferry.proto.errors import ConfigError, KvferryError
    from kvferry.proto.outcome import Kind, Next, Outcome, Reason

__all__ = [
    "Client",
    "ClientCounters",
    "ConfigError",
    "Directive",
    "Hits",
    "JobEnd",
    "KVMemory",
    "Kind",
    "KvferryError",
    "LoadEnd",
    "Next",
    "Outcome",
    "RankClient",
    "RankCounters",
    "RankReport",
    "Reason",
    "View",
    "__version__",
    "from_arrays",
    "from_views",
    "shared_array",
    "wait_for",
]

_ERRORS = {"ConfigError", "KvferryError"}
_ANSWERS = {"Kind", "Next", "Outcome", "Reason"}


def __getattr__(name: str) -> Any:
    """Import on first use, so that `import kvferry` costs an engine's front end nothing."""
    if name in _ERRORS:
        return getattr(import_module("kvferry.proto.errors"), name)
    if name in _ANSWERS:
        return getattr(import_module("kvferry.proto.outcome"), name)
    if name in __all__:
        return getattr(import_module("kvferry.client"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
