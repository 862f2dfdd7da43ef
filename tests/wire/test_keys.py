"""Keys and ids: full width, everywhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.proto.codec import pack, unpack
from kvferry.proto.columns import join_keys, pack_u32, spans, split_keys
from kvferry.proto.errors import RemoteProtocolError
from kvferry.proto.hot import Lookup
from kvferry.proto.ids import JOB_COUNTER_MAX, U64_MAX, BootId, job_is_of_boot, make_job_id
from kvferry.proto.version import PROTOCOL_MAJOR, speaks


@given(st.integers(1, 64).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.binary(min_size=n, max_size=n)))))
def test_keys_come_out_of_their_column_as_they_went_in(case: tuple[int, list[bytes]]) -> None:
    key_bytes, keys = case
    assert split_keys(join_keys(keys), key_bytes) == keys


@pytest.mark.parametrize("same", [2, 4, 8])
def test_case_68_keys_that_agree_in_many_leading_or_trailing_bits_stay_apart(same: int) -> None:
    """Case 68: two pictures shared an entry because their hash was cut to 16 bits. Keys travel in full width."""
    common = b"\xab" * same
    keys = [common + bytes(31 - same) + b"\1", common + bytes(31 - same) + b"\2", b"\1" + bytes(31 - same) + common]
    message = Lookup(lookup=1, request=1, epoch=0, group=0, key_bytes=32, keys=join_keys(keys))
    there = split_keys(unpack(pack(message)).keys, 32)
    assert there == keys
    assert len(set(there)) == 3


def test_case_68_a_key_cut_short_is_refused_and_not_padded() -> None:
    """Case 68: a column that is no whole number of keys of the stated width is no message."""
    message = Lookup(lookup=1, request=1, epoch=0, group=0, key_bytes=32, keys=bytes(64))
    raw = pack(message)
    short = raw.replace(b"\xc4\x40" + bytes(64), b"\xc4\x3f" + bytes(63))
    assert short != raw
    with pytest.raises(RemoteProtocolError, match=r"message\.lengths"):
        unpack(short)


def test_spans_give_each_job_its_part() -> None:
    assert list(spans(pack_u32([2, 0, 3]))) == [(0, 2), (2, 2), (2, 5)]
    assert list(spans(b"")) == []


@given(st.integers(0, U64_MAX), st.integers(1, JOB_COUNTER_MAX))
def test_a_job_id_is_of_its_boot_and_fits_64_bits(boot: int, counter: int) -> None:
    job = make_job_id(BootId(boot), counter)
    assert 0 < job <= U64_MAX
    assert job_is_of_boot(job, BootId(boot))
    assert not job_is_of_boot(job, BootId(boot ^ 1))


@pytest.mark.parametrize("counter", [0, -1, JOB_COUNTER_MAX + 1])
def test_a_job_counter_that_would_repeat_an_id_is_an_error(counter: int) -> None:
    with pytest.raises(OverflowError, match="restart the daemon"):
        make_job_id(BootId(1), counter)


def test_a_build_speaks_its_own_major_and_no_later_one() -> None:
    assert speaks(PROTOCOL_MAJOR)
    assert not speaks(PROTOCOL_MAJOR + 1)
    assert not speaks(0)
