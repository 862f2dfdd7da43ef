"""What a process of kvferry tells the kernel about itself: its name, and whose end is its own. Linux, best effort."""

import contextlib
import ctypes
import signal
from typing import Final

PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
PR_SET_NAME: Final = 15
MAX_NAME: Final = 15  # bytes that the kernel keeps


def name_process(name: str) -> None:
    """Show `name` in ps, top and /proc/<pid>/comm; at most 15 bytes of it."""
    _prctl(PR_SET_NAME, ctypes.c_char_p(name.encode()[:MAX_NAME]))


def be_child(name: str) -> None:
    """Take a name, and end with the supervisor: the kernel kills us when it dies, even if we are stopped or hang.

    A supervisor that died before this call is told by the end of the control channel.
    """
    name_process(name)
    _prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))


def _prctl(option: int, value: ctypes.c_char_p | ctypes.c_ulong) -> None:
    # No libc with such a call: we are nameless then, and the channel's end still ends us.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
