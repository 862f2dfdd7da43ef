"""The rare messages: hello, registration, attachment, status. Validated by pydantic, sent as one map.

any peer  ──Hello──▶ daemon ──Welcome | Refused──▶
client    ──Register──▶ daemon ──Registered | Refused──▶            then RanksChanged as ranks come and go
worker    ──Drained──▶ daemon                                       first after Welcome, on every link
          ──Attach──▶ daemon ──Attached | Refused──▶                then RankGone, or the link's end
admin     ──StatusAsk──▶ daemon ──StatusAnswer──▶
          ──ResetAsk──▶ daemon ──ResetAnswer | Refused──▶
          ──DrainAsk──▶ daemon ──DrainAnswer──▶                     when nothing is in flight any more
"""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError

from kvferry.proto import limits, version
from kvferry.proto.errors import KvferryError, RefusedError, RemoteProtocolError
from kvferry.proto.layout import U32Field, U64Field, Wire
from kvferry.proto.schema import add_message

Text = Annotated[str, Field(max_length=limits.MAX_TEXT)]
Facts = Annotated[dict[Text, Text], Field(max_length=limits.MAX_FACTS)]
Rank = Annotated[int, Field(ge=0, lt=limits.MAX_RANKS)]
WorldSize = Annotated[int, Field(ge=1, le=limits.MAX_RANKS)]


class Control(Wire):
    """Base of control messages: `[tag, map]` on the wire."""

    TAG: ClassVar[str]

    def __init_subclass__(cls, tag: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if tag:
            add_message(tag, cls)

    def to_map(self) -> dict[str, Any]:
        """The map that travels."""
        return self.model_dump()

    @classmethod
    def from_map(cls, items: dict[str, Any]) -> Self:
        """The message that a map holds; RemoteProtocolError naming the first bad field."""
        try:
            return cls.model_validate(items)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])[:120]
            raise RemoteProtocolError("message.fields", f"{cls.TAG}.{where}: {first['msg']}") from None

    def check(self) -> None:
        """Relations between fields: none here. ValueError or RemoteProtocolError where there are some."""


class Hello(Control, tag="hello"):
    """First message of every link. Welcome or Refused answers it."""

    major_min: U32Field = version.SUPPORTED_MAJORS[0]
    major_max: U32Field = version.SUPPORTED_MAJORS[1]
    minor: U32Field = version.PROTOCOL_MINOR
    role: Literal["client", "worker", "admin"]
    software: Text = ""
    pid: U64Field = 0


class Welcome(Control, tag="welcome"):
    """Daemon -> peer: the link is open."""

    major: U32Field
    minor: U32Field
    boot: U64Field
    tp_size: WorldSize


class Refused(Control, tag="refused"):
    """A hello, registration or attachment was turned down. `code` is one of errors.CODES."""

    code: Text
    text: Text
    fix: Text = ""

    @classmethod
    def of(cls, error: KvferryError) -> "Refused":
        """The refusal that tells of `error`."""
        return cls(code=error.code, text=_sendable(error.text), fix=_sendable(error.fix))

    def error(self) -> RefusedError:
        """The error to raise or log on the refused side."""
        return RefusedError(self.code, self.text, self.fix)


def _sendable(text: str) -> str:
    # File names may hold lone surrogates, which no UTF-8 can carry.
    return text.encode("utf-8", "replace").decode()[: limits.MAX_TEXT]


class Register(Control, tag="register"):
    """Client -> daemon: the scheduler half of an engine. Registered or Refused answers it.

    Ranks attach through their workers, before or after, under the same `engine_id`.
    """

    engine_id: Text
    world_size: WorldSize
    key_bytes: Annotated[int, Field(ge=limits.MIN_KEY_BYTES, le=limits.MAX_KEY_BYTES)]
    num_blocks: Annotated[int, Field(ge=1, le=limits.MAX_BLOCKS)]
    block_tokens: Annotated[int, Field(ge=1, le=1 << 20)]
    facts: Facts = {}  # what the keys depend on beyond what ranks report: hash scheme, model, ...
    salt: Annotated[bytes, Field(max_length=256)] = b""


class Registered(Control, tag="registered"):
    """Daemon -> client: the engine is known. Nothing hits until all ranks are attached."""

    incarnation: U64Field
    namespace: Text  # hex digest; "" until all ranks are attached
    epoch: U32Field
    attached: WorldSize | Literal[0]
    slots: U64Field  # of the pool; 0 until its geometry is fixed


class RanksChanged(Control, tag="ranks.changed"):
    """Daemon -> client: how many ranks are attached now, and the namespace once it is known."""

    attached: WorldSize | Literal[0]
    namespace: Text
    epoch: U32Field
    slots: U64Field


class Rotate(Control, tag="rotate"):
    """Client -> daemon: this engine's weights or cache may have changed; its keys mean something new.

    Moves this engine alone to the namespace of `salt`. One RanksChanged answers it.
    """

    salt: Annotated[bytes, Field(max_length=256)]


class Goodbye(Control, tag="goodbye"):
    """Client or worker -> daemon: an orderly end of this link."""


class Attach(Control, tag="attach"):
    """Worker -> daemon: an engine's rank has shown me its memory. Attached or Refused answers it."""

    worker: U64Field
    engine_id: Text
    rank: Rank
    world_size: WorldSize
    layout_digest: Text
    payload_bytes: Annotated[tuple[Annotated[int, Field(gt=0)], ...], Field(strict=False, max_length=limits.MAX_GROUPS)]
    block_tokens: Annotated[tuple[Annotated[int, Field(gt=0)], ...], Field(strict=False, max_length=limits.MAX_GROUPS)]
    num_blocks: Annotated[int, Field(ge=1, le=limits.MAX_BLOCKS)]
    pool_bytes: U64Field  # of this rank's pool file, behind its own header page
    facts: Facts = {}

    def check(self) -> None:
        if not self.payload_bytes or len(self.payload_bytes) != len(self.block_tokens):
            raise ValueError(
                f"payload_bytes names {len(self.payload_bytes)} groups, block_tokens {len(self.block_tokens)}"
            )


class Attached(Control, tag="attached"):
    """Daemon -> worker: serve this rank."""

    slots: U64Field


class RankGone(Control, tag="rank.gone"):
    """Worker -> daemon: the rank's tether is at its end; this worker drains and exits."""


class Drained(Control, tag="drained"):
    """Worker -> daemon: nothing that another link told this worker is in flight or waiting any more. Since 1.1.

    Said on every link, after Welcome and before Attach; a worker that never had another link says it at once.
    `boot` is the one of this link's Welcome. Until all workers that outlived a daemon have said it or are
    reaped, their next daemon gives no slot away. To the same daemon it is the last word on all
    jobs of the worker's lost link. No answer.
    """

    worker: U64Field
    boot: U64Field


class StatusAsk(Control, tag="status.ask"):
    """Admin -> daemon."""


class StatusAnswer(Control, tag="status.answer"):
    """Daemon -> admin: gauges and counters as plain JSON types."""

    status: dict[str, Any]


class ResetAsk(Control, tag="reset.ask"):
    """Admin -> daemon: forget everything of a namespace, at once. ResetAnswer or Refused answers it. Since 1.1."""

    namespace: Text  # hex digest, or its first digits if only one namespace begins so; "*": all


class ResetAnswer(Control, tag="reset.answer"):
    """Daemon -> admin: the new epochs, which are in the table's header already."""

    epochs: dict[Text, U32Field]  # namespace -> epoch; at most 1024 of them are named
    keys: U64Field  # that were held or being written


class DrainAsk(Control, tag="drain.ask"):
    """Admin -> daemon: admit nothing more, let go of what runs. DrainAnswer comes when all is at rest. Since 1.1.

    Loads run to their end; stores have `budget_ms`, then they are cancelled. `resume` ends the drain instead.
    """

    budget_ms: U32Field = 2000
    resume: bool = False


class DrainAnswer(Control, tag="drain.answer"):
    """Daemon -> admin: no copy runs and nothing is admitted (or, after `resume`, all is as before)."""

    dropped: U64Field  # stores that the budget did not cover
    waited_ms: U64Field
