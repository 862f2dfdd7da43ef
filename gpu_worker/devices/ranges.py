"""Which addresses copies may touch, and where a copy must be cut in two. Pure arithmetic; touches no byte.

    registered     ├──── chunk 0 ────┼──── chunk 1 ────┼── chunk 2 ──┤      each pinned by a call of its own
    descriptors       ╟────╢     ╟───────╢      ╟──╢
                                 ╟──╢╟───╢                                   cut: no copy spans two registrations

The driver refuses a copy that runs from one registration into the next. A pool is registered before anybody
knows the size of its slots (a spare has pinned it before an engine comes), so chunks cannot end where slots do:
at most one slot in a GiB is copied in two pieces instead.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from kvferry.gpu_worker.api import U64
from kvferry.gpu_worker.devices.base import PlanError


class Stretch(NamedTuple):
    """One piece of memory of this process that a single copy may not leave."""

    start: int
    nbytes: int
    shift: int = 0  # what the device adds to our address of it


class Ranges:
    """Disjoint stretches, by address."""

    def __init__(self, stretches: Iterable[Stretch] = ()) -> None:
        ordered = sorted(stretches)
        self._starts: U64 = np.array([s.start for s in ordered], dtype=np.uint64)
        self._ends: U64 = np.array([s.start + s.nbytes for s in ordered], dtype=np.uint64)
        self._shifts = np.array([s.shift for s in ordered], dtype=np.int64)
        self._is_shifted = bool(self._shifts.any())

    def check(self, addresses: U64, size: U64, what: str) -> None:
        """PlanError(plan.address) unless each [address, + size) lies in one stretch."""
        if (addresses + size > self._ends[self._find(addresses, what)]).any():
            raise _outside(what)

    def cut(self, near: U64, far: U64, size: U64, what: str) -> tuple[U64, U64, U64]:
        """The same copies, none of which leaves a stretch on its near side; `near` as the device sees it.

        Shapes: (n,) each -> (m,) each, m >= n, order kept, the same bytes in all.
        Errors: PlanError(plan.address) where a copy runs out of all stretches.
        """
        while True:
            at = self._find(near, what)
            room = self._ends[at] - near
            long = np.flatnonzero(size > room)
            if not len(long):
                return (near.view(np.int64) + self._shifts[at]).view(np.uint64) if self._is_shifted else near, far, size
            rest = size[long] - room[long]
            size = size.copy()
            size[long] = room[long]
            near = np.insert(near, long + 1, near[long] + room[long])
            far = np.insert(far, long + 1, far[long] + room[long])
            size = np.insert(size, long + 1, rest)

    def _find(self, addresses: U64, what: str) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        at = np.searchsorted(self._starts, addresses, side="right").astype(np.int64) - 1
        if (at < 0).any() or (addresses >= self._ends[at]).any():
            raise _outside(what)
        return at


def joined(stretches: Iterable[Stretch]) -> list[Stretch]:
    """Overlapping stretches of one piece of memory as one; they may be shown twice, in parts."""
    found: list[Stretch] = []
    for stretch in sorted(stretches):
        last = found[-1] if found else None
        if last is not None and stretch.start <= last.start + last.nbytes:
            end = max(last.start + last.nbytes, stretch.start + stretch.nbytes)
            found[-1] = last._replace(nbytes=end - last.start)
        else:
            found.append(stretch)
    return found


def _outside(what: str) -> PlanError:
    return PlanError("plan.address", f"a descriptor lies outside {what}")
