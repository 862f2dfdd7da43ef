"""Views with strides become regions: the exact bytes of each block, on every layout an engine may choose."""

import itertools
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.client.memory import View, from_arrays, from_views, regions_of, shared_array
from kvferry.proto.errors import ConfigError
from kvferry.proto.layout import Handle, Region

# The logical shape is [blocks, heads, tokens, content]; a layout's name is its physical order, L for layers.
LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]


def views_of(layout: str, sizes: dict[str, int], itemsize: int) -> list[View]:
    """One view per layer over one memory in that physical order."""
    strides, step = {}, 1
    for dim in reversed(layout):
        strides[dim] = step
        step *= sizes[dim]
    logical = "BHNC"
    return [
        View(
            handle=0,
            offset=layer * strides["L"] * itemsize,
            sizes=tuple(sizes[dim] for dim in logical),
            strides=tuple(strides[dim] for dim in logical),
            itemsize=itemsize,
        )
        for layer in range(sizes["L"])
    ]


def bytes_by_walking(views: list[View], block: int) -> set[int]:
    """Every byte of a block, element by element."""
    found = set()
    for view in views:
        dims = [range(size) if d != view.block_dim else [block] for d, size in enumerate(view.sizes)]
        for index in itertools.product(*dims):
            start = view.offset + view.itemsize * sum(i * s for i, s in zip(index, view.strides, strict=True))
            found |= set(range(start, start + view.itemsize))
    return found


def bytes_of(regions: tuple[Region, ...], block: int) -> list[int]:
    """Every byte of a block, region by region."""
    return [
        byte
        for region in regions
        for byte in range(region.offset + block * region.stride, region.offset + block * region.stride + region.run)
    ]


small = st.integers(1, 3)


@given(
    layout=st.sampled_from(LAYOUTS), layers=small, blocks=small, heads=small, tokens=small, content=small, item=small
)
def test_regions_hold_exactly_the_bytes_of_their_block(
    layout: str, layers: int, blocks: int, heads: int, tokens: int, content: int, item: int
) -> None:
    sizes = {"L": layers, "B": blocks, "H": heads, "N": tokens, "C": content}
    views = views_of(layout, sizes, item)
    regions, _ = regions_of(views)
    for block in range(blocks):
        found = bytes_of(regions, block)
        assert len(found) == len(set(found)), "a byte is copied twice"
        assert set(found) == bytes_by_walking(views, block)
    total = layers * blocks * heads * tokens * content * item
    from_views(views, [Handle(kind="shm_fd", nbytes=total)], block_tokens=tokens).layout.check()


@pytest.mark.parametrize(
    ("layout", "num_regions"),
    [("LBHNC", 4), ("LBNHC", 4), ("LHBNC", 8), ("BLHNC", 1), ("BLNHC", 1), ("BHLNC", 1)],
)
def test_what_lies_together_is_one_region(layout: str, num_regions: int) -> None:
    regions, _ = regions_of(views_of(layout, {"L": 4, "B": 5, "H": 2, "N": 3, "C": 6}, 2))
    assert len(regions) == num_regions


def test_layers_that_share_their_kv_are_copied_once() -> None:
    views = views_of("LBHNC", {"L": 2, "B": 3, "H": 1, "N": 2, "C": 4}, 2)
    assert regions_of([*views, views[0]]) == regions_of(views)


def test_padding_behind_a_block_is_not_copied() -> None:
    """A state page of 512 bytes of which 304 are used."""
    regions, _ = regions_of([View(0, 0, (10, 304), (512, 1), 1)])
    assert [(region.stride, region.run) for region in regions] == [(512, 304)]


def test_the_block_dimension_may_be_the_second() -> None:
    """K and V in halves of one tensor: [2, blocks, ...]."""
    regions, _ = regions_of([View(0, 0, (2, 5, 3, 4), (60, 12, 4, 1), 2, block_dim=1)])
    assert [(region.offset, region.stride, region.run, region.blocks) for region in regions] == [
        (0, 24, 24, 5),
        (120, 24, 24, 5),
    ]


def test_layouts_that_order_their_bytes_differently_have_different_digests() -> None:
    """Case 66: equal sizes, other heads: not the same bytes."""
    sizes = {"L": 4, "B": 5, "H": 2, "N": 3, "C": 6}
    handle = Handle(kind="shm_fd", nbytes=4 * 5 * 2 * 3 * 6 * 2)
    digests = {from_views(views_of(name, sizes, 2), [handle], block_tokens=3).layout.digest for name in LAYOUTS}
    assert len(digests) == len(LAYOUTS)


def test_the_number_of_blocks_and_the_place_in_memory_are_no_part_of_the_digest() -> None:
    """Engines of the same model share what they stored whatever the size of their caches."""
    few = views_of("LBHNC", {"L": 2, "B": 3, "H": 2, "N": 4, "C": 8}, 2)
    many = views_of("LBHNC", {"L": 2, "B": 7, "H": 2, "N": 4, "C": 8}, 2)
    handle = Handle(kind="shm_fd", nbytes=1 << 20)
    assert (
        from_views(few, [handle], block_tokens=4).layout.digest
        == from_views(many, [handle], block_tokens=4).layout.digest
    )


def test_another_type_of_the_same_size_has_another_digest() -> None:
    """Case 64: fp16 and bf16 are equally large and mean different numbers."""
    views, handle = [View(0, 0, (3, 8), (8, 1), 2)], Handle(kind="shm_fd", nbytes=48)
    one = from_views(views, [handle], block_tokens=4, format="float16").layout.digest
    two = from_views(views, [handle], block_tokens=4, format="bfloat16").layout.digest
    assert one != two


@pytest.mark.parametrize(
    ("view", "word"),
    [
        (View(0, 0, (4, 8), (4, 1), 1), "passes the block stride of 4 bytes"),
        (View(0, 0, (2, 3, 4), (12, 4), 1), "3 sizes, 2 strides"),
        (View(0, 0, (4, 8), (-8, 1), 1), "negative stride"),
        (View(0, 0, (4, 5000, 2), (20000, 4, 1), 1), "5000 pieces; the limit is 4096"),
        (View(0, 0, (0, 8), (8, 1), 1), "no view has any block"),
    ],
)
def test_what_cannot_be_described_is_refused_with_its_numbers(view: View, word: str) -> None:
    """Case 71: geometry is declared and proved, never guessed."""
    with pytest.raises(ConfigError, match=word):
        regions_of([view])


def test_an_array_is_shared_with_whoever_maps_its_descriptor() -> None:
    array, fd = shared_array((4, 8), np.uint16)
    try:
        array[2] = 7
        assert os.pread(fd, 16, 32) == b"\x07\x00" * 8
        os.pwrite(fd, b"\x09\x00", 0)
        assert array[0, 0] == 9
    finally:
        os.close(fd)


def test_views_of_an_array_are_described_by_their_place_in_it() -> None:
    array, fd = shared_array((2, 4, 8), np.uint8)
    try:
        memory = from_arrays({"l0": array[0], "l1": array[1]}, array, fd, block_tokens=4)
        regions = memory.layout.groups[0].regions
        assert [(region.offset, region.stride, region.run) for region in regions] == [(0, 8, 8), (32, 8, 8)]
        assert memory.fds == (fd,) and memory.layout.handles[0].nbytes == 64
    finally:
        os.close(fd)
