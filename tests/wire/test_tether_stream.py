"""Stream framing of the tether: fed whole, byte by byte, or with more behind, the same bodies come out."""

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.proto import limits
from kvferry.proto.codec import unpack
from kvferry.proto.columns import pack_u64
from kvferry.proto.errors import LocalProtocolError, RemoteProtocolError
from kvferry.proto.hot import Lookup
from kvferry.proto.tether import Begin, CancelTickets, Deframer, frame

MESSAGES = [Begin(mark=3, tickets=pack_u64([1, 2])), CancelTickets(tickets=b""), Begin(mark=4, tickets=pack_u64([9]))]
STREAM = b"".join(frame(message) for message in MESSAGES)


def bodies(deframer: Deframer, *pieces: bytes) -> list[object]:
    return [unpack(body) for piece in pieces for body in deframer.feed(piece)]


def test_a_stream_fed_whole_gives_its_messages() -> None:
    assert bodies(Deframer(), STREAM) == MESSAGES


def test_a_stream_fed_byte_by_byte_gives_its_messages() -> None:
    assert bodies(Deframer(), *(STREAM[i : i + 1] for i in range(len(STREAM)))) == MESSAGES


@given(st.lists(st.integers(0, len(STREAM)), max_size=6))
def test_a_stream_cut_anywhere_gives_its_messages(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    assert bodies(Deframer(), *(STREAM[a:b] for a, b in itertools.pairwise(edges))) == MESSAGES


def test_the_beginning_of_the_next_message_is_kept_for_later() -> None:
    deframer = Deframer()
    assert bodies(deframer, STREAM + STREAM[:7]) == MESSAGES
    assert bodies(deframer, STREAM[7:]) == MESSAGES


def test_nothing_fed_gives_nothing() -> None:
    assert Deframer().feed(b"") == []


def test_an_empty_frame_is_no_message() -> None:
    (body,) = Deframer().feed(bytes(4))
    with pytest.raises(RemoteProtocolError, match=r"message\.malformed"):
        unpack(body)


@pytest.mark.parametrize("size", [limits.MAX_TETHER_BYTES + 1, 0xFFFF_FFFF])
def test_a_length_past_the_limit_is_refused_before_its_bytes_are_awaited(size: int) -> None:
    deframer = Deframer()
    for _ in range(2):  # and the stream stays broken
        with pytest.raises(RemoteProtocolError, match=r"frame\.size"):
            deframer.feed(struct.pack("<I", size))


def test_a_length_at_the_limit_is_awaited() -> None:
    assert Deframer().feed(struct.pack("<I", limits.MAX_TETHER_BYTES)) == []


def test_a_message_too_long_for_a_tether_is_a_local_error() -> None:
    keys = bytes(limits.MAX_TETHER_BYTES)
    with pytest.raises(LocalProtocolError, match=r"frame\.size"):
        frame(Lookup(lookup=1, request=1, epoch=0, group=0, key_bytes=32, keys=keys))


@given(st.binary(max_size=64))
def test_random_bytes_give_bodies_or_a_named_refusal(data: bytes) -> None:
    try:
        Deframer().feed(data)
    except RemoteProtocolError as error:
        assert error.code == "frame.size"
