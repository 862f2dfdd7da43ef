"""A numbered link: each message arrives once and in order, or the link is lost. Sans-IO.

    send(body) ──▶ outgoing() ──carrier (may drop, repeat, reorder)──▶ receive(frame) ──▶ bodies

One frame is `magic, major, kind, link id, seq, ack` (28 bytes) and a body. Data frames are numbered from 1;
every frame acknowledges all data received in order. A receiver drops what comes ahead of a gap and asks again
from the first number it lacks; a sender keeps what is not acknowledged, within a window, and repeats all of it
when asked, its oldest part after each `RESEND_NS` without an acknowledgement. Whoever waits for an
acknowledgement longer than `LOST_NS` gives the link up. Waiting means looking: who was not there to look for
longer than `STOOD_NS` (stopped, or starved) begins to wait anew, since the acknowledgement may have come meanwhile.

Why not lean on ZeroMQ alone: it drops at its high-water mark, says nothing of it, and reconnects a
socket to a new daemon behind our back. With numbers both are seen, and the simulator may be as unkind to
frames as it likes. Go-back-N rather than close-and-resync on a gap: one small mechanism, no state to rebuild.
"""

import struct
from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from kvferry.proto import limits, version
from kvferry.proto.errors import RemoteProtocolError
from kvferry.proto.ids import LinkId

MAGIC: Final = b"kF"
HEADER: Final = struct.Struct("<2sBBQQQ")
WINDOW_MESSAGES: Final = 4096
WINDOW_BYTES: Final = 64 << 20
# A pure acknowledgement waits this long for a message to ride on.
ACK_NS: Final = 20_000_000
# Local sockets lose nothing but at a full queue; repeating sooner would only add to it.
RESEND_NS: Final = 100_000_000
# What a timer repeats at most (one frame at least): a peer that stands still must not find fifty windows.
REPEAT_BYTES: Final = 1 << 20
LOST_NS: Final = 5_000_000_000
STOOD_NS: Final = 1_000_000_000


class FrameKind(IntEnum):
    """What a frame is for."""

    DATA = 0
    ACK = 1
    RESEND = 2  # repeat from ack + 1
    CLOSE = 3  # the body is a `refused` message; the link is over


@dataclass(frozen=True, slots=True)
class Frame:
    """One decoded frame."""

    kind: FrameKind
    link: LinkId
    seq: int
    ack: int
    body: bytes


def pack_frame(kind: FrameKind, link: LinkId, seq: int, ack: int, body: bytes = b"") -> bytes:
    """The wire form of a frame."""
    return HEADER.pack(MAGIC, version.PROTOCOL_MAJOR, kind, link, seq, ack) + body


def unpack_frame(raw: bytes) -> Frame:
    """The frame that `raw` holds; RemoteProtocolError if it is none of ours."""
    if not HEADER.size <= len(raw) <= limits.MAX_FRAME_BYTES:
        raise RemoteProtocolError(
            "frame.size", f"{len(raw)} bytes; a frame has {HEADER.size}..{limits.MAX_FRAME_BYTES}"
        )
    magic, major, kind, link, seq, ack = HEADER.unpack_from(raw)
    if magic != MAGIC:
        raise RemoteProtocolError("frame.magic", f"begins with {magic!r}, not {MAGIC!r}")
    if not version.speaks(major):
        low, high = version.SUPPORTED_MAJORS
        raise RemoteProtocolError("frame.version", f"protocol {major}; this build speaks {low}..{high}")
    if kind > FrameKind.CLOSE:
        raise RemoteProtocolError("message.malformed", f"frame kind {kind}")
    return Frame(FrameKind(kind), LinkId(link), seq, ack, raw[HEADER.size :])


class Link:
    """One end of a numbered link.

    Invariants: acked <= sent; the unacknowledged queue holds exactly seq acked+1 .. sent, in order.
    """

    def __init__(self, link: LinkId) -> None:
        self.id = link
        self.lost = False  # given up: nothing more is sent or taken
        self.repeats = 0  # frames received again
        self.gaps = 0  # frames received ahead of a missing one
        self._sent = 0
        self._unacked: deque[tuple[int, bytes]] = deque()
        self._unacked_bytes = 0
        self._waiting_since = 0  # when the oldest unacknowledged frame was first due
        self._resent_at = 0
        self._looked_at = 0  # when time was last let pass
        self._received = 0
        self._ack_due = 0  # when a pure acknowledgement must go; 0: none is owed
        self._asked_for = 0  # last number a RESEND asked for
        self._out: deque[bytes] = deque()

    def has_room(self, nbytes: int = 0) -> bool:
        """Whether `send` of a body of `nbytes` would be taken now."""
        return (
            not self.lost
            and len(self._unacked) < WINDOW_MESSAGES
            and (not self._unacked or self._unacked_bytes + nbytes <= WINDOW_BYTES)
        )

    def send(self, body: bytes, now_ns: int) -> bool:
        """Number and queue `body`; False, and nothing changed, if the window is full or the link lost."""
        if not self.has_room(len(body)):
            return False
        self._sent += 1
        if not self._unacked:
            self._waiting_since = self._resent_at = self._looked_at = now_ns
        self._unacked.append((self._sent, body))
        self._unacked_bytes += len(body)
        self._out.append(self._frame(FrameKind.DATA, self._sent, body))
        return True

    def receive(self, frame: Frame, now_ns: int) -> list[bytes]:
        """Take one frame of this link; the bodies that are new and in order (none or one).

        A CLOSE is the shell's: it reads the reason and drops the link.
        """
        if self.lost:
            return []
        self._acknowledge(frame.ack, now_ns)
        if frame.kind is FrameKind.RESEND:
            # An ask that was overtaken by a later acknowledgement needs no answer.
            if self._unacked and frame.ack + 1 == self._unacked[0][0]:
                self._repeat(now_ns)
            return []
        if frame.kind is not FrameKind.DATA:
            return []
        if frame.seq <= self._received:
            self.repeats += 1
            self._owe_ack(now_ns)
            return []
        if frame.seq > self._received + 1:
            self.gaps += 1
            if self._asked_for != self._received + 1:  # once per hole; the sender's timer covers a lost ask
                self._asked_for = self._received + 1
                self._out.append(self._frame(FrameKind.RESEND, 0))
            return []
        self._received += 1
        self._owe_ack(now_ns)
        return [frame.body]

    def tick(self, now_ns: int) -> None:
        """Let time pass: owed acknowledgements, repeats, and giving up."""
        if self.lost:
            return
        if self._ack_due and now_ns >= self._ack_due:
            self._out.append(self._frame(FrameKind.ACK, 0))
        if self._unacked:
            stood_ns, self._looked_at = now_ns - self._looked_at, now_ns
            if stood_ns > STOOD_NS:
                self._waiting_since = now_ns
            if now_ns - self._waiting_since >= LOST_NS:
                self.lost = True
                self._out.clear()
            elif now_ns - self._resent_at >= RESEND_NS:
                self._repeat(now_ns, REPEAT_BYTES)

    def next_due_ns(self) -> int | None:
        """When `tick` has something to do; None if nothing is owed or awaited."""
        due = [self._ack_due] if self._ack_due else []
        if self._unacked:
            due.append(min(self._resent_at + RESEND_NS, self._waiting_since + LOST_NS))
        return min(due) if due and not self.lost else None

    def outgoing(self) -> list[bytes]:
        """Frames to hand to the carrier now, in order; each is given once."""
        frames = list(self._out)
        self._out.clear()
        return frames

    @property
    def in_flight(self) -> int:
        """Messages sent and not yet acknowledged."""
        return len(self._unacked)

    def _frame(self, kind: FrameKind, seq: int, body: bytes = b"") -> bytes:
        self._ack_due = 0
        return pack_frame(kind, self.id, seq, self._received, body)

    def _owe_ack(self, now_ns: int) -> None:
        if not self._ack_due:
            self._ack_due = now_ns + ACK_NS

    def _acknowledge(self, ack: int, now_ns: int) -> None:
        # An acknowledgement of what was never sent is nonsense from the wire: ignore it.
        if ack > self._sent:
            return
        moved = False
        while self._unacked and self._unacked[0][0] <= ack:
            self._unacked_bytes -= len(self._unacked.popleft()[1])
            moved = True
        if moved:
            self._waiting_since = self._resent_at = now_ns

    def _repeat(self, now_ns: int, up_to_bytes: int = WINDOW_BYTES) -> None:
        self._resent_at = now_ns
        for seq, body in self._unacked:
            self._out.append(self._frame(FrameKind.DATA, seq, body))
            up_to_bytes -= len(body)
            if up_to_bytes <= 0:
                break
