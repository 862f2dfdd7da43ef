"""Layouts: what is accepted never shares a byte and never leaves its memory; the digest names the byte format alone."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.proto import limits
from kvferry.proto.errors import RemoteProtocolError
from kvferry.proto.layout import Group, Handle, Layout, Region, slot_bytes

# A toy model in bytes: layers, blocks, heads, tokens of a block, bytes of one head's token.
LAYERS, BLOCKS, HEADS, TOKENS, ITEM = 3, 5, 2, 4, 16


def layout(*regions: Region, nbytes: int = 1 << 16, handles: int = 1, **group: int) -> Layout:
    return Layout(
        handles=tuple(Handle(kind="shm_fd", nbytes=nbytes) for _ in range(handles)),
        groups=(Group(regions=regions, block_tokens=16, **group),),
    )


def region(offset: int, stride: int, run: int, blocks: int, handle: int = 0) -> Region:
    return Region(handle=handle, offset=offset, stride=stride, run=run, blocks=blocks)


def refused(bad: Layout) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        bad.check()
    assert caught.value.code == "layout.geometry"
    return caught.value.text


def views(order: str) -> tuple[Region, ...]:
    """The regions of the toy model under one physical order of its dimensions, outermost first.

    L layers, B blocks, H heads, N tokens, C content of one head and token.
    """
    sizes = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": ITEM}
    strides, at = {}, 1
    for dim in reversed(order):
        strides[dim], at = at, at * sizes[dim]
    starts, run = [0], 1
    for dim in sorted("LHNC", key=lambda d: strides[d]):
        if strides[dim] == run:
            run *= sizes[dim]
        else:
            starts = [start + i * strides[dim] for start in starts for i in range(sizes[dim])]
    return tuple(region(start, strides["B"], run, BLOCKS) for start in sorted(starts))


TOTAL = LAYERS * BLOCKS * HEADS * TOKENS * ITEM


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_the_six_orders_in_which_engines_lay_kv_out_are_accepted(order: str) -> None:
    made = layout(*views(order), nbytes=TOTAL, block_bytes=TOTAL // BLOCKS)
    made.check()
    assert made.groups[0].num_blocks == BLOCKS
    assert sum(len(list(blocks_of(r))) * r.run for r in made.groups[0].regions) == TOTAL


def test_layers_that_interleave_within_a_block_are_accepted_and_cover_it() -> None:
    inner = tuple(region(layer * 64, 64 * LAYERS, 64, BLOCKS) for layer in range(LAYERS))
    layout(*inner, nbytes=64 * LAYERS * BLOCKS).check()
    layout(*reversed(inner), nbytes=64 * LAYERS * BLOCKS).check()


def test_padding_between_runs_is_allowed() -> None:
    layout(region(8, 100, 10, 5), region(50, 100, 40, 5), nbytes=500).check()


def test_one_block_may_be_as_wide_as_it_likes() -> None:
    layout(region(0, 0, 300, 1), nbytes=300).check()


@pytest.mark.parametrize(
    ("regions", "why"),
    [
        ([region(0, 64, 64, 10), region(0, 64, 64, 10)], "the same region twice"),
        ([region(0, 64, 64, 10), region(32, 64, 64, 10)], "half a block apart"),
        ([region(0, 100, 10, 2), region(105, 100, 10, 2)], "the second begins within the last block of the first"),
        ([region(0, 100, 10, 10), region(20, 100, 10, 1), region(40, 60, 10, 5)], "a short region hides a stride"),
        ([region(0, 100, 10, 10), region(95, 100, 10, 2)], "the run passes into the next block of the other"),
        ([region(0, 100, 10, 10), region(50, 90, 10, 10)], "unequal strides"),
        ([region(0, 100, 10, 10), region(15, 0, 200, 1)], "one wide block over many"),
    ],
)
def test_regions_that_share_a_byte_are_refused(regions: list[Region], why: str) -> None:
    assert "group 0" in refused(layout(*regions)), why
    assert "group 0" in refused(layout(*reversed(regions))), why


def test_the_same_bytes_of_two_handles_are_two_places() -> None:
    layout(region(0, 64, 64, 10), region(0, 64, 64, 10, handle=1), nbytes=640, handles=2).check()


def test_the_same_bytes_of_two_groups_may_be_shared() -> None:
    # A block id belongs to one group at a time.
    one = Group(regions=(region(0, 64, 64, 10),), block_tokens=16)
    Layout(handles=(Handle(kind="shm_fd", nbytes=640),), groups=(one, one)).check()


def test_blocks_past_the_end_of_memory_are_refused_with_both_numbers() -> None:
    layout(region(0, 64, 64, 10), nbytes=640).check()
    text = refused(layout(region(0, 64, 64, 10), nbytes=639))
    assert "byte 640" in text
    assert "639" in text
    assert "group 0 region 0" in text


def test_numbers_near_the_end_of_64_bits_neither_wrap_nor_crash() -> None:
    huge = (1 << 64) - 1
    assert "group 0" in refused(layout(region(huge, huge, 1, limits.MAX_BLOCKS), nbytes=huge))
    layout(region(huge - 1, huge, 1, 1), nbytes=huge).check()


def test_a_region_of_a_handle_that_is_not_there_is_refused() -> None:
    assert "handle 1 of 1" in refused(layout(region(0, 64, 64, 10, handle=1)))


def test_a_run_longer_than_its_stride_is_refused() -> None:
    assert "stride of 64" in refused(layout(region(0, 64, 65, 2)))


def test_case_71_a_layout_that_covers_a_part_of_each_block_is_refused_with_both_sizes() -> None:
    """Case 71: an unrecognised layout stored 1 page of 17 of each block, and every restore was reported a success."""
    page = 4096
    whole = layout(region(0, 17 * page, 17 * page, 8), nbytes=17 * page * 8, block_bytes=17 * page)
    whole.check()
    text = refused(layout(region(0, 17 * page, page, 8), nbytes=17 * page * 8, block_bytes=17 * page))
    assert f"{page} bytes" in text
    assert f"{17 * page}" in text
    assert "group 0" in text


def test_case_71_the_same_memory_read_with_one_dimension_too_few_does_not_fit_it() -> None:
    """Case 71: a 4-dim and a 5-dim view of one memory; the wrong one is refused."""
    nbytes = 2 * 8 * 1024  # K and V, 8 blocks, 1024 bytes each
    layout(region(0, 1024, 1024, 8), region(8 * 1024, 1024, 1024, 8), nbytes=nbytes, block_bytes=2048).check()
    assert "2048" in refused(layout(region(0, 1024, 1024, 8), nbytes=nbytes, block_bytes=2048))
    assert "memory of" in refused(layout(region(0, 2048, 2048, 16), nbytes=nbytes))


def test_four_thousand_interleaved_regions_are_checked_at_once() -> None:
    # Registration happens within an engine's start; a quadratic check took seconds here.
    many = [region(i * 8, 8 * limits.MAX_REGIONS, 8, 4) for i in range(limits.MAX_REGIONS)]
    layout(*many, nbytes=8 * limits.MAX_REGIONS * 4).check()


def blocks_of(r: Region) -> Iterator[tuple[int, int]]:
    """(first byte, end) of each block of a region."""
    for b in range(r.blocks):
        yield r.offset + b * r.stride, r.offset + b * r.stride + r.run


def shares_a_byte(regions: list[Region]) -> bool:
    """The dumb twin: every byte of every block in a set."""
    seen: set[int] = set()
    for r in regions:
        for start, end in blocks_of(r):
            for byte in range(start, end):
                if byte in seen:
                    return True
                seen.add(byte)
    return False


SMALL = st.builds(region, st.integers(0, 60), st.sampled_from([6, 8, 12, 24]), st.integers(1, 12), st.integers(1, 5))


@settings(max_examples=300)
@given(st.lists(SMALL, min_size=1, max_size=5))
def test_what_is_accepted_shares_no_byte(regions: list[Region]) -> None:
    try:
        layout(*regions).check()
    except RemoteProtocolError:
        return
    assert not shares_a_byte(regions)
    assert max(end for r in regions for _, end in blocks_of(r)) <= 1 << 16


@settings(max_examples=100)
@given(
    cuts=st.lists(st.integers(1, 63), min_size=1, max_size=6, unique=True),
    start=st.integers(0, 64),
    blocks=st.integers(1, 6),
    drawn=st.randoms(use_true_random=False),
)
def test_any_split_of_one_stride_is_accepted_in_any_order(
    cuts: list[int], start: int, blocks: int, drawn: object
) -> None:
    edges = [0, *sorted(cuts), 64]
    regions = [region(start + a, 64, b - a, blocks) for a, b in pairwise(edges)]
    drawn.shuffle(regions)  # type: ignore[attr-defined]
    layout(*regions).check()
    assert not shares_a_byte(regions)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(1, 5)), min_size=1, max_size=6))
def test_regions_that_follow_each_other_are_accepted_whatever_their_strides(shapes: list[tuple[int, int, int]]) -> None:
    regions, at = [], 0
    for run, gap, blocks in shapes:
        regions.append(region(at, run + gap, run, blocks))
        at = max(end for _, end in blocks_of(regions[-1]))
    layout(*regions).check()


def test_the_digest_names_the_byte_format_and_nothing_of_where_it_lies() -> None:
    here = layout(region(0, 64, 64, 10), region(640, 64, 64, 10), nbytes=1280)
    there = layout(region(4096, 256, 64, 99), region(4160, 256, 64, 99), nbytes=1 << 20, block_bytes=128)
    assert here.digest == there.digest


@pytest.mark.parametrize(
    "other",
    [
        layout(region(0, 128, 128, 10)),
        layout(region(0, 64, 32, 10), region(640, 64, 96, 10)),
        layout(region(0, 64, 64, 10), region(640, 64, 64, 10), window_tokens=1),
        layout(region(0, 64, 64, 10), region(640, 64, 64, 10), replicas=2),
        Layout(
            handles=(Handle(kind="shm_fd", nbytes=1280),),
            groups=(Group(regions=(region(0, 64, 64, 10), region(640, 64, 64, 10)), block_tokens=16),),
            format="HND",
        ),
        Layout(
            handles=(Handle(kind="shm_fd", nbytes=1280),),
            groups=(Group(regions=(region(0, 64, 64, 10), region(640, 64, 64, 10)), block_tokens=32),),
        ),
    ],
    ids=["one run", "other cut", "window", "replicas", "format", "block tokens"],
)
def test_another_byte_format_has_another_digest(other: Layout) -> None:
    assert layout(region(0, 64, 64, 10), region(640, 64, 64, 10)).digest != other.digest


@given(st.integers(1, 1 << 30))
def test_a_slot_is_whole_pages_with_one_for_its_header(payload_bytes: int) -> None:
    size = slot_bytes(payload_bytes)
    assert size % limits.PAGE_BYTES == 0
    assert 0 <= size - limits.PAGE_BYTES - payload_bytes < limits.PAGE_BYTES
