"""The deaths of a rank's workers, proven: one pidfd a worker, which says that its process is gone. Nothing else does.

add ──▶ kept while its worker serves, or owes a word ──keep(others)──▶ given back
         └── dead(): the process is gone, and so is every copy of it
"""

import os
import select
from collections.abc import Collection


class Proofs:
    """The pidfds of one rank, by worker. Given back with their owner at the latest."""

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}

    def add(self, worker: int, pidfd: int) -> None:
        """Watch `worker`; the descriptor is ours from here on."""
        self._fds[worker] = pidfd

    def dead(self) -> list[int]:
        """Workers whose processes are gone; each is told until it is no longer kept."""
        poller = select.poll()
        for fd in self._fds.values():
            poller.register(fd, select.POLLIN)
        gone = {fd for fd, _ in poller.poll(0)} if self._fds else set()
        return [worker for worker, fd in self._fds.items() if fd in gone]

    def keep(self, workers: Collection[int]) -> None:
        """Nobody waits for the others any more."""
        for worker in self._fds.keys() - set(workers):
            os.close(self._fds.pop(worker))

    @property
    def filenos(self) -> list[int]:
        """Each becomes readable with a death."""
        return list(self._fds.values())

    def __del__(self) -> None:
        self.keep(())
