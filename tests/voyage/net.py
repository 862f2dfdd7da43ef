"""Carriers between the parties.

    LinkEnd ══frames══▶ Network ══frames══▶ LinkEnd      late, doubled, swapped, lost; real proto.link at both ends
    StreamEnd ──bytes──▶ Network ──bytes──▶ StreamEnd    late, but whole and in order: a kernel's stream

All bytes that travel are the real ones: packed, framed, unpacked and checked. A link that is severed takes
nothing more, what is under way still comes, and each end hears of it at a moment of its own; a stream brings what
was written and then its end.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvferry.proto.codec import pack, unpack
from kvferry.proto.ids import LinkId
from kvferry.proto.link import Link, unpack_frame
from kvferry.proto.tether import Deframer, frame

from .clock import MS, US, Clock, Party


@dataclass(slots=True)
class Weather:
    """How unkind the network is. Probabilities are per frame."""

    drop: float = 0.0
    double: float = 0.0
    linger: float = 0.0  # a frame that takes far longer than its neighbours
    swap: float = 0.0  # a frame that does not keep its place
    delays_ns: tuple[tuple[int, int], ...] = ((20 * US, 2 * MS),)  # each direction of a link has one of these
    linger_ns: tuple[int, int] = (5 * MS, 150 * MS)

    def calm(self) -> None:
        """No more faults; delays stay."""
        self.drop = self.double = self.linger = self.swap = 0.0


class Network:
    """Moves frames and bytes by the seed's will."""

    def __init__(self, clock: Clock, rng: random.Random, weather: Weather) -> None:
        self.clock = clock
        self.weather = weather
        self.dropped = self.doubled = self.frames = 0
        self._rng = rng

    def draw_delay(self) -> tuple[int, int]:
        """How long frames of one direction of one link take: least and most."""
        return self._rng.choice(self.weather.delays_ns)

    def draw_notice(self) -> int:
        """How long until somebody hears that a connection is over: mostly at once."""
        return self._rng.randrange(10 * US, self._rng.choice((200 * US, 2 * MS, 40 * MS)))

    def delay(self, usual_ns: tuple[int, int]) -> int:
        """How long one frame takes."""
        weather = self.weather
        if weather.linger and self._rng.random() < weather.linger:
            return self._rng.randrange(*weather.linger_ns)
        return self._rng.randrange(*usual_ns)

    def carry(self, raw: bytes, deliver: Callable[[bytes], None], usual_ns: tuple[int, int], last_ns: int) -> int:
        """Bring one frame to `deliver`: once, twice or never, at moments of the network's choice.

        Mostly in order, as sockets do: `last_ns` is when the frame before it arrives, the answer when this one does.
        """
        self.frames += 1
        weather, random = self.weather, self._rng.random
        if weather.drop and random() < weather.drop:
            self.dropped += 1
            return last_ns
        if weather.double and random() < weather.double:
            self.doubled += 1
            self.clock.after(self.delay(usual_ns), deliver, raw)
        if (weather.linger and random() < weather.linger) or (weather.swap and random() < weather.swap):
            self.clock.after(self.delay(usual_ns), deliver, raw)
            return last_ns
        last_ns = max(last_ns, self.clock.now_ns + self._rng.randrange(*usual_ns))
        self.clock.at(last_ns, deliver, raw)
        return last_ns


class LinkEnd:
    """One end of a numbered link over the lossy carrier."""

    def __init__(
        self, net: Network, link: LinkId, party: Party, on_message: Callable[[Any], None], on_lost: Callable[[], None]
    ) -> None:
        self.link = Link(link)
        self.peer: LinkEnd
        self.severed = False  # nothing leaves any more
        self.cut = False  # nothing is heard any more: this end knows that it is over
        self._net = net
        self._party = party
        self._on_message = on_message
        self._on_lost = on_lost
        self._armed_ns: int | None = None
        self._last_ns = 0
        self._usual_ns = net.draw_delay()

    @staticmethod
    def join(near: "LinkEnd", far: "LinkEnd") -> None:
        """Make them the two ends of one link."""
        near.peer, far.peer = far, near

    def send(self, message: Any) -> bool:
        """Number and send a message; False if the link takes it not."""
        if not self.link.send(pack(message), self._party.now_ns):
            return False
        self._flush()
        return True

    def sever(self) -> None:
        """The connection is over: one of its processes is dead or has closed it, or it broke by itself."""
        for end in (self, self.peer):
            if not end.severed:
                end.severed = True
                self._net.clock.after(self._net.draw_notice(), end._party.run, end._lose)

    def close(self) -> None:
        """This end wants no more of it."""
        self.cut = True
        self.sever()

    def _lose(self) -> None:
        if not self.cut:
            self.cut = True
            self._on_lost()

    def _flush(self) -> None:
        for raw in self.link.outgoing():
            if not self.severed:
                self._last_ns = self._net.carry(raw, self.peer._arrive, self._usual_ns, self._last_ns)
        due = self.link.next_due_ns()
        if due is not None and (self._armed_ns is None or due < self._armed_ns):
            self._armed_ns = due
            self._party.at(due, self._tick, due)

    def _arrive(self, raw: bytes) -> None:
        self._party.run(self._deliver, raw)

    def _deliver(self, raw: bytes) -> None:
        if self.cut:
            return
        bodies = self.link.receive(unpack_frame(raw), self._party.now_ns)
        self._flush()
        for body in bodies:
            self._on_message(unpack(body))

    def _tick(self, armed_ns: int) -> None:
        if self._armed_ns != armed_ns or self.cut:
            return
        self._armed_ns = None
        self.link.tick(self._party.now_ns)
        self._flush()
        if self.link.lost:
            self._lose()
            self.sever()


class StreamEnd:
    """One end of a tether: framed messages over an ordered stream that may cut a frame in two."""

    def __init__(
        self,
        net: Network,
        rng: random.Random,
        party: Party,
        on_message: Callable[[Any], None],
        on_end: Callable[[], None],
    ) -> None:
        self.peer: StreamEnd
        self.closed = False
        self._broken = False  # nothing is carried any more
        self._net = net
        self._rng = rng
        self._party = party
        self._on_message = on_message
        self._on_end = on_end
        self._deframer = Deframer()
        self._last_ns = 0
        self._usual_ns = net.draw_delay()

    @staticmethod
    def join(near: "StreamEnd", far: "StreamEnd") -> None:
        """Make them the two ends of one stream."""
        near.peer, far.peer = far, near

    def send(self, message: Any) -> None:
        """Put one framed message on the stream."""
        if self.closed or self._broken:
            return
        raw = frame(message)
        pieces = [raw]
        if self._rng.random() < 0.1:
            at = self._rng.randrange(1, len(raw))
            pieces = [raw[:at], raw[at:]]
        for piece in pieces:
            self._put(self.peer._deliver, piece)

    def close(self) -> None:
        """This end is closed, or its process is dead: what was written still comes, then the end."""
        if not self.closed:
            if not self._broken:
                self._put(self.peer._end)
            self.closed = True

    def snap(self) -> None:
        """The connection breaks though both processes live: each hears of it at a moment of its own."""
        for end in (self, self.peer):
            if not (end.closed or end._broken):
                end._put(end.peer._end)
                end._broken = True

    @property
    def all_come_ns(self) -> int:
        """True time at which all that was written here has come."""
        return self._last_ns

    def _put(self, deliver: Callable[..., None], *args: Any) -> None:
        self._last_ns = max(self._last_ns, self._net.clock.now_ns + self._net.delay(self._usual_ns))
        self._net.clock.at(self._last_ns, self.peer._party.run, deliver, *args)

    def _deliver(self, piece: bytes) -> None:
        if self.closed:
            return
        for body in self._deframer.feed(piece):
            if not self.closed:
                self._on_message(unpack(body))

    def _end(self) -> None:
        if not self.closed:
            self._on_end()
