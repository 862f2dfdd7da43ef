"""A rank's search for a worker: knock at its socket, show it our memory, hear the verdict, or know when to try again.

    written probes ──knock──▶ rank.register ──verdict──▶ Tether and pidfd
          nobody listens, a refusal that passes ──▶ Missed: again soon, then less often
                       a refusal that may pass ──▶ Missed: again in ten seconds
          what was shown is not what the engine computes with ──▶ Missed, and never again

Only the first attempt finds the engine idle and may write the probes. They are written before the knock: the first
work of a GPU may take longer than a worker's door waits for who says nothing.
"""

import logging
import socket
import threading
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvferry.client.memory import KVMemory
from kvferry.client.tether import Tether, attach
from kvferry.proto.errors import KvferryError
from kvferry.proto.tether import RankRegister

RETRY_S: Final = 0.5
RETRY_MAX_S: Final = 2.0
REFUSED_RETRY_S: Final = 10.0
# Refusals that pass by themselves: our last worker is not reaped yet, or this one found no daemon or lost its GPU.
PASSING: Final = frozenset({"register.rank_taken", "worker.busy", "daemon.lost", "device.lost", "frame.link"})
# Refusals that never pass: what was shown is not what the engine computes with. Only a first attachment proves it, so
# there must be no second one.
FOR_GOOD: Final = frozenset({"layout.probe", "memory.export"})


@dataclass(frozen=True, slots=True)
class Missed:
    """No worker this time: what to say of it ("": nothing new), when to look again, and how loud."""

    text: str
    wait_s: float
    level: int = logging.INFO


class Search:
    """See the module's text. One attempt at a time; `end` may come from any thread."""

    def __init__(self, path: Path, register: RankRegister, memory: KVMemory, page_fd: int) -> None:
        self._path = path
        self._register = register
        self._memory = memory
        self._page_fd = page_fd
        self._lock = threading.Lock()
        self._attempt: socket.socket | None = None  # on its way, so that `end` can end it
        self._has_ended = self._is_hopeless = False
        self._retry_s = RETRY_S

    def attempt(self, timeout_s: float, *, is_idle: bool = False) -> tuple[Tether, int] | Missed:
        """Try one worker, for at most `timeout_s`: a tether to it and its pidfd, which are the caller's."""
        if self._is_hopeless:
            return Missed("", REFUSED_RETRY_S)
        sock: socket.socket | None = None
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            found = self._attempt_over(sock, timeout_s, is_idle=is_idle)
        except Exception as error:  # whatever it was, the engine goes on without
            found = self._failed(error)
        finally:
            with self._lock:
                self._attempt = None
        if isinstance(found, Missed) and sock is not None:
            sock.close()
        return found

    def end(self) -> None:
        """Look for no more: an attempt on its way ends now."""
        with self._lock:
            self._has_ended = True
            if self._attempt is not None:
                with suppress(OSError):
                    self._attempt.shutdown(socket.SHUT_RDWR)

    def _attempt_over(self, sock: socket.socket, timeout_s: float, *, is_idle: bool) -> tuple[Tether, int] | Missed:
        probing = self._memory.probing if is_idle and self._path.exists() else None
        with probing() if probing is not None else nullcontext(()) as probes:
            if not self._knock(sock, timeout_s):
                text = f"no worker at {self._path}: nothing is loaded or stored until there is one"
                return Missed(text, self._next_retry())
            register = self._register.model_copy(update={"probes": probes})
            found = attach(sock, register, (*self._memory.fds, self._page_fd), timeout_s)
        self._retry_s = RETRY_S
        return found

    def _knock(self, sock: socket.socket, timeout_s: float) -> bool:
        """Connect to the rank's socket; False if nobody listens there, or `end` came first."""
        sock.settimeout(timeout_s)
        try:
            sock.connect(str(self._path))
        except OSError:
            return False
        with self._lock:  # from here on it is connected, and `end` can end it
            self._attempt = sock
            return not self._has_ended

    def _failed(self, error: Exception) -> Missed:
        code = error.code if isinstance(error, KvferryError) else ""
        self._is_hopeless = code in FOR_GOOD
        is_passing = isinstance(error, OSError) or code in PASSING
        tail = "; not tried again" if self._is_hopeless else ""
        wait_s = self._next_retry() if is_passing else REFUSED_RETRY_S
        return Missed(f"not attached: {error}{tail}", wait_s, logging.WARNING)

    def _next_retry(self) -> float:
        wait_s, self._retry_s = self._retry_s, min(self._retry_s * 2, RETRY_MAX_S)
        return wait_s
