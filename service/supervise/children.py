"""Child processes: started by exec, heard over a control channel, watched by a pidfd, reaped here alone.

Nothing is forked and kept: a child is a fresh `python -m`, inherits exactly the descriptors it needs, and
learns of the supervisor's end from its control channel, even when the supervisor had no time to say anything. The
kernel kills one that cannot listen.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from kvferry.net.channel import Channel
from kvferry.process import end_with_parent


class Process:
    """One running child."""

    def __init__(self, module: str, arguments: Sequence[str], pass_fds: Sequence[int], env: dict[str, str]) -> None:
        """OSError if there is no process, memory or descriptor for it; then nothing of it is left."""
        self.control, theirs = Channel.pair()
        with contextlib.ExitStack() as undo, theirs:
            undo.callback(self.control.close)
            self._popen = subprocess.Popen(
                [sys.executable, "-m", module, *arguments, "--control-fd", str(theirs.fileno())],
                pass_fds=[theirs.fileno(), *pass_fds],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **env},
                # Ctrl-C in a terminal goes to the whole foreground group: children are stopped by us, in order.
                process_group=0,
                # Before the exec, so that there is no moment in which a child could outlive us. We have one thread.
                preexec_fn=end_with_parent,
            )
            self.pid = self._popen.pid
            self.pidfd = self._watch()
            undo.pop_all()
        self.muted = False  # the shell listens to its channel no more

    def _watch(self) -> int:
        """A descriptor of the process, or OSError: then it is gone, since nobody would see its end."""
        try:
            return os.pidfd_open(self.pid)
        except OSError:
            self._popen.kill()
            self._popen.wait()
            raise

    def tell(self, message: dict[str, Any]) -> None:
        """Put a map on the control channel; never blocks."""
        self.control.send(message)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; harmless if it has ended."""
        self._popen.send_signal(number)

    def reap(self) -> int:
        """The exit status of a child whose pidfd is readable: its code, or minus its signal."""
        status = self._popen.wait()
        os.close(self.pidfd)
        self.control.close()
        return status
