"""Item 3: every byte that a layout names is copied, and no other, by each path that there is.

    engine's memory ── random bytes ──▶ store by batch ──▶ slots 0..n ┐ equal, and equal to the
                                    └─▶ store by loop ───▶ slots n..  ┘ reference path's payloads
    memory overwritten ──▶ load by loop from the first, by batch from the second, into other blocks
    then: each byte of the memory, of the slots and of their header pages is what it must be

The twin of the engine's memory is numpy's own view of the strides, which shares nothing with regions and plans. The
layouts are vLLM's six orders; each once padded, and once with a second group over the same bytes, as hybrid
models have it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvferry.client.memory import View, regions_of
from kvferry.gpu_check.copier import payload_of
from kvferry.gpu_check.items_attach import SMALL
from kvferry.gpu_check.results import Failed
from kvferry.gpu_check.stage import LEAD, Stage
from kvferry.gpu_check.talk import Child
from kvferry.gpu_check.views import Bytes, bytes_at
from kvferry.proto.layout import slot_bytes
from kvferry.proto.limits import PAGE_BYTES
from kvferry.proto.outcome import Kind, Outcome

# As tests/worker/layouts.py records them: layers, blocks, heads, tokens, content in bytes.
ORDERS: Final = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
SIZES: Final = {"L": 3, "B": 24, "H": 2, "N": 16, "C": 80}
STATE_BYTES: Final = 304  # of a block of the second group
NUM_AT_ONCE: Final = 5


@dataclass(frozen=True, slots=True)
class Fixture:
    """One group of one layout: its views, as an engine would register them."""

    name: str
    views: tuple[View, ...]

    @property
    def extent(self) -> int:
        """Bytes from the memory's first to behind the group's last."""
        return max(
            view.offset + sum((size - 1) * stride for size, stride in zip(view.sizes, view.strides, strict=True)) + 1
            for view in self.views
        )

    def regions(self) -> list[list[int]]:
        """As the client library describes them."""
        return [[r.offset, r.stride, r.run, r.blocks] for r in regions_of(self.views)[0]]

    def in_memory(self, memory: Bytes) -> list[Bytes]:
        """Each view over the bytes of a whole memory, the dimension of blocks first."""
        return [np.ndarray(view.sizes, np.uint8, memory, view.offset, view.strides) for view in self.views]


def fixtures() -> list[tuple[Fixture, ...]]:
    """The groups of each layout."""
    found: list[tuple[Fixture, ...]] = []
    for order in ORDERS:
        plain, padded = _attention(order, padding=0), _attention(order, padding=512)
        block = plain.views[0].strides[0]
        state = View(0, 0, (SIZES["B"], min(STATE_BYTES, block)), (block, 1), 1)
        found += [(padded,), (plain, Fixture(f"{order} second group", (state,)))]
    return found


def _attention(order: str, padding: int) -> Fixture:
    strides: dict[str, int] = {}
    step = 1
    for dimension in reversed(order):
        if dimension == "B":
            step += padding
        strides[dimension] = step
        step *= SIZES[dimension]
    sizes = tuple(SIZES[d] for d in "BHNC")
    views = tuple(View(0, n * strides["L"], sizes, tuple(strides[d] for d in "BHNC"), 1) for n in range(SIZES["L"]))
    return Fixture(f"{order}{' padded' if padding else ''}", views)


def correctness(stage: Stage, facts: dict[str, Any]) -> str:
    """Item 3: bit for bit."""
    layouts = fixtures()
    rounds = facts["rounds"] = 2 if stage.is_small else 20
    nbytes = -(-max(group.extent for groups in layouts for group in groups) // PAGE_BYTES) * PAGE_BYTES
    pool = stage.make_pool(max(_pool_bytes(group) for groups in layouts for group in groups))
    engine = stage.engine()
    lent = engine.ask("lend", 10, nbytes=nbytes, lead=LEAD)
    pid = engine.ask("about", 5)["pid"]
    ways = ("auto",) if stage.is_cpu else ("batch", "loop")
    copiers = [stage.copier(copies=way) for way in ways]
    for copier in copiers:
        copier.ask("lend", 10, handle=lent["handle"], pid=pid, fds=lent["fds"])
        copier.ask("use_pool", 20, path=str(stage.run_dir.pool(0)))
    bench = _Bench(engine, copiers, bytes_at(pool.base, pool.nbytes), nbytes)
    for groups in layouts:
        for _ in range(rounds):
            for group in groups:
                bench.round(group)
    facts |= {"layouts": [group.name for groups in layouts for group in groups], "paths": list(ways)}
    facts["reference"] = copiers[0].ask("ways", 5)
    facts["paths_in_the_end"] = [copier.ask("describe", 5).get("copies", "cpu") for copier in copiers]
    stage.end_copiers()
    stage.leave()
    _headers(stage)
    count = len(facts["layouts"])
    told = f"{count} groups of {len(layouts)} layouts, {rounds} rounds each: {' = '.join(ways)} = {facts['reference']}"
    refused = ways[0] == "batch" and facts["paths_in_the_end"][0] != "batch"
    return f"{told}; this driver takes no batch: copies go one by one" if refused else told


class _Bench:
    """The memory, the pool, and what must be in both."""

    def __init__(self, engine: Child, copiers: Sequence[Child], pool: Bytes, nbytes: int) -> None:
        self._engine, self._copiers, self._pool, self._nbytes = engine, copiers, pool, nbytes
        self._random = np.random.default_rng(3)

    def round(self, group: Fixture) -> None:
        """Store, overwrite, load, compare all."""
        regions = group.regions()
        payload = sum(run for _, _, run, _ in regions)
        size = slot_bytes(payload)
        paths = [self._copiers[0], self._copiers[-1]]
        blocks = self._random.permutation(SIZES["B"])[: 4 * NUM_AT_ONCE].tolist()
        stored, targets = blocks[:NUM_AT_ONCE], [blocks[NUM_AT_ONCE : 2 * NUM_AT_ONCE], blocks[2 * NUM_AT_ONCE :][:5]]
        places = self._random.permutation(_num_slots(len(paths)))[: len(paths) * NUM_AT_ONCE].tolist()
        slots = [places[:NUM_AT_ONCE], places[NUM_AT_ONCE:]]
        before = self._memory()
        self._pool[:] = self._random.integers(0, 256, len(self._pool), dtype=np.uint8)
        # The file's own header is no slot's; processes that map the pool read it no more.
        due_pool = self._pool.copy()
        for path, where in zip(paths, slots, strict=True):
            path.ask("copy", 30, kind=Kind.STORE, regions=regions, slot_bytes=size, blocks=stored, slots=where)
        reference = paths[0].ask("reference", 30, regions=regions, blocks=stored)
        for where in slots:
            for slot, due in zip(where, reference, strict=True):
                payload_of(due_pool, size, slot, payload)[:] = np.frombuffer(due, dtype=np.uint8)
        if not np.array_equal(self._pool, due_pool):
            at = int(np.flatnonzero(self._pool != due_pool)[0])
            raise Failed(f"{group.name}: after stores byte {at} of the pool is not what the reference path has")
        after = self._memory()
        for path, where, target in zip(reversed(paths), slots, targets, strict=True):
            path.ask("copy", 30, kind=Kind.LOAD, regions=regions, slot_bytes=size, blocks=target, slots=where)
        for old, new in zip(group.in_memory(before), group.in_memory(after), strict=True):
            for target in targets:
                new[target] = old[stored]
        seen = np.frombuffer(self._engine.ask("get", 30, offset=0, nbytes=self._nbytes), dtype=np.uint8)
        if not np.array_equal(seen, after):
            at = int(np.flatnonzero(seen != after)[0])
            raise Failed(f"{group.name}: after loads byte {at} of the engine's memory is wrong")

    def _memory(self) -> Bytes:
        """Fill the engine's memory with new random bytes; they."""
        made = self._random.integers(0, 256, self._nbytes, dtype=np.uint8)
        self._engine.ask("put", 30, offset=0, data=made.tobytes())
        return made


def _headers(stage: Stage) -> None:
    """A real worker writes its generation words into a slot's header page, and nothing else there."""
    with stage.serve(SMALL, 4) as served:
        whole = served.bytes
        whole[PAGE_BYTES:] = 0xC3
        for slot in range(4):
            outcome, generation = served.store(slot, slot)
            if outcome is not Outcome.OK or not served.is_whole(slot, generation):
                raise Failed(f"a store into slot {slot} ended as {outcome.name}, or its header says otherwise")
            start = PAGE_BYTES + slot * served.slot_bytes
            # Magic and the two generations; whatever follows is not the worker's.
            if not (whole[start + 24 : start + PAGE_BYTES] == 0xC3).all():
                raise Failed(f"a store wrote into the header page of slot {slot} behind its words")


def _num_slots(num_paths: int) -> int:
    return 2 * num_paths * NUM_AT_ONCE


def _pool_bytes(group: Fixture) -> int:
    return _num_slots(2) * slot_bytes(sum(run for _, _, run, _ in group.regions()))
