"""Pins with an owner and an end: what a lookup promises until its load comes.

Each lease is released once, by its owner, by the load that uses it, by the end of its request, by the
death of its owner, or by time. It is named by its id, never by its keys, so nobody can release what
another holds.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.scheduler_daemon.core.index import Entry

if TYPE_CHECKING:
    from kvferry.scheduler_daemon.core.engines import Session


@dataclass(slots=True, eq=False)
class Lease:
    """The hits of one lookup, held for one request."""

    id: int
    owner: "Session"
    request: int
    group: int
    entries: list[Entry]  # READY when leased, in prefix order
    end_ns: int


class Leases:
    """All leases, the one that ends first in front: all live equally long, and a renewal begins anew."""

    __slots__ = ("_by_id", "_given", "_lease_ns")

    def __init__(self, lease_ns: int) -> None:
        self._lease_ns = lease_ns
        self._by_id: OrderedDict[int, Lease] = OrderedDict()
        self._given = 0

    def add(self, owner: "Session", request: int, group: int, entries: list[Entry], now_ns: int) -> Lease:
        """A new lease; the caller pins."""
        self._given += 1
        lease = Lease(self._given, owner, request, group, entries, now_ns + self._lease_ns)
        self._by_id[lease.id] = lease
        return lease

    def get(self, lease: int) -> Lease | None:
        """The lease of this id while it stands."""
        return self._by_id.get(lease)

    def renew(self, lease: Lease, now_ns: int) -> None:
        """It ends a full term from now."""
        lease.end_ns = now_ns + self._lease_ns
        self._by_id.move_to_end(lease.id)

    def remove(self, lease: Lease) -> None:
        """Forget it; the caller unpins."""
        del self._by_id[lease.id]

    def first(self) -> Lease | None:
        """The one that ends first."""
        return next(iter(self._by_id.values()), None)

    def of(self, owner: "Session") -> list[Lease]:
        """All of one owner, oldest first."""
        return [lease for lease in self._by_id.values() if lease.owner is owner]

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._by_id.values())
