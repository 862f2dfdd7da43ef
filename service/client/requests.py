"""The engine's requests by name, and the numbers under which the daemon knows their attempts. Sans-IO.

One incarnation carries one load or any stores, never both. An engine need not know: each direction of a
request has an incarnation of its own, a load uses its one up, and a preemption makes all of them anew. No
number is ever used twice, so an old job's end is never booked on a new life of the same name.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Request:
    """One name, from its first mention to its end."""

    name: str
    load: int = 0  # incarnation of the lookup and the load that follows it; 0: none yet
    store: int = 0
    told: list[int] = field(default_factory=list)  # live incarnations that the daemon may have heard of
    loads: set[int] = field(default_factory=set)  # tickets without all ranks' words
    is_failed: bool = False  # a load of it failed: no more hits, or it might fail for ever


class Requests:
    """All live requests of one client."""

    def __init__(self) -> None:
        self._by_name: dict[str, Request] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._by_name)

    def get(self, name: str) -> Request | None:
        return self._by_name.get(name)

    def of(self, name: str) -> Request:
        """The request of that name, begun now if it is new."""
        request = self._by_name.get(name)
        if request is None:
            request = self._by_name[name] = Request(name)
        return request

    def pop(self, name: str) -> Request | None:
        """The request ends; None if it was not known."""
        return self._by_name.pop(name, None)

    def for_lookup(self, request: Request) -> int:
        """The incarnation that looks up, and then loads."""
        request.load = request.load or self._new(request)
        return request.load

    def for_load(self, request: Request) -> int:
        """As `for_lookup`, and used up: the next lookup or load is a new attempt."""
        incarnation = self.for_lookup(request)
        request.load = 0
        return incarnation

    def for_store(self, request: Request) -> int:
        """The incarnation that stores."""
        request.store = request.store or self._new(request)
        return request.store

    def end_attempts(self, request: Request) -> list[int]:
        """All its incarnations end; their numbers."""
        ended, request.told = request.told, []
        request.load = request.store = 0
        return ended

    def _new(self, request: Request) -> int:
        self._last += 1
        request.told.append(self._last)
        return self._last
