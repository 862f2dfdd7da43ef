"""How a client comes to be known to a daemon, and what it hears of its engine's ranks. Sans-IO.

    OFF ──hello──▶ HELLO ──Welcome──▶ REGISTERING ──Registered──▶ REGISTERED ──RanksChanged──▶ (same)
     ▲                │                    │                          │
     └──── lost ──────┴────────────────────┴──────────────────────────┘        Refused, at any time ──▶ REFUSED

The same path at start and after each loss.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from kvferry.client.lookups import MS
from kvferry.proto.control import Hello, RanksChanged, Refused, Register, Registered, Rotate, Welcome
from kvferry.proto.schema import Message


class State(Enum):
    """How far the registration has come."""

    OFF = "off"
    HELLO = "hello"  # waiting for Welcome
    REGISTERING = "registering"  # waiting for Registered
    REGISTERED = "registered"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """What an engine says of itself. Times in nanoseconds."""

    engine_id: str
    world_size: int
    key_bytes: int
    num_blocks: int
    block_tokens: int
    facts: Mapping[str, str] = field(default_factory=dict)
    salt: bytes = b""
    patience_ns: int = 20 * MS


class Registration:
    """One client's standing with the daemon of the moment."""

    def __init__(self, settings: ClientSettings) -> None:
        self.settings = settings
        self.state = State.OFF
        self.refusal: Refused | None = None
        self.boot = 0
        self.incarnation = 0
        self.num_attached = 0
        self.namespace = ""
        self.slots = 0
        self._salt = settings.salt
        self._told_salt = settings.salt

    @property
    def is_whole(self) -> bool:
        """Registered, and every rank served: only then anything hits."""
        return self.state is State.REGISTERED and self.num_attached == self.settings.world_size

    def hello(self, software: str, pid: int) -> Message:
        """Begin on a new link."""
        self.refusal = None
        self.state = State.HELLO
        return Hello(role="client", software=software, pid=pid)

    def welcome(self, msg: Welcome) -> Message:
        """The link is open: the registration to send."""
        settings = self.settings
        self.boot = msg.boot
        self.state = State.REGISTERING
        self._told_salt = self._salt
        return Register(
            engine_id=settings.engine_id,
            world_size=settings.world_size,
            key_bytes=settings.key_bytes,
            num_blocks=settings.num_blocks,
            block_tokens=settings.block_tokens,
            facts=dict(settings.facts),
            salt=self._salt,
        )

    def registered(self, msg: Registered) -> list[Message]:
        """We are known; what is still to be said."""
        self.state = State.REGISTERED
        self.incarnation = msg.incarnation
        if self._salt == self._told_salt:
            return []
        # Rotated while the registration was on its way: it named a namespace that is ours no more.
        return [Rotate(salt=self._salt)]

    def ranks(self, msg: Registered | RanksChanged) -> bool:
        """How many ranks are attached, and the namespace; whether the namespace is another one now."""
        has_moved = msg.namespace != self.namespace
        self.num_attached, self.namespace, self.slots = msg.attached, msg.namespace, msg.slots
        return has_moved

    def rotate(self, salt: bytes) -> list[Message]:
        """Another salt from now on; what to say of it now."""
        self._salt = salt
        return [Rotate(salt=salt)] if self.state is State.REGISTERED else []

    def lost(self) -> bool:
        """The link is over; whether a registration ended with it."""
        was_known = self.state in (State.REGISTERED, State.REGISTERING)
        self.state = State.OFF
        self.num_attached = self.incarnation = 0
        return was_known

    def refuse(self, refusal: Refused) -> None:
        """Turned down: the reason stands until the next try."""
        self.state = State.REFUSED
        self.refusal = refusal
