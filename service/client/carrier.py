"""What the client needs of a link to the daemon, and how to get one. Tests bring one of their own."""

import secrets
from typing import Any, Protocol

from kvferry.net.paths import RunDir
from kvferry.proto.control import Refused
from kvferry.proto.ids import LinkId
from kvferry.proto.schema import Message


class Carrier(Protocol):
    """`kvferry.net.peer.Peer`, or a fake. Only `wait` may wait."""

    refusal: Refused | None

    @property
    def alive(self) -> bool: ...
    def tether_fileno(self) -> int: ...
    def send(self, message: Message) -> bool: ...
    def flush(self) -> None: ...
    def receive(self) -> list[Any]: ...
    def tick(self) -> None: ...
    def wait(self, timeout_s: float) -> bool: ...
    def close(self) -> None: ...


def connect(run_dir: RunDir) -> Carrier:
    """A new link to the daemon of `run_dir`; LostError if nobody listens."""
    from kvferry.net.peer import Peer  # pulls in zmq: only when there is something to connect to

    return Peer(run_dir, LinkId(secrets.randbits(64) | 1))
