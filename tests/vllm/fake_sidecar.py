"""A sidecar of one process whose copies happen when a seed says so, over a GPU that is a dictionary.

    memory[block] = what the engine wrote there: for each token the hash of the prefix up to it

A store reads its blocks at some moment after it was begun, and is published only if no rank had revoked it by
then. A load writes at some moment after it was begun. So whatever order vLLM and the connector get wrong shows
as a wrong value in some block, on some seed.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvferry.client.types import Directive, Hits, JobEnd, LoadEnd, RankReport
from kvferry.proto.outcome import Kind, Outcome

Content = tuple[int, ...]


@dataclass
class Job:
    """A store or load of the fake."""

    ticket: int
    request: str
    kind: Kind
    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]
    waiting: set[int] = field(default_factory=set)  # ranks that have not copied yet
    begun: set[int] = field(default_factory=set)
    parts: dict[int, list[Content]] = field(default_factory=dict)  # rank -> what it read
    is_revoked: bool = False
    is_failed: bool = False


class FakeSidecar:
    """What clients and ranks of one test share; `tick` moves copies on."""

    def __init__(self, seed: int, num_ranks: int = 1, fail_one_in: int = 0) -> None:
        self.rng = random.Random(seed)
        self.num_ranks = num_ranks
        self.fail_one_in = fail_one_in
        self.memories: list[dict[int, Content]] = [{} for _ in range(num_ranks)]
        self.held: dict[bytes, list[Content]] = {}
        self.jobs: dict[int, Job] = {}
        self.words: list[list[LoadEnd]] = [[] for _ in range(num_ranks)]
        self.ends: list[JobEnd] = []
        self.published = self.revoked = self.loaded = self.failed = 0
        self.last_ticket = 0
        self.lateness = 0  # chance in percent that an answer is not there yet

    def tick(self) -> None:
        """Some copies of some ranks happen now."""
        for job in list(self.jobs.values()):
            for rank in sorted(job.begun & job.waiting):
                if self.rng.random() < 0.3:
                    self._copy(job, rank)

    def settle(self) -> None:
        """All copies that were begun happen."""
        for job in list(self.jobs.values()):
            for rank in sorted(job.begun & job.waiting):
                self._copy(job, rank)

    def _copy(self, job: Job, rank: int) -> None:
        memory = self.memories[rank]
        job.waiting.discard(rank)
        if job.kind is Kind.STORE:
            job.parts[rank] = [memory.get(block, ()) for block in job.blocks]
        else:
            bad = self.fail_one_in and self.rng.randrange(self.fail_one_in) == 0
            good = self.rng.randrange(len(job.blocks)) if bad else len(job.blocks)
            for i, (key, block) in enumerate(zip(job.keys, job.blocks, strict=True)):
                memory[block] = self.held[key][rank] if i < good else (-1,) * 8  # a failed load may leave anything
            job.is_failed |= bool(bad)
            self.words[rank].append(LoadEnd(job.ticket, good == len(job.blocks), job.blocks[good:]))
        if not job.waiting:
            self._end(job)

    def _end(self, job: Job) -> None:
        del self.jobs[job.ticket]
        outcome = Outcome.REVOKED if job.is_revoked else Outcome.COPY_FAILED if job.is_failed else Outcome.OK
        if job.kind is Kind.STORE and outcome is Outcome.OK:
            self.published += len(job.keys)
            for i, key in enumerate(job.keys):
                self.held[key] = [job.parts[rank][i] for rank in range(self.num_ranks)]
        self.revoked += job.kind is Kind.STORE and job.is_revoked
        self.loaded += job.kind is Kind.LOAD and not job.is_failed
        self.failed += job.kind is Kind.LOAD and job.is_failed
        self.ends.append(JobEnd(job.ticket, job.request, job.kind, outcome, accepted=len(job.keys)))


class FakeClient:
    """Stands for `kvferry.Client`."""

    def __init__(self, shared: FakeSidecar) -> None:
        self.shared = shared
        self.attached = True
        self.asked: dict[str, list[bytes]] = {}
        self.salt = b""
        self.told: dict[int, bool] = {}  # load tickets whose words came, and whether all were good
        self.closed = False
        self.idle_s = 0.0  # how long the last question might wait beyond its budget
        self._stores: list[int] = []
        self._loads: list[int] = []
        self._revokes: set[int] = set()
        self._steps = 0

    def lookup(self, request: str, keys: Sequence[bytes] | bytes, *, group: int = 0) -> None:
        self.asked[request] = [self.salt + key for key in keys]  # type: ignore[operator]

    def hits(self, request: str, *, idle_s: float = 0.0) -> Hits:
        self.idle_s = idle_s
        if self.shared.rng.randrange(100) < self.shared.lateness:
            return Hits(ready=False)
        count = 0
        for key in self.asked.get(request, ()):
            if key not in self.shared.held:
                break
            count += 1
        return Hits(True, count)

    def load(self, request: str, keys: Sequence[bytes] | bytes, blocks: Sequence[int], *, group: int = 0) -> int:
        assert len(keys) == len(blocks) > 0
        job = self._job(request, Kind.LOAD, keys, blocks)
        assert all(key in self.shared.held for key in job.keys)
        for other in self.shared.jobs.values():
            both = set(job.blocks) & set(other.blocks)
            assert other is job or other.kind is Kind.STORE or not both, "two loads into one block"
        self._loads.append(job.ticket)
        self.asked.pop(request, None)
        return job.ticket

    def store(self, request: str, keys: Sequence[bytes] | bytes, blocks: Sequence[int], *, group: int = 0) -> int:
        assert len(keys) == len(blocks) > 0
        assert 0 not in blocks, "the null block was stored"
        job = self._job(request, Kind.STORE, keys, blocks)
        self._stores.append(job.ticket)
        return job.ticket

    def written(self, blocks: Iterable[int]) -> frozenset[int]:
        given = set(blocks)
        for job in self.shared.jobs.values():
            if job.kind is Kind.LOAD and job.ticket not in self._loads:
                assert not given & set(job.blocks), f"blocks of load {job.ticket} were given away before its end"
        hit = {j.ticket for j in self.shared.jobs.values() if j.kind is Kind.STORE and given & set(j.blocks)}
        self._revoke(hit)
        return frozenset(hit)

    def rotate(self, salt: bytes) -> None:
        self.salt = salt
        self.asked.clear()
        self._revoke({job.ticket for job in self.shared.jobs.values() if job.kind is Kind.STORE})

    def forget(self, request: str) -> None:
        self.asked.pop(request, None)

    def finish(self, request: str) -> None:
        self.asked.pop(request, None)

    abort = preempt = finish

    def load_ended(self, ticket: int, ok: bool) -> None:
        assert ticket not in self.told, "a load ended twice"
        self.told[ticket] = ok

    def poll(self) -> list[JobEnd]:
        ends, self.shared.ends = self.shared.ends, []
        return ends

    def end_step(self) -> Directive:
        self._steps += 1
        loads = tuple((ticket, self.shared.jobs[ticket].blocks) for ticket in self._loads)
        directive = Directive(self._steps, loads, tuple(self._stores), tuple(sorted(self._revokes)))
        self._loads, self._stores, self._revokes = [], [], set()
        return directive

    def close(self) -> None:
        self.closed = True

    def _revoke(self, tickets: set[int]) -> None:
        for ticket in tickets:
            if ticket in self._stores:  # no rank has heard of it
                self._stores.remove(ticket)
                self.shared.jobs.pop(ticket)
            else:
                self._revokes.add(ticket)

    def _job(self, request: str, kind: Kind, keys: Sequence[bytes] | bytes, blocks: Sequence[int]) -> Job:
        self.shared.last_ticket += 1
        salted = tuple(self.salt + key for key in keys)  # type: ignore[operator]
        ranks = set(range(self.shared.num_ranks))
        job = Job(self.shared.last_ticket, request, kind, salted, tuple(blocks), ranks)
        self.shared.jobs[job.ticket] = job
        return job


class FakeRankClient:
    """Stands for `kvferry.RankClient`."""

    def __init__(self, shared: FakeSidecar, rank: int) -> None:
        self.shared, self.rank = shared, rank
        self.closed = False
        self.holding = False

    def revoke(self, directive: Directive) -> None:
        for ticket in directive.revokes:
            if ticket in self.shared.jobs:
                self.shared.jobs[ticket].is_revoked = True

    def begin_loads(self, directive: Directive) -> None:
        for ticket, _ in directive.loads:
            self.shared.jobs[ticket].begun.add(self.rank)
        for ticket, blocks in directive.failed_loads:
            self.shared.words[self.rank].append(LoadEnd(ticket, False, blocks))

    def begin_stores(self, directive: Directive) -> None:
        for ticket in directive.stores:
            if ticket in self.shared.jobs:
                self.shared.jobs[ticket].begun.add(self.rank)

    def wait(self, timeout_s: float) -> None:
        self.shared.tick()

    def poll(self) -> RankReport:
        words, self.shared.words[self.rank] = tuple(self.shared.words[self.rank]), []
        return RankReport(loads=words)

    @property
    def open_loads(self) -> frozenset[int]:
        jobs = self.shared.jobs.items()
        return frozenset(t for t, job in jobs if job.kind is Kind.LOAD and self.rank in job.begun & job.waiting)

    def close(self, wait_s: float = 1.0) -> None:
        self.closed = True


class HoldingRankClient(FakeRankClient):
    """Stands for a `kvferry.RankClient` whose device cannot write marks: begins wait for a later poll, or for more."""

    def __init__(self, shared: FakeSidecar, rank: int) -> None:
        super().__init__(shared, rank)
        self.held: list[int] = []

    def revoke(self, directive: Directive) -> None:
        super().revoke(directive)
        for ticket in directive.revokes:
            if ticket in self.held:  # withdrawn: no worker reads for it; the daemon ends the job
                self.held.remove(ticket)
                self.shared.jobs[ticket].begun.add(self.rank)

    def begin_loads(self, directive: Directive) -> None:
        super().begin_loads(Directive(directive.step, failed_loads=directive.failed_loads))
        self.held += [ticket for ticket, _ in directive.loads]
        self.holding = bool(self.held)

    def begin_stores(self, directive: Directive) -> None:
        self.held += [ticket for ticket in directive.stores if ticket in self.shared.jobs]
        self.holding = bool(self.held)

    @property
    def open_loads(self) -> frozenset[int]:
        return super().open_loads | (set(self.held) & {t for t, j in self.shared.jobs.items() if j.kind is Kind.LOAD})

    def poll(self) -> RankReport:
        passed = self.shared.rng.randrange(len(self.held) + 1)
        for ticket in self.held[:passed]:
            if ticket in self.shared.jobs:
                self.shared.jobs[ticket].begun.add(self.rank)
        del self.held[:passed]
        self.holding = bool(self.held)
        return super().poll()
