"""What a process of kvferry tells the kernel about itself: its name, and whose end is its own. Linux, best effort."""

import ctypes
import signal
from typing import Any, Final

PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
PR_SET_NAME: Final = 15
MAX_NAME: Final = 15  # bytes that the kernel keeps


def _find_prctl() -> Any:
    try:
        return ctypes.CDLL(None).prctl
    except (OSError, AttributeError):  # no libc with such a call: nameless, and ended by the control channel alone
        return None


# Found once, by whoever starts children: between fork and exec nothing may be looked for.
_prctl: Final = _find_prctl()


def name_process(name: str) -> None:
    """Show `name` in ps, top and /proc/<pid>/comm; at most 15 bytes of it."""
    if _prctl is not None:
        _prctl(PR_SET_NAME, ctypes.c_char_p(name.encode()[:MAX_NAME]), 0, 0, 0)


def end_with_parent() -> None:
    """In a child between fork and exec: the kernel kills it when its parent dies, even if it is stopped or hangs."""
    if _prctl is not None:
        _prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
