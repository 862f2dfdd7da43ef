"""What the daemon knows of one attempt of a request: its unended jobs, its leases, and whether it has ended.

A record exists only while it holds something. Ending a request closes it for new work and costs no more
than what it holds; its running stores go on, behind their fences. A preempted request comes back under
another number, so an old job's end is never booked on a new life.
"""

from collections.abc import Iterator

from kvferry.proto.outcome import Kind, Reason


class RequestState:
    """One request incarnation."""

    __slots__ = ("closed", "kind", "leases", "transfer_jobs")

    def __init__(self) -> None:
        self.transfer_jobs: set[int] = set()  # unended: one load, or any number of stores, never both
        self.kind = Kind.STORE  # of those
        self.leases: dict[int, int] = {}  # group -> lease of its last lookup
        self.closed = False


class Requests:
    """The request records of one engine incarnation."""

    __slots__ = ("_by_id",)

    def __init__(self) -> None:
        self._by_id: dict[int, RequestState] = {}

    def admits(self, request: int, kind: Kind) -> Reason:
        """NONE if a job of this kind may begin, or the reason why not."""
        state = self._by_id.get(request)
        if state is None:
            return Reason.NONE
        if state.closed:
            return Reason.REQUEST_CLOSED
        if state.transfer_jobs and (kind is Kind.LOAD or state.kind is Kind.LOAD):
            return Reason.LOAD_OR_STORE
        return Reason.NONE

    def begin(self, request: int, job: int, kind: Kind) -> None:
        """Book an admitted job."""
        state = self._of(request)
        state.kind = kind
        state.transfer_jobs.add(job)

    def ended(self, request: int, job: int) -> None:
        """Strike a job off; the record goes with the last thing it holds."""
        state = self._by_id.get(request)
        if state is not None:
            state.transfer_jobs.discard(job)
            self._sweep(request, state)

    def lease(self, request: int, group: int, lease: int) -> None:
        """Book the lease of a lookup."""
        self._of(request).leases[group] = lease

    def lease_of(self, request: int, group: int) -> int:
        """The lease that the request's last lookup of this group took; 0: none."""
        state = self._by_id.get(request)
        return state.leases.get(group, 0) if state else 0

    def unlease(self, request: int, group: int, lease: int) -> None:
        """Strike a lease off."""
        state = self._by_id.get(request)
        if state is not None and state.leases.get(group) == lease:
            del state.leases[group]
            self._sweep(request, state)

    def close(self, request: int) -> tuple[list[int], list[int]]:
        """End a request: no new work; (its unended jobs, its leases). An unknown one leaves no record."""
        state = self._by_id.get(request)
        if state is None:
            return [], []
        state.closed = True
        return sorted(state.transfer_jobs), list(state.leases.values())

    def jobs_of(self, request: int) -> frozenset[int]:
        """The unended jobs of a request."""
        state = self._by_id.get(request)
        return frozenset(state.transfer_jobs) if state else frozenset()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[tuple[int, RequestState]]:
        return iter(self._by_id.items())

    def _of(self, request: int) -> RequestState:
        state = self._by_id.get(request)
        if state is None:
            state = self._by_id[request] = RequestState()
        return state

    def _sweep(self, request: int, state: RequestState) -> None:
        if not state.transfer_jobs and not state.leases:
            del self._by_id[request]
