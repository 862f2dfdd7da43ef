"""How fast a worker has lately copied, at its slowest: what deadlines are reckoned with.

A deadline that is too early kills a healthy worker, one that is too late only waits longer. So the slowest
of the last copies counts, small copies do not (their time is overhead), and a floor bounds the wait.
"""

from collections import deque
from typing import Final

NUM_SAMPLES: Final = 32
MIN_BYTES: Final = 1 << 20  # of a copy that says something


class Pace:
    """The bandwidth of one worker's last copies."""

    __slots__ = ("_samples",)

    def __init__(self) -> None:
        self._samples: deque[int] = deque(maxlen=NUM_SAMPLES)

    def add(self, num_bytes: int, copy_us: int) -> None:
        """One copy ended well."""
        if num_bytes >= MIN_BYTES and copy_us:
            self._samples.append(num_bytes * 1_000_000 // copy_us)

    def bytes_per_s(self, floor: int) -> int:
        """The slowest of the last copies; `floor` if none has been measured or it was slower."""
        return max(floor, min(self._samples, default=0))
