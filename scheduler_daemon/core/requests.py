"""What the daemon knows of one attempt of a request: its unended jobs, its leases, and whether it has ended.

A record exists only while it holds something. Ending a request closes it for new work and costs no more
than what it holds; its running stores go on, behind their fences. A preempted request comes back under
another number, so an old job's end is never booked on a new life.

Engines store a chain piece by piece, so its tail becomes READY after its head and would be evicted after
it, when it is of no use to anybody. Therefore a request remembers its chain while it runs, and at its
end the whole chain is touched in prefix order; what is still being stored then goes in behind its parent.
"""

from collections.abc import Iterator

from kvferry.proto.outcome import Kind, Reason
from kvferry.scheduler_daemon.core.index import Entry

# Entries that the chains of one engine's running requests may name, 8 bytes each: a client that never ends its
# requests costs the order of eviction and no more memory than this.
MAX_CHAINED = 1 << 22


class RequestState:
    """One request incarnation."""

    __slots__ = ("chain", "closed", "kind", "leases", "transfer_jobs")

    def __init__(self) -> None:
        self.transfer_jobs: set[int] = set()  # unended: one load, or any number of stores, never both
        self.kind = Kind.STORE  # of those
        self.leases: dict[int, int] = {}  # group -> lease of its last lookup
        self.chain: list[Entry] = []  # what it loaded and stored, in prefix order; may be evicted meanwhile
        self.closed = False

    @property
    def is_busy(self) -> bool:
        """Whether it holds more than a memory."""
        return bool(self.transfer_jobs or self.leases)


class Requests:
    """The request records of one engine incarnation."""

    __slots__ = ("_by_id", "num_chained")

    def __init__(self) -> None:
        self._by_id: dict[int, RequestState] = {}
        self.num_chained = 0

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

    def is_closed(self, request: int) -> bool:
        """Whether the request is known to have ended."""
        state = self._by_id.get(request)
        return state is not None and state.closed

    def begin(self, request: int, job: int, kind: Kind, chain: list[Entry]) -> None:
        """Book an admitted job; `chain` is what the request's chain goes on with."""
        state = self._of(request)
        state.kind = kind
        state.transfer_jobs.add(job)
        if self.num_chained + len(chain) <= MAX_CHAINED:
            state.chain += chain
            self.num_chained += len(chain)

    def ended(self, request: int, job: int) -> None:
        """Strike a job off; the record goes with the last thing it holds."""
        state = self._by_id.get(request)
        if state is not None:
            state.transfer_jobs.discard(job)
            self._sweep(request, state)

    def parent_of(self, request: int, entry: Entry) -> Entry | None:
        """What comes before `entry` in the chain of a request that has ended: its chain was touched already."""
        state = self._by_id.get(request)
        if state is None or not state.closed or entry not in state.chain:
            return None
        at = state.chain.index(entry)
        return state.chain[at - 1] if at else None

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

    def close(self, request: int) -> tuple[list[Entry], list[int]]:
        """End a request: no new work; (the chain to touch, the leases to release). An unknown one leaves no record."""
        state = self._by_id.get(request)
        if state is None:
            return [], []
        state.closed = True
        leases = list(state.leases.values())
        self._sweep(request, state)
        return state.chain, leases

    def jobs_of(self, request: int) -> frozenset[int]:
        """The unended jobs of a request."""
        state = self._by_id.get(request)
        return frozenset(state.transfer_jobs) if state else frozenset()

    @property
    def num_busy(self) -> int:
        """Requests with unended jobs or leases."""
        return sum(state.is_busy for state in self._by_id.values())

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
        if not state.is_busy and (state.closed or not state.chain):
            self.num_chained -= len(state.chain)
            del self._by_id[request]
