"""The planner: exact bytes, never a header page, never too much at once."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.gpu_worker.devices.base import MAX_DESCRIPTORS, MAX_PLAN_BYTES, CopyPlan, PlanError
from kvferry.gpu_worker.devices.pieces import CHUNK_BYTES, chunks_of, pieces_of
from kvferry.gpu_worker.layout import Planner, coalesce, split
from kvferry.proto.layout import Group, Region
from kvferry.proto.limits import PAGE_BYTES
from kvferry.proto.outcome import Kind
from tests.worker.layouts import RECORDED, Recorded

NUM_SLOTS = 9
POOL_BASE = 1 << 32  # far from the engine's bytes, which begin at address 0 here


def u32s(values) -> np.ndarray:
    return np.asarray(values, dtype=np.uint32)


def bytes_of(addresses, sizes) -> np.ndarray:
    """Every byte address of these ranges, in order."""
    return np.concatenate([np.arange(int(a), int(a) + int(s)) for a, s in zip(addresses, sizes, strict=True)])


def planner_of(layout: Recorded) -> Planner:
    group = layout.group()
    return Planner(group, [0], POOL_BASE, group.slot_bytes, NUM_SLOTS)


@st.composite
def jobs(draw):
    """(layout, blocks, slots): distinct pairs in any order."""
    layout = draw(st.sampled_from(RECORDED))
    count = draw(st.integers(1, 7))
    blocks = draw(st.permutations(range(layout.sizes[1])))[:count]
    slots = draw(st.permutations(range(NUM_SLOTS)))[:count]
    return layout, u32s(blocks), u32s(slots)


@given(jobs(), st.sampled_from(Kind))
@settings(max_examples=150, deadline=None)
def test_exactly_the_bytes_of_the_blocks_move_to_and_from_the_payloads(job, kind):
    layout, blocks, slots = job
    plans = planner_of(layout).plan(blocks, slots, kind)
    src = np.concatenate([bytes_of(p.src, p.size) for p in plans])
    dst = np.concatenate([bytes_of(p.dst, p.size) for p in plans])
    engine, pool = (src, dst) if kind is Kind.STORE else (dst, src)
    expected_engine = np.concatenate([layout.block_bytes(int(block)) for block in blocks])
    payload, slot_bytes = layout.group().payload_bytes, layout.group().slot_bytes
    starts = [POOL_BASE + int(slot) * slot_bytes + PAGE_BYTES for slot in slots]
    assert np.array_equal(engine, expected_engine)
    assert np.array_equal(pool, bytes_of(starts, [payload] * len(slots)))


@given(jobs(), st.sampled_from(Kind))
@settings(max_examples=50, deadline=None)
def test_no_descriptor_touches_a_header_page_or_overlaps_another(job, kind):
    layout, blocks, slots = job
    slot_bytes = layout.group().slot_bytes
    for p in planner_of(layout).plan(blocks, slots, kind):
        pool = p.dst if kind is Kind.STORE else p.src
        within = (pool - np.uint64(POOL_BASE)) % np.uint64(slot_bytes)
        assert (within >= PAGE_BYTES).all() and (within + p.size <= slot_bytes).all()
        assert p.size.all()
        order = np.argsort(p.dst)
        assert (p.dst[order][:-1] + p.size[order][:-1] <= p.dst[order][1:]).all()


@given(
    st.lists(
        st.one_of(st.integers(1, 100), st.integers(MAX_PLAN_BYTES // 5, MAX_PLAN_BYTES * 2)), min_size=1, max_size=60
    )
)
@settings(max_examples=100, deadline=None)
def test_batches_keep_the_limits_and_the_order(sizes):
    size = np.array(sizes, dtype=np.uint64)
    src = np.arange(len(sizes), dtype=np.uint64) << np.uint64(40)
    plans = split(src, src, size)
    assert np.array_equal(np.concatenate([p.src for p in plans]), src)
    assert np.array_equal(np.concatenate([p.size for p in plans]), size)
    for p in plans:
        assert len(p.size) == 1 or p.nbytes <= MAX_PLAN_BYTES
    # No batch could have taken the first descriptor of the next one.
    for one, two in itertools.pairwise(plans):
        assert one.nbytes + int(two.size[0]) > MAX_PLAN_BYTES


def test_no_batch_has_more_descriptors_than_the_limit():
    size = np.full(3 * MAX_DESCRIPTORS + 1, 8, dtype=np.uint64)
    src = np.arange(len(size), dtype=np.uint64) * np.uint64(100)
    assert [len(p.size) for p in split(src, src, size)] == [MAX_DESCRIPTORS] * 3 + [1]


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.booleans()), min_size=1, max_size=30))
@settings(max_examples=100, deadline=None)
def test_joining_neighbours_changes_no_byte_and_leaves_none_to_join(rows):
    """Each row: a size, and whether it touches the one before it in source and destination."""
    src, dst, at = [], [], [0, 10_000]
    for size, touches_src, touches_dst in rows:
        at = [at[0] + (0 if touches_src else 3), at[1] + (0 if touches_dst else 3)]
        src.append(at[0])
        dst.append(at[1])
        at = [at[0] + size, at[1] + size]
    size = np.array([row[0] for row in rows], dtype=np.uint64)
    src, dst = np.array(src, dtype=np.uint64), np.array(dst, dtype=np.uint64)
    joined = coalesce(src, dst, size)
    assert np.array_equal(bytes_of(joined[0], joined[2]), bytes_of(src, size))
    assert np.array_equal(bytes_of(joined[1], joined[2]), bytes_of(dst, size))
    assert len(joined[2]) == 1 + sum(not (a and b) for _, a, b in rows[1:])


@pytest.mark.parametrize("layout", RECORDED, ids=lambda layout: layout.name)
def test_a_block_takes_as_few_descriptors_as_its_runs(layout):
    (p,) = planner_of(layout).plan(u32s([3]), u32s([2]), Kind.STORE)
    heads_apart = layout.name == "LHBNC"
    expected = {"BLHNC": 1, "BLNHC": 1, "BHLNC": 1}.get(layout.name, 6 if heads_apart else 3)
    assert len(p.size) == expected


def test_a_run_larger_than_a_batch_goes_alone():
    """One block of 40 MiB between two small regions."""
    big = 40 << 20
    regions = (
        Region(handle=0, offset=0, stride=big + 200, run=100, blocks=2),
        Region(handle=1, offset=0, stride=big, run=big, blocks=2),
        Region(handle=0, offset=big, stride=big + 200, run=100, blocks=2),
    )
    group = Group(regions=regions, block_tokens=16)
    plans = Planner(group, [0, 1 << 33], POOL_BASE, group.slot_bytes, 2).plan(u32s([1]), u32s([0]), Kind.LOAD)
    assert [p.size.tolist() for p in plans] == [[100], [big], [100]]


@pytest.mark.parametrize(
    ("blocks", "slots", "kind"),
    [
        ([7], [0], Kind.STORE),
        ([0], [9], Kind.STORE),
        ([0, 1], [0], Kind.STORE),
        ([1, 1], [0, 1], Kind.LOAD),
        ([0, 1], [2, 2], Kind.STORE),
    ],
)
def test_nonsense_is_refused_and_never_clamped(blocks, slots, kind):
    with pytest.raises(PlanError):
        planner_of(RECORDED[0]).plan(u32s(blocks), u32s(slots), kind)


def test_a_payload_that_does_not_fit_its_slot_is_refused():
    group = RECORDED[0].group()
    with pytest.raises(PlanError):
        Planner(group, [0], POOL_BASE, group.slot_bytes - PAGE_BYTES, NUM_SLOTS)
    with pytest.raises(PlanError):
        Planner(group, [], POOL_BASE, group.slot_bytes, NUM_SLOTS)


def test_no_blocks_are_no_plans():
    assert planner_of(RECORDED[0]).plan(u32s([]), u32s([]), Kind.STORE) == []


@st.composite
def descriptors(draw):
    """Stretches of equal steps, broken at random; some runs longer than a chunk."""
    src, dst, size = [], [], []
    at = [0, 1 << 45]
    for _ in range(draw(st.integers(1, 6))):
        run = draw(st.sampled_from([1, 7, 4096, CHUNK_BYTES, 2 * CHUNK_BYTES + 5]))
        gap_src, gap_dst = draw(st.integers(0, 50)), draw(st.integers(0, 50))
        for _ in range(draw(st.integers(1, 5))):
            src.append(at[0])
            dst.append(at[1])
            size.append(run)
            at = [at[0] + run + gap_src, at[1] + run + gap_dst]
    return tuple(np.array(column, dtype=np.uint64) for column in (src, dst, size))


@given(descriptors(), st.randoms())
@settings(max_examples=100, deadline=None)
def test_strided_pieces_move_the_same_ranges_as_their_descriptors(columns, random):
    order = list(range(len(columns[0])))
    if random.random() < 0.5:
        random.shuffle(order)
    given_plan = CopyPlan(*(column[order] for column in columns))
    pieces = pieces_of(given_plan)
    moved = [
        (piece.src + row * piece.src_stride, piece.dst + row * piece.dst_stride, piece.run)
        for piece in pieces
        for row in range(piece.rows)
    ]
    wanted = list(zip(*(c.tolist() for c in (given_plan.src, given_plan.dst, given_plan.size)), strict=True))
    assert joined_rows(moved) == joined_rows(wanted)
    assert all(piece.rows * piece.run <= CHUNK_BYTES for piece in pieces)
    assert [piece for chunk in chunks_of(pieces) for piece in chunk] == pieces


def joined_rows(rows):
    """Rows in order, those that touch on both sides made one."""
    joined = []
    for src, dst, size in rows:
        if joined and joined[-1][0] + joined[-1][2] == src and joined[-1][1] + joined[-1][2] == dst:
            joined[-1] = (*joined[-1][:2], joined[-1][2] + size)
        else:
            joined.append((src, dst, size))
    return joined


def test_the_layers_of_a_block_are_one_piece():
    (p,) = planner_of(RECORDED[0]).plan(u32s([3]), u32s([2]), Kind.STORE)
    (piece,) = pieces_of(p)
    assert (piece.rows, piece.run) == (3, 320)
