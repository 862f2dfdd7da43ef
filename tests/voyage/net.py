"""Carriers between the parties.

    LinkEnd ══frames══▶ Network ══frames══▶ LinkEnd      late, doubled, swapped, lost; real proto.link at both ends
    StreamEnd ──bytes──▶ Network ──bytes──▶ StreamEnd    late, but whole and in order: a kernel's stream

All bytes that travel are the real ones: packed, framed, unpacked and checked.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvferry.proto.codec import pack, unpack
from kvferry.proto.ids import LinkId
from kvferry.proto.link import Link, unpack_frame
from kvferry.proto.tether import Deframer, frame

from .clock import MS, US, Clock


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

    def __init__(self, net: Network, link: LinkId, on_message: Callable[[Any], None]) -> None:
        self.link = Link(link)
        self.peer: LinkEnd
        self.cut = False  # nothing leaves or enters any more: its process is dead
        self._net = net
        self._on_message = on_message
        self._armed_ns: int | None = None
        self._last_ns = 0
        self._usual_ns = net.draw_delay()

    @staticmethod
    def pair(
        net: Network, link: LinkId, on_near: Callable[[Any], None], on_far: Callable[[Any], None]
    ) -> "tuple[LinkEnd, LinkEnd]":
        """Both ends of one link."""
        near, far = LinkEnd(net, link, on_near), LinkEnd(net, link, on_far)
        near.peer, far.peer = far, near
        return near, far

    def send(self, message: Any) -> bool:
        """Number and send a message; False if the link takes it not."""
        if not self.link.send(pack(message), self._net.clock.now_ns):
            return False
        self._flush()
        return True

    def _flush(self) -> None:
        for raw in self.link.outgoing():
            if not self.cut:
                self._last_ns = self._net.carry(raw, self.peer._deliver, self._usual_ns, self._last_ns)
        due = self.link.next_due_ns()
        if due is not None and (self._armed_ns is None or due < self._armed_ns):
            self._armed_ns = due
            self._net.clock.at(due, self._tick, due)

    def _deliver(self, raw: bytes) -> None:
        if self.cut:
            return
        bodies = self.link.receive(unpack_frame(raw), self._net.clock.now_ns)
        self._flush()
        for body in bodies:
            self._on_message(unpack(body))

    def _tick(self, armed_ns: int) -> None:
        if self._armed_ns != armed_ns or self.cut:
            return
        self._armed_ns = None
        self.link.tick(self._net.clock.now_ns)
        self._flush()


class StreamEnd:
    """One end of a tether: framed messages over an ordered stream that may cut a frame in two."""

    def __init__(self, net: Network, rng: random.Random, on_message: Callable[[Any], None]) -> None:
        self.peer: StreamEnd
        self.cut = False
        self._net = net
        self._rng = rng
        self._on_message = on_message
        self._deframer = Deframer()
        self._last_ns = 0
        self._usual_ns = net.draw_delay()

    @staticmethod
    def pair(
        net: Network, rng: random.Random, on_near: Callable[[Any], None], on_far: Callable[[Any], None]
    ) -> "tuple[StreamEnd, StreamEnd]":
        """Both ends of one stream."""
        near, far = StreamEnd(net, rng, on_near), StreamEnd(net, rng, on_far)
        near.peer, far.peer = far, near
        return near, far

    def send(self, message: Any) -> None:
        """Put one framed message on the stream."""
        if self.cut:
            return
        raw = frame(message)
        pieces = [raw]
        if self._rng.random() < 0.1:
            at = self._rng.randrange(1, len(raw))
            pieces = [raw[:at], raw[at:]]
        for piece in pieces:
            self._last_ns = max(self._last_ns, self._net.clock.now_ns + self._net.delay(self._usual_ns))
            self._net.clock.at(self._last_ns, self.peer._deliver, piece)

    def _deliver(self, piece: bytes) -> None:
        if self.cut:
            return
        for body in self._deframer.feed(piece):
            self._on_message(unpack(body))
