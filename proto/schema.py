"""How a message type is declared, packed and checked: one place for all of them.

A message is a frozen dataclass under `@message("tag")`. On the wire it is a msgpack array
`[tag, field, field, ...]` in the order of declaration. Each field has one of few types, named by the
annotation helpers below; `unpack` checks number, type and bounds of every field, then calls the
message's own `check()` for relations between columns. Nothing is constructed from a name on the wire
but the types registered here, and a handler never sees a message that failed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, ClassVar, Final, Protocol, TypeVar, cast

import msgpack

from kvferry.proto import limits
from kvferry.proto.columns import u8, u32, u64
from kvferry.proto.errors import LocalProtocolError, RemoteProtocolError
from kvferry.proto.ids import U64_MAX

T = TypeVar("T")


class Message(Protocol):
    """Anything that `pack` takes and `unpack` gives."""

    TAG: ClassVar[str]

    def check(self) -> None:
        """Raise ValueError if columns disagree, or RemoteProtocolError with a code of its own."""


@dataclass(frozen=True, slots=True)
class FieldKind:
    """What one field may hold: an int up to `maximum`, or bytes that are `width`-byte items."""

    name: str
    maximum: int = 0  # of an int
    width: int = 0  # bytes of one item of a column; 0: not a column
    limit: int = 0  # items of a column
    allowed: bytes = b""  # of a u8 column: the values an item may have; empty: any


def _meta(kind: FieldKind, default: Any = ...) -> Any:
    return field(metadata={"kind": kind}) if default is ... else field(default=default, metadata={"kind": kind})


def integer(maximum: int = U64_MAX, default: Any = ...) -> Any:
    """An unsigned int field."""
    return _meta(FieldKind("u64", maximum=maximum), default)


def col_u8(limit: int = limits.MAX_KEYS, maximum: int = 255) -> Any:
    """A column of unsigned bytes up to `maximum`, empty by default."""
    allowed = bytes(range(maximum + 1)) if maximum < 255 else b""
    return _meta(FieldKind("u8[]", maximum=maximum, width=1, limit=limit, allowed=allowed), b"")


def col_u32(limit: int = limits.MAX_KEYS) -> Any:
    """A column of u32, empty by default."""
    return _meta(FieldKind("u32[]", width=4, limit=limit), b"")


def col_u64(limit: int = limits.MAX_JOBS) -> Any:
    """A column of u64, empty by default."""
    return _meta(FieldKind("u64[]", width=8, limit=limit), b"")


def col_keys() -> Any:
    """A column of keys, each `key_bytes` of the message wide, empty by default."""
    return _meta(FieldKind("keys", width=1, limit=limits.MAX_KEYS * limits.MAX_KEY_BYTES), b"")


MESSAGES: Final[dict[str, type[Any]]] = {}


def message(tag: str) -> Callable[[type[T]], type[T]]:
    """Register a frozen dataclass as the message named `tag` in docs/protocol.md."""

    def register(cls: type[T]) -> type[T]:
        add_message(tag, cls)
        return cls

    return register


def add_message(tag: str, cls: type[Any]) -> None:
    """Enter one message type; LocalProtocolError if its tag is taken."""
    if tag in MESSAGES:
        raise LocalProtocolError("message.unknown", f"two messages are tagged {tag!r}")
    cls.TAG = tag
    MESSAGES[tag] = cls


def field_kinds(cls: type[Any]) -> list[tuple[str, FieldKind]]:
    """(name, kind) of each field of a hot message type, in wire order."""
    return [(f.name, cast(FieldKind, f.metadata["kind"])) for f in fields(cls)]


_KINDS: Final[dict[type[Any], list[tuple[str, FieldKind]]]] = {}


def _kinds(cls: type[Any]) -> list[tuple[str, FieldKind]]:
    found = _KINDS.get(cls)
    if found is None:
        found = _KINDS[cls] = field_kinds(cls)
    return found


def pack(msg: Message) -> bytes:
    """The wire form of a message; LocalProtocolError if it would be refused at the other end."""
    to_map = getattr(msg, "to_map", None)
    try:
        if to_map is not None:
            body = [to_map()]
        else:
            body = [getattr(msg, name) for name, _ in _kinds(type(msg))]
            _check_fields(msg.TAG, _kinds(type(msg)), body)
        _check(msg)
        raw = cast(bytes, msgpack.packb([msg.TAG, *body], use_bin_type=True))
    except RemoteProtocolError as error:
        raise LocalProtocolError(error.code, error.text, error.fix) from None
    except (TypeError, ValueError, OverflowError) as error:  # what msgpack says of a value it cannot pack
        raise LocalProtocolError("message.fields", f"{msg.TAG}: {error}") from None
    if len(raw) > limits.MAX_BODY_BYTES:
        raise LocalProtocolError(
            "frame.size", f"{msg.TAG} has {len(raw)} bytes; the limit is {limits.MAX_BODY_BYTES}", "send it in parts"
        )
    return raw


def unpack(raw: bytes | memoryview) -> Any:
    """The message that `raw` holds. RemoteProtocolError if it is none, and nothing has changed."""
    if len(raw) > limits.MAX_FRAME_BYTES:
        raise RemoteProtocolError("frame.size", f"{len(raw)} bytes; the limit is {limits.MAX_FRAME_BYTES}")
    try:
        items = msgpack.unpackb(
            raw,
            raw=False,
            strict_map_key=True,
            max_str_len=1 << 20,
            # A header of five bytes may announce any length, and msgpack reserves room for it at once.
            max_array_len=min(limits.MAX_ITEMS, len(raw)),
            max_map_len=min(limits.MAX_ITEMS, len(raw)),
            max_ext_len=0,
            ext_hook=_no_extensions,
        )
    except Exception as error:  # msgpack raises ValueError, its own and UnicodeDecodeError alike
        raise RemoteProtocolError("message.malformed", f"not msgpack: {type(error).__name__}") from None
    if not isinstance(items, list) or not items or not isinstance(items[0], str):
        raise RemoteProtocolError("message.malformed", "not an array that begins with a tag")
    cls = MESSAGES.get(items[0])
    if cls is None:
        raise RemoteProtocolError("message.unknown", f"tag {items[0][:40]!r}")
    from_map = getattr(cls, "from_map", None)
    if from_map is not None:
        if len(items) != 2 or not isinstance(items[1], dict):
            raise RemoteProtocolError("message.fields", f"{items[0]} is not [tag, map]")
        made = from_map(items[1])
        _check(made)
        return made
    kinds = _kinds(cls)
    tag = items.pop(0)
    if len(items) != len(kinds):
        raise RemoteProtocolError("message.fields", f"{tag} has {len(items)} fields; this build knows {len(kinds)}")
    _check_fields(tag, kinds, items)
    msg = cls(*items)
    _check(msg)
    return msg


def _check_fields(tag: str, kinds: list[tuple[str, FieldKind]], values: list[object]) -> None:
    for (name, kind), value in zip(kinds, values, strict=True):
        # Most columns of a message are empty: this line is a third of what decoding a step costs.
        if type(value) is bytes and not value and kind.width:
            continue
        _check_field(tag, name, kind, value)


def _check_field(tag: str, name: str, kind: FieldKind, value: object) -> None:
    if kind.width == 0:
        # bool is an int to Python, and a true is no number to us.
        if type(value) is not int:
            raise RemoteProtocolError("message.fields", f"{tag}.{name} is {type(value).__name__}, not {kind.name}")
        if not 0 <= value <= kind.maximum:
            raise RemoteProtocolError("message.limit", f"{tag}.{name} = {value}; it may be 0..{kind.maximum}")
        return
    if type(value) is not bytes:
        raise RemoteProtocolError("message.fields", f"{tag}.{name} is {type(value).__name__}, not {kind.name}")
    if len(value) % kind.width:
        raise RemoteProtocolError(
            "message.lengths", f"{tag}.{name} has {len(value)} bytes, no multiple of {kind.width}"
        )
    if len(value) > kind.limit * kind.width:
        raise RemoteProtocolError(
            "message.limit", f"{tag}.{name} has {len(value) // kind.width} items; the limit is {kind.limit}"
        )
    # What is left after all allowed values are deleted; runs at memory speed.
    if kind.allowed and (strange := value.translate(None, kind.allowed)):
        raise RemoteProtocolError("message.limit", f"{tag}.{name} holds {strange[0]}; it may be 0..{kind.maximum}")


def _no_extensions(code: int, data: bytes) -> object:
    raise ValueError(f"extension type {code}")


def _check(msg: Message) -> None:
    try:
        msg.check()
    except ValueError as error:
        raise RemoteProtocolError("message.lengths", f"{msg.TAG}: {error}") from None


# By names: the type that has them, how to get the columns, the bytes of an item of each.
_COLUMNS: Final[dict[tuple[str, ...], tuple[type[Any], Callable[[object], tuple[bytes, ...]], tuple[int, ...]]]] = {}


def same_length(msg: object, *names: str) -> int:
    """The common item count of the named columns of `msg`; ValueError with both counts if they differ."""
    found = _COLUMNS.get(names)
    if found is None or found[0] is not type(msg):
        kinds = dict(_kinds(type(msg)))
        found = _COLUMNS[names] = (type(msg), attrgetter(*names), tuple(kinds[name].width for name in names))
    _, columns_of, widths = found
    columns = columns_of(msg)
    if not any(columns):
        return 0
    count = len(columns[0]) // widths[0]
    for column, width in zip(columns, widths, strict=True):
        if len(column) != count * width:
            counts = [f"{n} has {len(c) // w}" for n, c, w in zip(names, columns, widths, strict=True)]
            raise ValueError("columns differ: " + ", ".join(counts))
    return count


def describe(msg: Any) -> str:
    """One line for logs and transcripts: the tag, the ints, and the items of each non-empty column."""
    to_map = getattr(msg, "to_map", None)
    if to_map:
        return f"{msg.TAG} " + " ".join(f"{k}={v}" for k, v in to_map().items())
    parts = [msg.TAG]
    for name, kind in _kinds(type(msg)):
        value = getattr(msg, name)
        if kind.width == 0:
            parts.append(f"{name}={value}")
        elif value:
            views: dict[str, Callable[[bytes], Any]] = {"u8[]": u8, "u32[]": u32, "u64[]": u64}
            view = views.get(kind.name)
            text = ",".join(map(str, view(value).tolist())) if view else f"{len(value)}B"
            parts.append(f"{name}={text}")
    return " ".join(parts)
