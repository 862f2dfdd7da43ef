"""The vLLM connector: `KvferryConnector`, imported only when somebody asks for it.

vLLM's front end, engine core and workers all import this package; nothing here is opened, and vLLM itself
is touched only by `kvferry.vllm.connector`.
"""

from typing import Any

__all__ = ["KvferryConnector"]


def __getattr__(name: str) -> Any:
    if name == "KvferryConnector":
        from kvferry.vllm.connector import KvferryConnector

        return KvferryConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
