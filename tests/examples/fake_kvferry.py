"""A kvferry of one process and 100 lines: the client's and the rank client's calls over a dict of numpy-like tensors.

It keeps the contract's hard edges and none of its machinery: words on loads come when the test says so, a store is
published only if nothing overwrote its blocks meanwhile, and calls out of order are assertion errors.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kvferry.client.types import Directive, Hits, JobEnd, LoadEnd, RankReport


@dataclass
class FakeKvferry:
    """What client and ranks share."""

    held: dict[bytes, list[Tensor]] = field(default_factory=dict)  # key -> per layer, its block
    keys: dict[int, list[bytes]] = field(default_factory=dict)  # ticket -> keys
    blocks: dict[int, list[int]] = field(default_factory=dict)  # ticket -> blocks
    log: list[str] = field(default_factory=list)
    hold_answers: int = 0  # so many questions are answered "not yet"
    hold_words: bool = False  # ranks keep the words on loads back
    fail_blocks: int = 0  # the last so many blocks of each load fail


class FakeClient:
    """Stands for kvferry.client.Client."""

    def __init__(self, shared: FakeKvferry) -> None:
        self.shared = shared
        self.asked: dict[str, list[bytes]] = {}
        self.ended: dict[int, bool] = {}  # load ticket -> ok
        self._loads: list[tuple[int, tuple[int, ...]]] = []
        self._stores: list[int] = []
        self._revokes: list[int] = []
        self._open: dict[int, tuple[int, ...]] = {}  # loads not ended: no block of theirs may be given away
        self._steps = 0

    def lookup(self, request: str, keys: Sequence[bytes]) -> None:
        self.asked[request] = list(keys)

    def hits(self, request: str) -> Hits:
        if self.shared.hold_answers:
            self.shared.hold_answers -= 1
            return Hits(ready=False)
        count = 0
        for key in self.asked[request]:
            if key not in self.shared.held:
                break
            count += 1
        return Hits(ready=True, count=count)

    def written(self, blocks: Iterable[int]) -> frozenset[int]:
        given = set(blocks)
        for ticket, theirs in self._open.items():
            assert not given & set(theirs), f"blocks of load {ticket} were given away before its end"
        hit = frozenset(t for t in self._stores if given & set(self.shared.blocks[t]))
        self._stores = [t for t in self._stores if t not in hit]
        return hit

    def load(self, request: str, keys: Sequence[bytes], blocks: Sequence[int]) -> int:
        assert list(keys) == self.asked[request][self.asked[request].index(keys[0]) :][: len(keys)]
        ticket = self._note(keys, blocks)
        self._loads.append((ticket, tuple(blocks)))
        self._open[ticket] = tuple(blocks)
        return ticket

    def store(self, request: str, keys: Sequence[bytes], blocks: Sequence[int]) -> int:
        assert len(keys) == len(blocks) > 0
        ticket = self._note(keys, blocks)
        self._stores.append(ticket)
        return ticket

    def load_ended(self, ticket: int, ok: bool) -> None:
        del self._open[ticket]
        self.ended[ticket] = ok

    def cancel(self, ticket: int) -> None:
        self.shared.log.append(f"cancel {ticket}")

    def forget(self, request: str) -> None:
        self.shared.log.append(f"forget {request}")

    def finish(self, request: str) -> None:
        self.shared.log.append(f"finish {request}")

    def abort(self, request: str) -> None:
        self.shared.log.append(f"abort {request}")

    def preempt(self, request: str) -> None:
        self.shared.log.append(f"preempt {request}")

    def poll(self) -> list[JobEnd]:
        return []

    def end_step(self) -> Directive:
        self._steps += 1
        directive = Directive(self._steps, tuple(self._loads), tuple(self._stores))
        self._loads, self._stores = [], []
        return directive

    def _note(self, keys: Sequence[bytes], blocks: Sequence[int]) -> int:
        ticket = len(self.shared.keys) + 1
        self.shared.keys[ticket], self.shared.blocks[ticket] = list(keys), list(blocks)
        return ticket


class FakeRank:
    """Stands for kvferry.client.RankClient."""

    def __init__(self, shared: FakeKvferry, cache: Sequence[Tensor]) -> None:
        self.shared = shared
        self._cache = cache
        self._words: list[LoadEnd] = []

    def revoke(self, directive: Directive) -> None:
        pass  # stores are copied at once: there is nothing to lose

    def begin_loads(self, directive: Directive) -> None:
        for ticket, blocks in directive.loads:
            good = len(blocks) - self.shared.fail_blocks
            for i, (key, block) in enumerate(zip(self.shared.keys[ticket], blocks, strict=True)):
                for layer, kept in zip(self._cache, self.shared.held[key], strict=True):
                    # A failed load may leave anything behind.
                    layer[block] = kept if i < good else float("nan")
            self._words.append(LoadEnd(ticket, good == len(blocks), blocks[good:]))

    def begin_stores(self, directive: Directive) -> None:
        for ticket in directive.stores:
            for key, block in zip(self.shared.keys[ticket], self.shared.blocks[ticket], strict=True):
                self.shared.held.setdefault(key, [layer[block].clone() for layer in self._cache])

    def poll(self) -> RankReport:
        if self.shared.hold_words:
            return RankReport()
        words, self._words = tuple(self._words), []
        return RankReport(loads=words)
