"""How `kvferry up` is told to stop: signals, as a descriptor for its selector."""

import signal
import socket
from typing import Final

# Which stop signals keep the pool. A service manager's restart is warm, a person's Ctrl-C leaves nothing, and
# SIGUSR1 is how `kvferry down` says that nothing shall be left.
STOP_SIGNALS: Final = {signal.SIGINT: False, signal.SIGTERM: True, signal.SIGHUP: True, signal.SIGUSR1: False}


class Signals:
    """Stop signals as a readable descriptor and a question.

    Handled to the very end of the process: a second Ctrl-C must not cut the cleaning up short.
    """

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self.got: signal.Signals | None = None
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)

    def fileno(self) -> int:
        return self._read.fileno()

    def drain(self) -> None:
        """Forget the wake-ups so far."""
        try:
            while self._read.recv(64):
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Wake nobody any more."""
        signal.set_wakeup_fd(-1)
        self._read.close()
        self._write.close()

    def _handle(self, number: int, _frame: object) -> None:
        self.got = self.got or signal.Signals(number)
