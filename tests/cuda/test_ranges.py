"""Copies are cut where registrations meet, and nowhere else; no byte is lost, moved or copied twice."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.gpu_worker.devices.base import MAX_DESCRIPTORS, PlanError
from kvferry.gpu_worker.devices.ranges import Ranges, Stretch, joined
from kvferry.gpu_worker.layout import Planner
from kvferry.proto.layout import Group, Region, slot_bytes
from kvferry.proto.limits import PAGE_BYTES
from kvferry.proto.outcome import Kind

POOL, ENGINE = 1 << 40, 1 << 44


def column(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.uint64)


def chunks(nbytes: int, chunk_bytes: int, shift: int = 0) -> list[Stretch]:
    return [Stretch(POOL + at, min(chunk_bytes, nbytes - at), shift) for at in range(0, nbytes, chunk_bytes)]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_descriptor_never_crosses_a_registration_chunk_and_every_byte_goes_where_it_would(data):
    """Any slots over any chunks: cut descriptors, replayed byte by byte, do what the uncut ones do."""
    run = data.draw(st.integers(1, 40_000), label="bytes of a block's run")
    num_regions = data.draw(st.integers(1, 3), label="regions")
    chunk = data.draw(st.integers(1, 40), label="chunk in pages") * PAGE_BYTES
    num_slots = data.draw(st.integers(1, 6), label="slots")
    shift = data.draw(st.sampled_from([0, 1 << 46, -(1 << 39)]), label="where the device sees the pool")
    blocks = 8
    regions = tuple(
        Region(handle=0, offset=r * blocks * run, stride=run, run=run, blocks=blocks) for r in range(num_regions)
    )
    group = Group(regions=regions, block_tokens=16)
    pool_bytes = PAGE_BYTES + num_slots * slot_bytes(group.payload_bytes)
    planner = Planner(group, [ENGINE], POOL + PAGE_BYTES, group.slot_bytes, num_slots)
    slots = np.array(data.draw(st.permutations(range(num_slots))), dtype=np.uint32)
    chosen = np.array(data.draw(st.permutations(range(blocks)))[: len(slots)], dtype=np.uint32)
    ranges = Ranges(chunks(pool_bytes, chunk, shift))
    for plan in planner.plan(chosen, slots, Kind.STORE):
        near, far, size = ranges.cut(plan.dst, plan.src, plan.size, "pool")
        near = (near.view(np.int64) - shift).view(np.uint64) - np.uint64(POOL)
        assert size.all() and (near // np.uint64(chunk) == (near + size - np.uint64(1)) // np.uint64(chunk)).all()
        assert bytes_of(near, far, size) == bytes_of(plan.dst - np.uint64(POOL), plan.src, plan.size)
        # A header page is never touched, cut or not.
        in_slot = (near - np.uint64(PAGE_BYTES)) % np.uint64(group.slot_bytes)
        assert (in_slot >= PAGE_BYTES).all()


def bytes_of(near: np.ndarray, far: np.ndarray, size: np.ndarray) -> list[tuple[int, int, int]]:
    """Descriptors with those that touch on both sides joined: what they do, however they are cut."""
    joined_up: list[tuple[int, int, int]] = []
    for a, b, n in zip(near.tolist(), far.tolist(), size.tolist(), strict=True):
        if joined_up and joined_up[-1][0] + joined_up[-1][2] == a and joined_up[-1][1] + joined_up[-1][2] == b:
            a, b, n = joined_up[-1][0], joined_up[-1][1], joined_up[-1][2] + n
            joined_up.pop()
        joined_up.append((a, b, n))
    return joined_up


def test_a_copy_over_several_chunks_is_cut_at_each():
    near, far, size = Ranges(chunks(1000, 100)).cut(column(POOL + 50), column(7000), column(320), "pool")
    assert (near - np.uint64(POOL)).tolist() == [50, 100, 200, 300]
    assert far.tolist() == [7000, 7050, 7150, 7250]
    assert size.tolist() == [50, 100, 100, 70]


def test_what_crosses_nothing_is_handed_on_as_it_is():
    near, far, size = column(POOL, POOL + 200), column(1, 2), column(100, 100)
    same = Ranges(chunks(1000, 100)).cut(near, far, size, "pool")
    assert all(a is b for a, b in zip(same, (near, far, size), strict=True))


def test_cutting_leaves_the_callers_arrays_alone():
    near, far, size = column(POOL + 50), column(7000), column(320)
    Ranges(chunks(1000, 100)).cut(near, far, size, "pool")
    assert (near.tolist(), far.tolist(), size.tolist()) == ([POOL + 50], [7000], [320])


def test_the_most_descriptors_of_a_plan_may_become_more_than_one_call_takes():
    """The device hands them over in several calls; the order is kept."""
    count = MAX_DESCRIPTORS
    near = POOL + np.arange(count, dtype=np.uint64) * np.uint64(100) + np.uint64(50)
    near, _far, size = Ranges(chunks(1 << 20, 100)).cut(near, near, np.full(count, 60, dtype=np.uint64), "pool")
    assert len(size) == 2 * count and size.tolist() == [50, 10] * count


@pytest.mark.parametrize(
    "start, size", [(POOL - 1, 8), (POOL + 996, 8), (POOL + 1000, 1), (0, 8), (POOL, 1001)]
)  # fmt: skip
def test_what_lies_outside_is_refused(start, size):
    ranges = Ranges(chunks(1000, 100))
    for ask in (
        lambda: ranges.cut(column(start), column(1), column(size), "the pool"),
        lambda: ranges.check(column(start), column(size), "the pool"),
        lambda: Ranges().check(column(start), column(size), "the pool"),
    ):
        with pytest.raises(PlanError, match="the pool"):
            ask()


def test_a_check_lets_nothing_cross():
    """On the engine's side each stretch is one allocation: what leaves it goes astray, and is no case for a cut."""
    ranges = Ranges(chunks(1000, 100))
    ranges.check(column(POOL, POOL + 199), column(100, 1), "the engine's memory")
    with pytest.raises(PlanError):
        ranges.check(column(POOL + 50), column(51), "the engine's memory")


def test_overlapping_parts_of_one_allocation_are_one_stretch():
    parts = [Stretch(0, 100), Stretch(50, 100), Stretch(150, 10), Stretch(300, 10), Stretch(20, 10)]
    assert joined(parts) == [Stretch(0, 160), Stretch(300, 10)]
