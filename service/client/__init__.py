"""The client library: what an engine imports to use kvferry. No torch, no threads and no sockets at import.

Client       scheduler side: lookups, loads, stores, one `Directive` per engine step
RankClient   rank side: obeys directives, reports the ends of loads and stores

core.py             decides for the scheduler side; sans-IO, with
  registration.py     how the client comes to be known
  lookups.py          lookups and leases
  requests.py         requests by name, and their attempts
  transfers.py        tickets and their ends; fence.py: whose blocks are still read
  batch.py            what one step has to say; arguments.py: what the engine passes in
rank_core.py        decides for a rank; sans-IO
client.py, rank.py  the thin shells: sockets, clocks; background.py: a thread; carrier.py, tether.py: their links;
                    search.py: finds a worker; proofs.py: knows when it is dead
memory.py           describes KV memory; torch_memory.py: shares an engine's torch tensors on CPU
cuda_memory.py      exports an engine's GPU tensors, of torch or not
marks.py            from when on a copy may touch its blocks; cuda_marks.py: as an engine's GPU says it
types.py            the values that all of them hand out; waiting.py: for programs that may wait
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvferry.client.client import Client
    from kvferry.client.memory import KVMemory, View, from_arrays, from_views, shared_array
    from kvferry.client.rank import RankClient
    from kvferry.client.types import (
        ClientCounters,
        Directive,
        Hits,
        JobEnd,
        LoadEnd,
        RankCounters,
        RankReport,
    )
    from kvferry.client.waiting import wait_for

_HOMES = {
    "Client": "client",
    "RankClient": "rank",
    "KVMemory": "memory",
    "View": "memory",
    "from_arrays": "memory",
    "from_views": "memory",
    "shared_array": "memory",
    "ClientCounters": "types",
    "Directive": "types",
    "Hits": "types",
    "JobEnd": "types",
    "LoadEnd": "types",
    "RankCounters": "types",
    "RankReport": "types",
    "wait_for": "waiting",
}

__all__ = [
    "Client",
    "ClientCounters",
    "Directive",
    "Hits",
    "JobEnd",
    "KVMemory",
    "LoadEnd",
    "RankClient",
    "RankCounters",
    "RankReport",
    "View",
    "from_arrays",
    "from_views",
    "shared_array",
    "wait_for",
]


def __getattr__(name: str) -> Any:
    """Import on first use: an engine's front end imports the package and needs none of it."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
