"""What an engine rank and its worker say to each other over their plain unix stream socket.

    rank ──RankRegister (+ descriptors)──▶ worker ──RankRegistered (+ pidfd) | Refused──▶
    rank ──Begin, CancelTickets, Detach──▶ worker ──Words──▶ rank

The kernel keeps a stream whole and in order, so nothing here is numbered; its end is the notice of
death in either direction. Each message is framed by its length as u32, little-endian. Descriptors ride
on the first byte of the frame they belong to: those of the layout's `*_fd` handles in order, then the
shared page's.
"""

import struct
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from kvferry.proto import limits, version
from kvferry.proto.columns import sum_counts
from kvferry.proto.control import Control, Facts, Rank, Text, WorldSize
from kvferry.proto.errors import LocalProtocolError, RemoteProtocolError
from kvferry.proto.layout import Layout, U32Field, U64Field, Wire
from kvferry.proto.outcome import Kind, Outcome
from kvferry.proto.schema import Message, col_u8, col_u32, col_u64, integer, message, pack, same_length

MarkMode = Literal["word", "host"]


class Probe(Wire):
    """Bytes that the rank has just written through the engine's own tensors.

    The worker must read the same through its mapping, or it maps something else.
    """

    handle: Annotated[int, Field(ge=0, lt=limits.MAX_HANDLES)]
    offset: U64Field
    expect: Annotated[bytes, Field(min_length=1, max_length=4096)]


class RankRegister(Control, tag="rank.register"):
    """Rank -> worker: first message of a tether; carries the descriptors."""

    major: U32Field = version.PROTOCOL_MAJOR
    minor: U32Field = version.PROTOCOL_MINOR
    engine_id: Text
    rank: Rank
    world_size: WorldSize
    layout: Layout
    facts: Facts = {}  # model, weights, dtype, ...: resolved, as this rank sees them
    probes: Annotated[tuple[Probe, ...], Field(strict=False, max_length=limits.MAX_HANDLES)] = ()
    mark_mode: MarkMode = "word"
    pid: U64Field = 0
    pid_ns: U64Field = 0

    def check(self) -> None:
        with_fd = sum(handle.kind.endswith("_fd") for handle in self.layout.handles)
        if with_fd + 1 > limits.MAX_DESCRIPTORS:  # and the shared page's
            raise RemoteProtocolError(
                "message.limit", f"{with_fd + 1} descriptors; one message carries {limits.MAX_DESCRIPTORS}"
            )
        for n, probe in enumerate(self.probes):
            if probe.handle >= len(self.layout.handles):
                raise RemoteProtocolError(
                    "layout.probe", f"probe {n} names handle {probe.handle} of {len(self.layout.handles)}"
                )
            have, end = self.layout.handles[probe.handle].nbytes, probe.offset + len(probe.expect)
            if end > have:
                raise RemoteProtocolError("layout.probe", f"probe {n} ends at byte {end} of memory of {have} bytes")


class RankRegistered(Control, tag="rank.registered"):
    """Worker -> rank: served. A pidfd of the worker rides along: the rank's own proof of its death."""

    worker: U64Field
    boot: U64Field
    pid: U64Field
    mark_mode: MarkMode
    slots: U64Field


class Detach(Control, tag="detach"):
    """Rank -> worker: end politely. The worker drains, unmaps and closes the tether."""


@message("begin")
@dataclass(frozen=True, slots=True)
class Begin:
    """Rank -> worker: the blocks of these tickets may be touched once the mark word reaches `mark`."""

    TAG: ClassVar[str]
    mark: int = integer()
    tickets: bytes = col_u64()

    def check(self) -> None:
        """No relation to check."""


@message("cancel.tickets")
@dataclass(frozen=True, slots=True)
class CancelTickets:
    """Rank -> worker: end these as soon as it is safe; each still gets its one word.

    For a ticket never seen it leaves a tombstone that refuses a later plan.
    """

    TAG: ClassVar[str]
    tickets: bytes = col_u64()

    def check(self) -> None:
        """No relation to check."""


@message("words")
@dataclass(frozen=True, slots=True)
class Words:
    """Worker -> rank: this rank's part of these tickets is over; nothing of them touches memory any more."""

    TAG: ClassVar[str]
    tickets: bytes = col_u64()  # (t,)
    kinds: bytes = col_u8(limits.MAX_JOBS, max(Kind))  # (t,) outcome.Kind; a ticket without a plan says LOAD
    outcomes: bytes = col_u8(limits.MAX_JOBS, max(Outcome))  # (t,) outcome.Outcome
    wait_us: bytes = col_u32(limits.MAX_JOBS)  # (t,) from begin to the first byte's submission
    copy_us: bytes = col_u32(limits.MAX_JOBS)  # (t,)
    failed_counts: bytes = col_u32(limits.MAX_JOBS)  # (t,) failed blocks of a load; all when it never began
    failed_blocks: bytes = col_u32()  # (sum,) block ids

    def check(self) -> None:
        same_length(self, "tickets", "kinds", "outcomes", "wait_us", "copy_us", "failed_counts")
        failed = sum_counts(self.failed_counts)
        if failed != len(self.failed_blocks) // 4:
            raise ValueError(f"failed_counts add up to {failed}, failed_blocks has {len(self.failed_blocks) // 4}")


_LENGTH: Final = struct.Struct("<I")


def frame(msg: Message) -> bytes:
    """The framed wire form of `msg`; LocalProtocolError if it breaks the protocol."""
    body = pack(msg)
    if len(body) > limits.MAX_TETHER_BYTES:
        raise LocalProtocolError("frame.size", f"{len(body)} bytes; the limit is {limits.MAX_TETHER_BYTES}")
    return _LENGTH.pack(len(body)) + body


class Deframer:
    """Cuts a byte stream into message bodies. Sans-IO: feed it what was read."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Bodies completed by `data`; RemoteProtocolError(frame.size) on a length past the limit.

        The length is refused before its bytes are awaited. A stream that broke stays broken: every later call
        raises too, and bodies that ended in the same `data` are dropped with it.
        """
        self._buffer += data
        bodies = []
        while len(self._buffer) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer)
            if size > limits.MAX_TETHER_BYTES:
                raise RemoteProtocolError("frame.size", f"{size} bytes; the limit is {limits.MAX_TETHER_BYTES}")
            if len(self._buffer) < _LENGTH.size + size:
                break
            bodies.append(bytes(self._buffer[_LENGTH.size : _LENGTH.size + size]))
            del self._buffer[: _LENGTH.size + size]
        return bodies
