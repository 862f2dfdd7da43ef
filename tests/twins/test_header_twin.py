"""The table's header page: what is written is read, and a writer that dies anywhere loses nothing that stood before."""

import random

import pytest

from kvferry.proto.limits import MAX_RANKS
from kvferry.scheduler_daemon.core.header import (
    HEADER_BYTES,
    MAX_EPOCHS,
    Header,
    misfit,
    read_header,
    write_header,
)


def header(dice: random.Random) -> Header:
    ranks = dice.choice([1, 2, 8, MAX_RANKS])
    return Header(
        machine=dice.randbytes(16),
        slot_bytes=tuple(dice.randrange(1, 1 << 40) for _ in range(ranks)),
        pool_bytes=tuple(dice.randrange(1 << 50) for _ in range(ranks)),
        num_slots=dice.randrange(1 << 30),
        boots=dice.randrange(1 << 60),
        epochs=tuple((dice.randbytes(16), dice.randrange(1 << 32)) for _ in range(dice.randrange(MAX_EPOCHS + 1))),
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_last_of_many_headers_is_read(seed):
    dice = random.Random(seed)
    page = memoryview(bytearray(HEADER_BYTES))
    assert read_header(page) is None
    for _ in range(10):
        written = header(dice)
        write_header(page, written)
        assert read_header(page) == written


@pytest.mark.parametrize("seed", range(40))
def test_a_write_that_was_cut_anywhere_leaves_the_header_before_it_or_after_it(seed):
    dice = random.Random(seed)
    page = bytearray(HEADER_BYTES)
    last = None
    for _ in range(dice.randrange(1, 4)):
        last = header(dice)
        write_header(memoryview(page), last)
    before = bytes(page)
    following = header(dice)
    write_header(memoryview(page), following)
    for _ in range(50):
        cut = dice.randrange(HEADER_BYTES)
        assert read_header(memoryview(page[:cut] + before[cut:])) in (last, following)
        mixed = bytes(dice.choice(pair) for pair in zip(before, page, strict=True))
        assert read_header(memoryview(mixed)) in (last, following)


@pytest.mark.parametrize("seed", range(20))
def test_of_too_many_epochs_the_newest_are_kept(seed):
    dice = random.Random(seed)
    page = memoryview(bytearray(HEADER_BYTES))
    epochs = tuple((dice.randbytes(16), n) for n in range(MAX_EPOCHS * 2))
    write_header(page, Header(bytes(16), (1,), (1,), 1, epochs=epochs))
    found = read_header(page)
    assert found is not None and found.epochs == epochs[-MAX_EPOCHS:]


def test_anything_else_is_no_header():
    dice = random.Random(1)
    for _ in range(200):
        assert read_header(memoryview(dice.randbytes(HEADER_BYTES))) is None
    assert read_header(memoryview(b"")) is None


def test_a_header_that_does_not_fit_is_told_with_both_values():
    machine, pool = b"m" * 16, (10_000, 20_000)
    fits = {"machine": machine, "pool_bytes": pool, "table_bytes": 3 * 128}
    sound = Header(machine, (3_000, 6_000), pool, 3)
    assert misfit(sound, **fits) == ""
    assert "another boot" in misfit(sound, **{**fits, "machine": b"n" * 16})
    told = misfit(sound, **{**fits, "pool_bytes": (1, 2)})
    assert "[10000, 20000]" in told and "[1, 2]" in told
    assert "never fixed" in misfit(Header(machine, (3_000, 6_000), pool, 0), **fits)
    assert "never fixed" in misfit(Header(machine, (3_000, 0), pool, 3), **fits)
    assert "holds 2" in misfit(sound, **{**fits, "table_bytes": 2 * 128})
    assert "hold 3" in misfit(Header(machine, (3_000, 6_000), pool, 4), **fits)
