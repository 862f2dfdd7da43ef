"""Errors of kvferry, as users import them. The family stands in `kvferry.proto.errors`:

    KvferryError
    ├── ConfigError              a setting that cannot work: refused at start, with numbers and the fix
    ├── ProtocolError            a message that breaks docs/protocol.md
    │   ├── LocalProtocolError     we built it: a bug of ours
    │   └── RemoteProtocolError    a peer sent it: answered by name, counted, nothing changed
    ├── RefusedError             a registration that the other side turned down, with its reason and fix
    ├── ClosedError              you closed it
    └── LostError                it was taken from you: the peer died or went away

A client raises none of these into an engine for what the sidecar did: loss becomes a miss, and is counted.
"""

from kvferry.proto.errors import (
    CODES,
    ClosedError,
    ConfigError,
    KvferryError,
    LocalProtocolError,
    LostError,
    ProtocolError,
    RefusedError,
    RemoteProtocolError,
)

__all__ = [
    "CODES",
    "ClosedError",
    "ConfigError",
    "KvferryError",
    "LocalProtocolError",
    "LostError",
    "ProtocolError",
    "RefusedError",
    "RemoteProtocolError",
]
