"""The client's own thread, and how it ends. It drives `Client.housekeep` and decides nothing.

It holds the client only while it works: a client that its engine forgot is collected, and the thread ends.
"""

import atexit
import logging
import os
import select
import time
import weakref
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvferry.client.client import Client

log = logging.getLogger("kvferry.client")

AFTER_ERROR_S: Final = 1.0  # an error here is a bug of ours: it may repeat, but not in a busy loop


def serve(owner: "weakref.ref[Client]") -> None:
    """Until the client is closed or gone."""
    while True:
        client = owner()
        if client is None or client.is_closed:
            return
        try:
            wait_s = client.housekeep()
        except Exception:  # the thread must outlive it: nobody else renews leases
            log.debug("error in the client's thread", exc_info=True)
            wait_s = AFTER_ERROR_S
        fds = client.wait_fds()
        del client
        _wait(fds, wait_s)


def _wait(fds: list[int], wait_s: float) -> None:
    """Until one of them is readable, or the time is over."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    if any(event & select.POLLNVAL for _, event in poller.poll(wait_s * 1000)):
        time.sleep(wait_s)  # closed meanwhile by the engine's thread; look again after the usual time


def close_pipe(*fds: int) -> None:
    """The pipe that wakes the thread goes with its client."""
    for fd in fds:
        os.close(fd)


_open_clients: "weakref.WeakSet[Client]" = weakref.WeakSet()


def close_at_exit(client: "Client") -> None:
    """Have an engine that forgets `close` leave politely all the same."""
    if not _open_clients:
        atexit.register(_close_open_clients)
    _open_clients.add(client)


def _close_open_clients() -> None:
    for client in list(_open_clients):
        client.close()
