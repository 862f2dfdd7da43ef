"""The pool, its index and its Lru against an ordered list that a child could check."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.scheduler_daemon.core.index import Entry, KeyIndex, Lru
from kvferry.scheduler_daemon.core.pool import HostPool

NAMESPACE = bytes(16)
SLOTS = 6


class Twin:
    """Keys in a list, the next to be evicted first; pinned keys and running stores beside it."""

    def __init__(self) -> None:
        self.order: list[bytes] = []
        self.pins: dict[bytes, int] = {}
        self.writing: dict[int, list[bytes]] = {}
        self.dropped = 0

    @property
    def ready(self) -> set[bytes]:
        return {*self.order, *self.pins}

    @property
    def room(self) -> int:
        return SLOTS - len(self.pins) - sum(map(len, self.writing.values())) - self.dropped

    def touch(self, chain: list[bytes]) -> None:
        for key in reversed(chain):
            if key in self.order:
                self.order.remove(key)
                self.order.append(key)

    def store(self, chain: list[bytes], job: int) -> list[bytes]:
        """The keys that the job copies."""
        coming = {key for keys in self.writing.values() for key in keys}
        missing: list[bytes] = []
        kept: list[bytes] = []
        needed = 0
        for key in chain:
            if key in self.ready:
                if key in self.order:
                    if missing and needed >= self.room:
                        break
                    needed += 1
                kept.append(key)
            elif key not in coming and key not in missing:
                if needed >= self.room:
                    break
                missing.append(key)
                needed += 1
        self.touch(kept)
        free = self.room - len(self.order)
        for _ in range(len(missing) - free):
            del self.order[0]
        if missing:
            self.writing[job] = missing
        return missing

    def end(self, job: int, ok: bool) -> None:
        keys = self.writing.pop(job)
        if ok:
            self.order += reversed(keys)

    def pin(self, chain: list[bytes]) -> list[bytes]:
        hits = []
        for key in chain:
            if key not in self.ready:
                break
            hits.append(key)
        for key in hits:
            if key in self.order:
                self.order.remove(key)
            self.pins[key] = self.pins.get(key, 0) + 1
        return hits

    def unpin(self, keys: list[bytes]) -> None:
        for key in reversed(keys):
            self.pins[key] -= 1
            if not self.pins[key]:
                del self.pins[key]
                self.order.append(key)


CHAINS = st.lists(st.integers(0, 9), min_size=1, max_size=5).map(lambda names: [bytes([n, n % 3]) for n in names])
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("store"), CHAINS),
        st.tuples(st.just("pin"), CHAINS),
        st.tuples(st.sampled_from(["publish", "fail", "unpin", "unpin"]), st.integers(0, 9)),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(MOVES)
def test_the_pool_does_what_an_ordered_list_does(moves):
    pool, index, twin = HostPool(SLOTS), KeyIndex(), Twin()
    running: dict[int, list[Entry]] = {}
    pinned: list[list[Entry]] = []
    for number, (move, what) in enumerate(moves, start=1):
        if move == "store":
            survey = pool.survey(index, what, 1 << 30)
            copied = [what[at] for at in survey.missing]
            assert copied == twin.store(what, number)
            if copied:
                running[number] = pool.reserve(index, copied, survey.held, number)
                slots = np.array([entry.slot for entry in running[number]], dtype=np.uint32)
                pool.slots.write(slots, copied, key_bytes=2, groups=0, namespace=NAMESPACE, epoch=0, payload_bytes=1)
            else:
                pool.lru.touch(survey.held)
        elif move == "pin":
            hits, _ = index.leading(what)
            assert [entry.key for entry in hits] == twin.pin(what)
            pool.pin(hits)
            pinned.append(hits)
        elif move == "unpin":
            if pinned:
                entries = pinned.pop(what % len(pinned))
                twin.unpin([entry.key for entry in entries])
                pool.unpin(entries)
        elif running:
            job = sorted(running)[what % len(running)]
            entries = running.pop(job)
            slots = np.array([entry.slot for entry in entries], dtype=np.uint32)
            if move == "publish":
                pool.publish(entries, slots)
            else:
                pool.abandon(entries, slots)
                pool.let_go(slots)
            twin.end(job, move == "publish")
        pool.slots.check()
        assert [entry.key for entry in pool.lru] == twin.order
        assert pool.num_pinned == len(twin.pins)
        assert {entry.key for entry in index if not entry.job} == twin.ready
        assert pool.slots.num_free + pool.lru.num == twin.room


@given(
    st.lists(st.tuples(st.sampled_from(["push", "chain", "unlink", "touch", "pop"]), st.integers(0, 5)), max_size=60)
)
def test_the_lru_is_an_ordered_list(moves):
    lru, twin = Lru(), []
    entries = [Entry(KeyIndex(), bytes([n]), n, 0) for n in range(6)]
    for move, n in moves:
        if move == "push" and n not in twin:
            lru.push(entries[n])
            twin.append(n)
        elif move == "chain":
            chain = [m for m in range(n, 6) if m not in twin]
            parent = (n * 5 + 2) % 6
            lru.push_chain([entries[m] for m in chain], entries[parent])
            at = twin.index(parent) if parent in twin else len(twin)
            twin[at:at] = reversed(chain)
        elif move == "unlink" and n in twin:
            lru.unlink(entries[n])
            twin.remove(n)
        elif move == "touch":
            chain = [n, (n + 1) % 6, (n + 2) % 6]
            lru.touch([entries[m] for m in chain])
            for m in reversed(chain):
                if m in twin:
                    twin.remove(m)
                    twin.append(m)
        elif move == "pop" and n <= len(twin):
            assert [entry.slot for entry in lru.pop(n)] == twin[:n]
            del twin[:n]
        assert [entry.slot for entry in lru] == twin and lru.num == len(twin)


@given(st.lists(st.tuples(st.booleans(), st.binary(min_size=1, max_size=3)), max_size=60))
def test_the_sharded_index_is_a_dict(moves):
    index, twin = KeyIndex(), {}
    for slot, (adding, key) in enumerate(moves):
        if adding and key not in twin:
            [twin[key]] = index.add([key], [slot], 1)
        elif not adding and key in twin:
            index.remove(twin.pop(key))
    assert index.find([key for _, key in moves]) == [twin.get(key) for _, key in moves]
    assert index.num == len(twin) == len(list(index))
