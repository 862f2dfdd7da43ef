"""What the daemon does with frames: its own peers' become events, all others are refused by name and counted."""

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.proto import limits
from kvferry.proto.codec import pack, unpack
from kvferry.proto.control import Goodbye, Hello, Refused, Register, StatusAsk
from kvferry.proto.hot import Renew
from kvferry.proto.ids import LinkId
from kvferry.proto.link import HEADER, MAGIC, FrameKind, Link, pack_frame, unpack_frame
from kvferry.scheduler_daemon.core.api import LinkLost, Received
from kvferry.scheduler_daemon.switchboard import Switchboard

ME = b"\0abcd"
OTHER = b"\0efgh"
LINK = LinkId(77)
HELLO = Hello(role="client")


def data(message: object, seq: int, link: LinkId = LINK) -> bytes:
    body = message if isinstance(message, bytes) else pack(message)  # type: ignore[arg-type]
    return pack_frame(FrameKind.DATA, link, seq, 0, body)


def board() -> Switchboard:
    """A switchboard with one open link."""
    one = Switchboard(lambda _link: True)
    assert one.receive(ME, data(HELLO, 1), 0) == [Received(LINK, HELLO)]
    return one


def refusals(one: Switchboard) -> list[tuple[bytes, Refused]]:
    answers = []
    for identity, raw in one.outgoing():
        frame = unpack_frame(raw)
        if frame.kind is FrameKind.CLOSE and frame.body:
            answers.append((identity, unpack(frame.body)))
    return answers


def register(engine: str = "e") -> Register:
    return Register(engine_id=engine, world_size=1, key_bytes=32, num_blocks=8, block_tokens=16)


BAD_FRAMES = {
    "frame.magic": b"GET / HTTP/1.1\r\nHost: daemon\r\n\r\n",
    "frame.size": b"",
    "frame.version": HEADER.pack(MAGIC, 9, 0, LINK, 1, 0) + pack(HELLO),
    "frame.link": data(HELLO, 2),
    "message.malformed": data(b"\xc1\xff", 1),
    "message.unknown": data(msgpack.packb(["no.such.tag"]), 1),
    "message.fields": data(msgpack.packb(["hello", {"role": "emperor"}]), 1),
    "hello.first": data(StatusAsk(), 1),
}


@pytest.mark.parametrize("code", BAD_FRAMES)
def test_a_bad_first_frame_is_answered_by_name_counted_and_opens_nothing(code: str) -> None:
    """Case 131: garbage, other protocols and versions are dropped by name; the daemon goes on."""
    one = Switchboard(lambda _link: True)
    assert one.receive(ME, BAD_FRAMES[code], 0) == []
    [(identity, refused)] = refusals(one)
    assert identity == ME
    assert refused.code == code
    assert one.bad == {code: 1}
    assert not one.open


def test_an_oversized_frame_is_refused_with_both_numbers() -> None:
    """Case 131."""
    one = Switchboard(lambda _link: True)
    assert one.receive(ME, bytes(limits.MAX_FRAME_BYTES + 1), 0) == []
    [(_, refused)] = refusals(one)
    assert refused.code == "frame.size"
    assert str(limits.MAX_FRAME_BYTES) in refused.text
    assert str(limits.MAX_FRAME_BYTES + 1) in refused.text


def test_a_pickle_is_garbage_and_nothing_of_it_is_run() -> None:
    """Case 131: whatever the bytes would build, they are only ever read as msgpack."""
    pickle_bytes = b"cos\nsystem\n(S'touch /tmp/kvferry-owned'\ntR."
    one = Switchboard(lambda _link: True)
    one.receive(ME, pickle_bytes + bytes(40), 0)
    one.receive(ME, data(pickle_bytes, 1), 0)
    assert sorted(one.bad) == ["frame.magic", "message.malformed"]


def test_a_link_without_a_tether_is_not_opened() -> None:
    """Nobody would tell us of its death."""
    one = Switchboard(lambda _link: False)
    assert one.receive(ME, data(HELLO, 1), 0) == []
    [(_, refused)] = refusals(one)
    assert refused.code == "frame.link"
    assert "tether.sock" in refused.fix


def test_a_message_of_an_open_link_reaches_the_core_once_however_often_it_comes() -> None:
    one = board()
    frame = data(register(), 2)
    assert one.receive(ME, frame, 0) == [Received(LINK, register())]
    assert one.receive(ME, frame, 0) == []


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (b"\xc1", "message.malformed"),
        (msgpack.packb(["no.such"]), "message.unknown"),
        (msgpack.packb(["renew", 5]), "message.fields"),
        (msgpack.packb(["renew", b"123"]), "message.lengths"),
    ],
)
def test_a_bad_message_closes_its_own_link_and_no_other(message: bytes, code: str) -> None:
    one = board()
    other = LinkId(78)
    one.receive(OTHER, data(HELLO, 1, other), 0)
    assert one.receive(ME, data(message, 2), 0) == [LinkLost(LINK)]
    assert [r.code for _, r in refusals(one)] == [code]
    assert set(one.open) == {other}
    assert one.receive(OTHER, data(register(), 2, other), 0) == [Received(other, register())]


def test_garbage_from_a_connection_does_not_touch_the_links_of_others_or_its_own() -> None:
    one = board()
    for raw in (b"", b"x" * 100, BAD_FRAMES["frame.version"]):
        assert one.receive(OTHER, raw, 0) == []
    assert one.receive(ME, data(register(), 2), 0) == [Received(LINK, register())]


def test_another_connection_cannot_speak_on_or_close_an_open_link() -> None:
    one = board()
    for raw in (data(Goodbye(), 2), pack_frame(FrameKind.CLOSE, LINK, 0, 0)):
        assert one.receive(OTHER, raw, 0) == []
    assert LINK in one.open
    assert one.bad == {"frame.link": 2}


def test_a_closed_link_is_never_opened_again_and_its_late_frames_are_no_faults() -> None:
    one = board()
    one.close(LINK)
    one.outgoing()
    assert one.receive(ME, data(HELLO, 1), 0) == []
    assert [r.code for _, r in refusals(one)] == ["frame.link"]
    assert not one.bad


def test_a_close_is_never_answered() -> None:
    one = Switchboard(lambda _link: True)
    one.receive(ME, pack_frame(FrameKind.CLOSE, LINK, 0, 0), 0)
    assert one.outgoing() == []


def test_what_was_queued_goes_before_the_close() -> None:
    one = board()
    assert one.send(LINK, Refused(code="register.world_size", text="t"), 0) == []
    one.close(LINK)
    frames = [unpack_frame(raw) for _, raw in one.outgoing()]
    assert [f.kind for f in frames][-2:] == [FrameKind.DATA, FrameKind.CLOSE]


def test_a_peer_that_takes_nothing_for_a_whole_window_is_lost_and_costs_no_more() -> None:
    one = board()
    sent = 0
    while not (lost := one.send(LINK, Renew(), 0)):
        sent += 1
        assert sent < 10_000
    assert lost == [LinkLost(LINK)]
    assert one.send(LINK, Renew(), 0) == []


def test_a_peer_that_acknowledges_nothing_is_given_up_in_time() -> None:
    one = board()
    one.send(LINK, Renew(), 0)
    now = 0
    ended: list[LinkLost] = []
    while not ended:
        due = one.next_due_ns()
        assert due is not None
        now = max(due, now)
        ended = one.tick(now)
    assert ended == [LinkLost(LINK)]
    assert now <= 6_000_000_000
    assert one.next_due_ns() is None


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from([ME, OTHER]), st.binary(max_size=80), st.booleans()), max_size=20))
def test_no_bytes_bring_it_down(frames: list[tuple[bytes, bytes, bool]]) -> None:
    """Case 131, at random: raw bytes, and bytes behind a good header of the open link."""
    one = board()
    for at, (identity, raw, headed) in enumerate(frames):
        one.receive(identity, data(raw, at + 2) if headed else raw, at)
        for _, answer in one.outgoing():
            unpack_frame(answer)
    one.tick(1 << 40)


def test_a_real_peers_link_and_the_switchboard_understand_each_other() -> None:
    one, peer = Switchboard(lambda _link: True), Link(LINK)
    peer.send(pack(HELLO), 0)
    peer.send(pack(register()), 0)
    events = [event for raw in peer.outgoing() for event in one.receive(ME, raw, 0)]
    assert [type(event.message) for event in events if isinstance(event, Received)] == [Hello, Register]
    one.tick(1_000_000_000)
    for _, raw in one.outgoing():
        peer.receive(unpack_frame(raw), 0)
    assert peer.in_flight == 0
