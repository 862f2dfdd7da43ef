"""Frames and links: whatever the carrier does, each body arrives once and in order, or the link is lost by time."""

import struct
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.proto import limits, version
from kvferry.proto import link as link_module
from kvferry.proto.errors import CODES, RemoteProtocolError
from kvferry.proto.ids import U64_MAX, LinkId
from kvferry.proto.link import (
    ACK_NS,
    HEADER,
    LOST_NS,
    REPEAT_BYTES,
    RESEND_NS,
    WINDOW_BYTES,
    WINDOW_MESSAGES,
    Frame,
    FrameKind,
    Link,
    pack_frame,
    unpack_frame,
)

ID = LinkId(77)
U64 = st.integers(0, U64_MAX)


def frames(link: Link) -> list[Frame]:
    return [unpack_frame(raw) for raw in link.outgoing()]


def deliver(sender: Link, receiver: Link, now_ns: int = 0) -> list[bytes]:
    return [body for frame in frames(sender) for body in receiver.receive(frame, now_ns)]


def wait(link: Link, since_ns: int, until_ns: int) -> None:
    """Let time pass as a shell does that is there all the time."""
    for now_ns in range(since_ns, until_ns, RESEND_NS):
        link.tick(now_ns)
    link.tick(until_ns)


# ---- frames ----------------------------------------------------------------------------------------


@given(st.sampled_from(FrameKind), U64, U64, U64, st.binary(max_size=64))
def test_a_frame_unpacks_to_what_was_packed(kind: FrameKind, link: int, seq: int, ack: int, body: bytes) -> None:
    raw = pack_frame(kind, LinkId(link), seq, ack, body)
    assert len(raw) == HEADER.size + len(body)
    assert unpack_frame(raw) == Frame(kind, LinkId(link), seq, ack, body)


@settings(max_examples=100)
@given(st.binary(max_size=80))
def test_random_bytes_are_no_frame(raw: bytes) -> None:
    for attempt in (raw, b"kF" + raw, b"kF\1" + raw):
        try:
            unpack_frame(attempt)
        except RemoteProtocolError as error:
            assert error.code in CODES


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"", "frame.size"),
        (bytes(HEADER.size - 1), "frame.size"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n", "frame.magic"),
        (HEADER.pack(b"kF", version.PROTOCOL_MAJOR + 1, 0, 1, 1, 0), "frame.version"),
        (HEADER.pack(b"kF", 0, 0, 1, 1, 0), "frame.version"),
        (HEADER.pack(b"kF", version.PROTOCOL_MAJOR, 4, 1, 1, 0), "message.malformed"),
    ],
)
def test_what_is_no_frame_is_refused_by_name(raw: bytes, code: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        unpack_frame(raw)
    assert caught.value.code == code


def test_an_oversized_frame_is_refused_by_its_length() -> None:
    with pytest.raises(RemoteProtocolError, match=r"frame\.size"):
        unpack_frame(bytes(limits.MAX_FRAME_BYTES + 1))


def test_the_largest_body_fits_the_largest_frame() -> None:
    assert limits.MAX_BODY_BYTES + HEADER.size == limits.MAX_FRAME_BYTES
    assert limits.MAX_BODY_BYTES <= WINDOW_BYTES


# ---- one link, step by step ------------------------------------------------------------------------


def test_bodies_arrive_in_order_and_are_acknowledged() -> None:
    one, two = Link(ID), Link(ID)
    assert one.send(b"a", 0)
    assert one.send(b"b", 0)
    assert deliver(one, two) == [b"a", b"b"]
    assert one.in_flight == 2
    two.tick(ACK_NS)
    assert deliver(two, one) == []
    assert one.in_flight == 0


def test_an_acknowledgement_rides_on_a_message_or_goes_alone_after_its_delay() -> None:
    one, two = Link(ID), Link(ID)
    one.send(b"a", 0)
    deliver(one, two, 5)
    two.tick(5 + ACK_NS - 1)
    assert frames(two) == []
    assert two.next_due_ns() == 5 + ACK_NS
    two.tick(5 + ACK_NS)
    assert [(f.kind, f.ack) for f in frames(two)] == [(FrameKind.ACK, 1)]
    assert two.next_due_ns() is None

    one.send(b"b", 5)
    deliver(one, two, 5)
    two.send(b"reply", 6)
    assert [(f.kind, f.ack) for f in frames(two)] == [(FrameKind.DATA, 2)]
    two.tick(5 + ACK_NS)
    assert frames(two) == [], "it rode along"


def test_a_repeat_is_dropped_counted_and_acknowledged_again() -> None:
    one, two = Link(ID), Link(ID)
    one.send(b"a", 0)
    (frame,) = frames(one)
    assert two.receive(frame, 0) == [b"a"]
    two.tick(ACK_NS)
    frames(two)
    assert two.receive(frame, ACK_NS) == []
    assert two.repeats == 1
    two.tick(2 * ACK_NS)
    assert [f.ack for f in frames(two)] == [1]


def test_a_gap_is_asked_for_once_and_all_after_it_comes_again() -> None:
    one, two = Link(ID), Link(ID)
    for body in (b"a", b"b", b"c"):
        one.send(body, 0)
    first, _, third = frames(one)
    assert two.receive(first, 0) == [b"a"]
    assert two.receive(third, 0) == []
    assert two.receive(third, 0) == []
    assert two.gaps == 2
    asks = frames(two)
    assert [(f.kind, f.ack) for f in asks] == [(FrameKind.RESEND, 1)]
    one.receive(asks[0], 0)
    assert deliver(one, two) == [b"b", b"c"]


def test_an_ask_that_was_overtaken_by_an_acknowledgement_repeats_nothing() -> None:
    one = Link(ID)
    for body in (b"a", b"b"):
        one.send(body, 0)
    frames(one)
    one.receive(Frame(FrameKind.ACK, ID, 0, 1, b""), 0)
    one.receive(Frame(FrameKind.RESEND, ID, 0, 0, b""), 0)
    assert frames(one) == []


def test_what_nobody_acknowledges_is_repeated_after_its_time() -> None:
    one = Link(ID)
    one.send(b"a", 0)
    frames(one)
    one.tick(RESEND_NS - 1)
    assert frames(one) == []
    assert one.next_due_ns() == RESEND_NS
    one.tick(RESEND_NS)
    assert [f.body for f in frames(one)] == [b"a"]


def test_a_peer_that_stands_still_is_sent_a_mebibyte_again_and_not_the_window() -> None:
    one = Link(ID)
    for _ in range(32):
        one.send(bytes(REPEAT_BYTES // 8), 0)
    frames(one)
    one.tick(RESEND_NS)
    assert [f.seq for f in frames(one)] == list(range(1, 9))
    one.send(bytes(4 * REPEAT_BYTES), RESEND_NS)
    frames(one)
    one.receive(Frame(FrameKind.ACK, ID, 0, 32, b""), RESEND_NS)
    one.tick(3 * RESEND_NS)
    assert [f.seq for f in frames(one)] == [33], "one frame at least, however large"


def test_a_link_without_an_acknowledgement_is_lost_by_time_and_takes_no_more() -> None:
    one = Link(ID)
    one.send(b"a", 0)
    wait(one, 0, LOST_NS - 1)
    assert not one.lost
    one.tick(LOST_NS)
    assert one.lost
    assert not one.send(b"b", LOST_NS)
    assert not one.has_room()
    assert one.outgoing() == []
    assert one.next_due_ns() is None
    assert one.receive(Frame(FrameKind.DATA, ID, 1, 1, b"late"), LOST_NS) == []


def test_an_idle_link_is_never_lost() -> None:
    one = Link(ID)
    one.tick(100 * LOST_NS)
    assert not one.lost
    one.send(b"a", 100 * LOST_NS)
    wait(one, 100 * LOST_NS, 101 * LOST_NS - 1)
    assert not one.lost


def test_who_stood_still_has_not_waited() -> None:
    """Stopped for a minute behind a message: its acknowledgement may lie in the socket, so nobody is given up."""
    one = Link(ID)
    one.send(b"a", 0)
    for minute in range(1, 4):
        now_ns = minute * 60 * 10**9
        one.tick(now_ns)
        assert not one.lost
        assert [frame.seq for frame in frames(one)][-1:] == [1], "it is said again"
    wait(one, now_ns, now_ns + LOST_NS - 1)
    assert not one.lost
    one.tick(now_ns + LOST_NS)
    assert one.lost, "from then on it waits as any other"


def test_a_message_that_was_sent_under_an_old_time_is_not_overdue_at_once() -> None:
    """A process that is stopped between its look at the clock and its answer: the peer that it answers lives."""
    one = Link(ID)
    one.tick(0)
    one.send(b"welcome", 1)
    one.tick(1)
    one.tick(7 * 10**9)
    assert not one.lost


def test_progress_starts_the_time_anew() -> None:
    one = Link(ID)
    one.send(b"a", 0)
    one.send(b"b", 0)
    one.receive(Frame(FrameKind.ACK, ID, 0, 1, b""), LOST_NS - 1)
    wait(one, LOST_NS - 1, 2 * LOST_NS - 2)
    assert not one.lost
    one.tick(2 * LOST_NS - 1)
    assert one.lost


def test_a_window_full_of_messages_takes_no_more_and_changes_nothing() -> None:
    one = Link(ID)
    for _ in range(WINDOW_MESSAGES):
        assert one.send(b"", 0)
    frames(one)
    assert not one.send(b"", 0)
    assert (one.in_flight, one.outgoing()) == (WINDOW_MESSAGES, [])
    one.receive(Frame(FrameKind.ACK, ID, 0, 1, b""), 0)
    assert one.send(b"", 0)
    assert [f.seq for f in frames(one)] == [WINDOW_MESSAGES + 1]


def test_a_window_full_of_bytes_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "WINDOW_BYTES", 10)
    one = Link(ID)
    assert one.send(bytes(6), 0)
    assert one.has_room(4)
    assert not one.send(bytes(5), 0)
    assert one.send(bytes(4), 0)
    assert not one.send(b"x", 0)
    one.receive(Frame(FrameKind.ACK, ID, 0, 1, b""), 0)
    assert one.send(bytes(6), 0), "what is acknowledged makes room"


def test_an_acknowledgement_of_what_was_never_sent_is_ignored() -> None:
    one = Link(ID)
    one.send(b"a", 0)
    one.receive(Frame(FrameKind.ACK, ID, 0, 9, b""), 0)
    assert one.in_flight == 1


# ---- two links back to back ------------------------------------------------------------------------


class Carrier:
    """Holds frames of one direction; a choice per step says which one moves and how."""

    def __init__(self, sender: Link, receiver: Link) -> None:
        self.sender, self.receiver = sender, receiver
        self.held: list[bytes] = []
        self.arrived: list[bytes] = []

    def step(self, choose: Callable[[int], int], now_ns: int) -> None:
        self.held += self.sender.outgoing()
        if not self.held:
            return
        fate, at = choose(5), choose(len(self.held))
        raw = self.held[at] if fate == 0 else self.held.pop(at)  # 0: it will come again
        if fate != 1:  # 1: dropped
            self.arrived += self.receiver.receive(unpack_frame(raw), now_ns)

    def calm(self, now_ns: int) -> None:
        self.held += self.sender.outgoing()
        for raw in self.held:
            self.arrived += self.receiver.receive(unpack_frame(raw), now_ns)
        self.held.clear()


@settings(max_examples=60)
@given(data=st.data())
def test_over_any_carrier_each_body_arrives_once_and_in_order(data: st.DataObject) -> None:
    """The twin is the list of what was sent: what arrived is always a beginning of it, and in calm all of it."""
    one, two = Link(ID), Link(ID)
    there, back = Carrier(one, two), Carrier(two, one)
    sent: dict[Carrier, list[bytes]] = {there: [], back: []}
    random = data.draw(st.randoms(use_true_random=False))
    now = 0
    for _ in range(data.draw(st.integers(0, 120))):
        now += random.choice([0, 1_000, ACK_NS, RESEND_NS])
        for carrier in (there, back):
            if random.random() < 0.4:
                body = struct.pack("<I", len(sent[carrier]))
                assert carrier.sender.send(body, now) == (not carrier.sender.lost)
                if not carrier.sender.lost:
                    sent[carrier].append(body)
            carrier.sender.tick(now)
            carrier.step(random.randrange, now)
            assert carrier.arrived == sent[carrier][: len(carrier.arrived)]
    for _ in range(300):
        now += RESEND_NS
        for carrier in (there, back):
            carrier.sender.tick(now)
            carrier.calm(now)
    for carrier in (there, back):
        assert carrier.arrived == sent[carrier][: len(carrier.arrived)]
    if not one.lost and not two.lost:
        assert [there.arrived, back.arrived] == [sent[there], sent[back]]
        assert one.in_flight == two.in_flight == 0
        assert one.next_due_ns() is None


def test_a_carrier_that_drops_everything_loses_the_link_by_time() -> None:
    one = Link(ID)
    one.send(b"a", 0)
    now, repeats = 0, 0
    while not one.lost:
        due = one.next_due_ns()
        assert due is not None
        now = due
        one.tick(now)
        repeats += len(one.outgoing())
    assert now == LOST_NS
    assert repeats == 1 + LOST_NS // RESEND_NS - 1
