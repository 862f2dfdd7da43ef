"""One log format for all processes of kvferry, on stderr. Only shells log; cores return notes."""

import logging
import os
import sys

LEVEL_ENV = "KVFERRY_LOG_LEVEL"  # the supervisor hands its level to its children this way


def set_up(level: str | None = None) -> None:
    """Log to stderr at `level`, else at $KVFERRY_LOG_LEVEL, else info. The logger's name names the process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s[%(process)d] %(message)s"))
    root = logging.getLogger("kvferry")
    root.handlers[:] = [handler]
    root.propagate = False
    root.setLevel((level or os.environ.get(LEVEL_ENV) or "info").upper())
