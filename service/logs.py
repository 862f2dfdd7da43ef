"""One log format for all processes of kvferry, on stderr. Only shells log; cores return notes.

Who reads what we say may end, or live and read no more, and a disk with our log may fill up. None of that may end a
process of ours, hold it or change its exit code: what cannot be said is dropped, and the next line is tried again. The
long-running processes count what was dropped and say so (`outlet.py`). A short command waits for its reader: `kvferry
status | less` loses nothing.
"""

import contextlib
import logging
import os
import signal
import sys
from typing import TextIO

from kvferry import outlet

LEVEL_ENV = "KVFERRY_LOG_LEVEL"  # the supervisor hands its level to its children this way


class Handler(logging.StreamHandler[TextIO]):
    """To stderr, and quiet about a line that cannot be written."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def wait_for_no_reader() -> None:
    """From now on what this process says on stdout and stderr is dropped where nobody takes it, in place of waiting."""
    # Else a terminal that is set so (`stty tostop`) stops whoever writes to it from the background, as our children do.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):  # a test's own is left to the test
            setattr(sys, name, outlet.over(stream.fileno()))


def set_up(level: str | None = None) -> None:
    """Log to stderr at `level`, else at $KVFERRY_LOG_LEVEL, else info. The logger's name names the process."""
    wait_for_no_reader()
    handler = Handler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s[%(process)d] %(message)s"))
    root = logging.getLogger("kvferry")
    root.handlers[:] = [handler]
    root.propagate = False
    root.setLevel((level or os.environ.get(LEVEL_ENV) or "info").upper())


def say(text: object, stream: TextIO | None = None) -> None:
    """Print a line to `stream`, else to stdout, if that can be done."""
    stream = stream or sys.stdout
    if stream is None:  # it was closed when we were started
        return
    with contextlib.suppress(OSError):
        stream.write(f"{text}\n")
        stream.flush()


def let_go() -> None:
    """Write what waits to be written, at the end of a process; what cannot be is dropped.

    The interpreter's own last flush would fail with the same error, and make 120 of any exit code.
    """
    for stream in (sys.stderr, sys.stdout):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
