"""Frames in, the core's events out; the core's messages in, frames out. Sans-IO.

    (identity, raw frame) ──▶ receive ──▶ Received | LinkLost ──▶ core
    core ──▶ Send, CloseLink ──▶ send, close ──▶ outgoing ──▶ (identity, raw frame)

One `proto.link.Link` stands for each peer, named by the peer's own random link id and reached through
the ZeroMQ identity that its first frame came by. Whatever is malformed or of nobody's link is answered by a
CLOSE frame that names the error, counted by its code, and changes nothing; a peer whose established link
carried it loses that link, because what follows on a numbered link has no meaning once one message of it
is void. A closed link id is never opened again. Which role may say what, and when, is the core's to judge.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvferry.proto.codec import pack, unpack
from kvferry.proto.control import Hello, Refused
from kvferry.proto.errors import RemoteProtocolError
from kvferry.proto.ids import LinkId
from kvferry.proto.link import Frame, FrameKind, Link, pack_frame, unpack_frame
from kvferry.scheduler_daemon.core.api import LinkLost, Outgoing, Received

# Ids of closed links that are remembered, so that a late repeat of a hello opens no ghost.
CLOSED_REMEMBERED: Final = 4096


@dataclass(slots=True)
class OpenLink:
    """One peer as the daemon sees it."""

    identity: bytes
    link: Link
    hello: Hello


class Switchboard:
    """All open links of the daemon.

    `has_tether(link)` says whether the peer's stream connection stands: without it nobody would tell us
    of the peer's death, so no link opens.
    """

    def __init__(self, has_tether: Callable[[LinkId], bool]) -> None:
        self.open: dict[LinkId, OpenLink] = {}
        self.bad: Counter[str] = Counter()  # refused frames and messages by error code
        self.last_bad = ""  # the newest of them, for the log
        self._has_tether = has_tether
        self._closed: OrderedDict[LinkId, None] = OrderedDict()
        self._out: list[tuple[bytes, bytes]] = []

    # ---- in ------------------------------------------------------------------------------------------

    def receive(self, identity: bytes, raw: bytes, now_ns: int) -> list[Received | LinkLost]:
        """What one frame means to the core: nothing, a message, or the end of its link."""
        try:
            frame = unpack_frame(raw)
        except RemoteProtocolError as error:
            self._refuse(identity, LinkId(0), 0, error)
            return []
        peer = self.open.get(frame.link)
        if peer is None:
            return self._first(identity, frame, now_ns)
        if peer.identity != identity:
            stolen = RemoteProtocolError("frame.link", f"link {frame.link:x} was opened by another connection")
            self._refuse(identity, frame.link, 0, stolen)
            return []
        if frame.kind is FrameKind.CLOSE:
            return [*self.lost(frame.link)]
        try:
            return [Received(frame.link, unpack(body)) for body in peer.link.receive(frame, now_ns)]
        except RemoteProtocolError as error:
            self._flush(peer)
            self._refuse(identity, frame.link, frame.seq, error)
            return [*self.lost(frame.link)]

    def tick(self, now_ns: int) -> list[LinkLost]:
        """Let time pass on all links; the ends of those that were given up."""
        for peer in self.open.values():
            peer.link.tick(now_ns)
        gone = [peer for peer in self.open.values() if peer.link.lost]
        for peer in gone:  # it may live: told, it opens the next link at once
            self._out.append((peer.identity, pack_frame(FrameKind.CLOSE, peer.link.id, 0, 0)))
        return [event for peer in gone for event in self.lost(peer.link.id)]

    def next_due_ns(self) -> int | None:
        """When `tick` has something to do."""
        due = [at for peer in self.open.values() if (at := peer.link.next_due_ns()) is not None]
        return min(due, default=None)

    def lost(self, link: LinkId) -> list[LinkLost]:
        """Forget a link whose peer is gone: its tether ended, or ZeroMQ knows its identity no more."""
        if self.open.pop(link, None) is None:
            return []
        self._remember(link)
        return [LinkLost(link)]

    def link_of(self, identity: bytes) -> list[LinkId]:
        """The links that were opened by this connection (one, from a peer of ours)."""
        return [link for link, peer in self.open.items() if peer.identity == identity]

    # ---- out -----------------------------------------------------------------------------------------

    def send(self, link: LinkId, message: Outgoing, now_ns: int) -> list[LinkLost]:
        """Queue a message; a peer that took nothing for a whole window is lost.

        LocalProtocolError if the message breaks the protocol.
        """
        peer = self.open.get(link)
        if peer is None or peer.link.send(pack(message), now_ns):
            return []
        return self.lost(link)

    def close(self, link: LinkId) -> None:
        """Send what is queued and the word that the link is over, then forget it."""
        peer = self.open.pop(link, None)
        if peer is not None:
            self._flush(peer)
            self._out.append((peer.identity, pack_frame(FrameKind.CLOSE, link, 0, 0)))
            self._remember(link)

    def outgoing(self) -> list[tuple[bytes, bytes]]:
        """(identity, frame) to put on the socket now, in order; each is given once."""
        for peer in self.open.values():
            self._flush(peer)
        frames, self._out = self._out, []
        return frames

    # ---- within --------------------------------------------------------------------------------------

    def _first(self, identity: bytes, frame: Frame, now_ns: int) -> list[Received | LinkLost]:
        if frame.kind is FrameKind.CLOSE:
            return []  # an answer to an answer would never end
        link = Link(frame.link)
        try:
            if frame.kind is not FrameKind.DATA or frame.seq != 1 or frame.link in self._closed or not frame.link:
                raise RemoteProtocolError("frame.link", f"no open link {frame.link:x}", "say hello on a new link")
            [body] = link.receive(frame, now_ns)
            hello = unpack(body)
            if not isinstance(hello, Hello):
                text = f"the first message of a link was {getattr(hello, 'TAG', '?')!r}, not 'hello'"
                raise RemoteProtocolError("hello.first", text)
            if not self._has_tether(frame.link):
                raise RemoteProtocolError(
                    "frame.link",
                    f"no tether stands beside link {frame.link:x}",
                    "connect to tether.sock and send the link id before the hello",
                )
        except RemoteProtocolError as error:
            self._refuse(identity, frame.link, frame.seq, error)
            return []
        self.open[frame.link] = OpenLink(identity, link, hello)
        return [Received(frame.link, hello)]

    def _flush(self, peer: OpenLink) -> None:
        self._out.extend((peer.identity, frame) for frame in peer.link.outgoing())

    def _refuse(self, identity: bytes, link: LinkId, ack: int, error: RemoteProtocolError) -> None:
        if link in self._closed and error.code == "frame.link":
            pass  # what was under way when we closed: answered, and no fault of the peer's
        else:
            self.bad[error.code] += 1
            self.last_bad = str(error)
        self._out.append((identity, pack_frame(FrameKind.CLOSE, link, 0, ack, pack(Refused.of(error)))))

    def _remember(self, link: LinkId) -> None:
        self._closed[link] = None
        if len(self._closed) > CLOSED_REMEMBERED:
            self._closed.popitem(last=False)
