"""Every message type: what is packed comes back equal, and nothing but a message gets through.

Valid instances are drawn from the declared field kinds, so a new hot message is covered by being declared.
"""

import pickle  # noqa: TID251 - what a hostile peer sends
import tracemalloc
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.proto import limits
from kvferry.proto.codec import MESSAGES, control, describe, hot, pack, tether, unpack
from kvferry.proto.columns import pack_u8, pack_u32, pack_u64
from kvferry.proto.errors import CODES, LocalProtocolError, RefusedError, RemoteProtocolError
from kvferry.proto.ids import U32_MAX, U64_MAX
from kvferry.proto.layout import Group, Handle, Layout, Region
from kvferry.proto.schema import FieldKind, field_kinds

HOT = [cls for cls in MESSAGES.values() if not hasattr(cls, "from_map")]
CONTROL = [cls for cls in MESSAGES.values() if hasattr(cls, "from_map")]

# Columns of one letter have one length; `s->S` says that these counts add up to S; `keys S` are S keys.
SHAPES: dict[str, dict[str, str]] = {
    "step": {
        "store_tickets": "s",
        "store_requests": "s",
        "store_groups": "s",
        "store_counts": "s->S",
        "store_keys": "keys S",
        "store_blocks": "S",
        "load_tickets": "l",
        "load_requests": "l",
        "load_leases": "l",
        "load_groups": "l",
        "load_counts": "l->L",
        "load_keys": "keys L",
        "load_blocks": "L",
        "end_requests": "e",
        "end_reasons": "e",
    },
    "step.answer": {"tickets": "t", "jobs": "t", "accepted": "t", "reasons": "t"},
    "jobs.ended": {"tickets": "t", "jobs": "t", "outcomes": "t"},
    "plan": {
        "tickets": "j",
        "jobs": "j",
        "kinds": "j",
        "groups": "j",
        "counts": "j->B",
        "slots": "B",
        "generations": "B",
        "blocks": "B",
    },
    "done": {"jobs": "j", "outcomes": "j", "copy_us": "j"},
    "words": {
        "tickets": "t",
        "kinds": "t",
        "outcomes": "t",
        "wait_us": "t",
        "copy_us": "t",
        "failed_counts": "t->F",
        "failed_blocks": "F",
    },
    "lookup": {"keys": "keys n"},
}


@st.composite
def hot_messages(draw: st.DrawFn, cls: type[Any]) -> Any:
    shapes = SHAPES.get(cls.TAG, {})
    kinds = dict(field_kinds(cls))
    letters = sorted({shape[-1] for shape in shapes.values() if shape[-1].islower() and "->" not in shape})
    sizes = {letter: draw(st.integers(0, 5)) for letter in letters}
    counts: dict[str, list[int]] = {}
    for name, shape in shapes.items():
        if "->" in shape:
            counts[name] = draw(st.lists(st.integers(0, 4), min_size=sizes[shape[0]], max_size=sizes[shape[0]]))
            sizes[shape[-1]] = sum(counts[name])
    values: dict[str, Any] = {}
    for name, kind in kinds.items():
        if kind.width == 0:
            low = limits.MIN_KEY_BYTES if name == "key_bytes" else 0
            values[name] = draw(st.integers(low, kind.maximum))
        elif kind.name != "keys":
            size = sizes.get(shapes.get(name, ""))
            values[name] = _column(kind, counts[name] if name in counts else draw(_items(kind, size)))
    for name, kind in kinds.items():
        if kind.name == "keys":
            nbytes = sizes[shapes[name][-1]] * values["key_bytes"]
            values[name] = draw(st.binary(min_size=nbytes, max_size=nbytes))
    return cls(**values)


def _items(kind: FieldKind, size: int | None) -> st.SearchStrategy[list[int]]:
    top = {"u8[]": kind.maximum, "u32[]": U32_MAX, "u64[]": U64_MAX}[kind.name]
    return st.lists(st.integers(0, top), min_size=size or 0, max_size=6 if size is None else size)


def _column(kind: FieldKind, items: list[int]) -> bytes:
    return {1: pack_u8, 4: pack_u32, 8: pack_u64}[kind.width](items)


def layout(num_regions: int = 2) -> Layout:
    region = [Region(handle=0, offset=i * 640, stride=64, run=64, blocks=10) for i in range(num_regions)]
    return Layout(
        handles=(Handle(kind="shm_fd", nbytes=num_regions * 640),), groups=(Group(regions=region, block_tokens=16),)
    )


CONTROL_SAMPLES = [
    control.Hello(role="client", software="test", pid=7),
    control.Welcome(major=1, minor=0, boot=U64_MAX, tp_size=2),
    control.Refused(code="layout.geometry", text="größer", fix="smaller"),
    control.Register(
        engine_id="e", world_size=2, key_bytes=32, num_blocks=10, block_tokens=16, facts={"a": "b"}, salt=b"\0\xff"
    ),
    control.Registered(incarnation=1, namespace="", epoch=0, attached=0, slots=0),
    control.RanksChanged(attached=2, namespace="ab", epoch=3, slots=4),
    control.Rotate(salt=b"x"),
    control.Goodbye(),
    control.Attach(
        worker=1,
        engine_id="e",
        rank=1,
        world_size=2,
        layout_digest="ab",
        payload_bytes=(128,),
        block_tokens=(16,),
        num_blocks=10,
        pool_bytes=1 << 40,
    ),
    control.Attached(slots=9),
    control.RankGone(),
    control.Drained(worker=1, boot=U64_MAX),
    control.ResetAsk(namespace="*"),
    control.ResetAnswer(epochs={"ab": 3}, keys=7),
    control.DrainAsk(budget_ms=500),
    control.DrainAnswer(dropped=1, waited_ms=2),
    control.StatusAsk(),
    control.StatusAnswer(status={"slots": {"free": 1}, "list": [1, "a", None, 2.5]}),
    tether.RankRegister(
        engine_id="e",
        rank=0,
        world_size=1,
        layout=layout(),
        probes=(tether.Probe(handle=0, offset=3, expect=b"abc"),),
    ),
    tether.RankRegistered(worker=1, boot=2, pid=3, mark_mode="word", slots=4),
    tether.Detach(),
]


@pytest.mark.parametrize("cls", HOT, ids=lambda cls: cls.TAG)
@settings(max_examples=40)
@given(data=st.data())
def test_what_a_hot_message_packs_to_unpacks_to_its_equal(cls: type[Any], data: st.DataObject) -> None:
    message = data.draw(hot_messages(cls))
    assert unpack(pack(message)) == message
    assert unpack(memoryview(pack(message))) == message
    assert describe(message).startswith(message.TAG)


@pytest.mark.parametrize("message", CONTROL_SAMPLES, ids=lambda message: message.TAG)
def test_what_a_control_message_packs_to_unpacks_to_its_equal(message: Any) -> None:
    assert unpack(pack(message)) == message
    assert describe(message).startswith(message.TAG)


def test_every_message_type_has_a_sample_here() -> None:
    assert {type(sample) for sample in CONTROL_SAMPLES} == set(CONTROL)
    assert set(SHAPES) <= {cls.TAG for cls in HOT}


def refuse(raw: bytes) -> RemoteProtocolError:
    with pytest.raises(RemoteProtocolError) as caught:
        unpack(raw)
    assert caught.value.code in CODES
    return caught.value


def only_refuses(raw: bytes) -> None:
    """`raw` is a message or is refused by name; no other exception, whatever it holds."""
    try:
        unpack(raw)
    except RemoteProtocolError as error:
        assert error.code in CODES


@settings(max_examples=150)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused_by_name(raw: bytes) -> None:
    only_refuses(raw)


WILD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), U64_MAX)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=32),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.binary(max_size=4), inner),
    max_leaves=8,
)


@settings(max_examples=150)
@given(tag=st.sampled_from(sorted(MESSAGES)), body=st.lists(WILD, max_size=22))
def test_a_known_tag_with_any_body_is_a_message_or_refused_by_name(tag: str, body: list[Any]) -> None:
    only_refuses(msgpack.packb([tag, *body]))


@pytest.mark.parametrize("message", CONTROL_SAMPLES, ids=lambda message: message.TAG)
@settings(max_examples=25)
@given(data=st.data())
def test_a_control_message_with_one_field_replaced_is_a_message_or_refused(message: Any, data: st.DataObject) -> None:
    items = message.to_map() or {"": None}
    name = data.draw(st.sampled_from(sorted(items)))
    only_refuses(msgpack.packb([message.TAG, {**items, name: data.draw(WILD)}]))


@pytest.mark.parametrize("cls", HOT, ids=lambda cls: cls.TAG)
@settings(max_examples=10)
@given(data=st.data())
def test_a_truncated_message_is_refused_wherever_it_is_cut(cls: type[Any], data: st.DataObject) -> None:
    raw = pack(data.draw(hot_messages(cls)))
    assert refuse(raw[: data.draw(st.integers(0, len(raw) - 1))]).code == "message.malformed"


@pytest.mark.parametrize("cls", HOT, ids=lambda cls: cls.TAG)
def test_a_field_too_many_or_too_few_is_refused(cls: type[Any]) -> None:
    body = [_zero(kind) for _, kind in field_kinds(cls)]
    assert refuse(msgpack.packb([cls.TAG, *body, 0])).code == "message.fields"
    assert refuse(msgpack.packb([cls.TAG, *body[:-1]])).code == "message.fields"


@pytest.mark.parametrize("cls", HOT, ids=lambda cls: cls.TAG)
def test_a_field_of_another_type_or_out_of_range_is_refused_by_its_name(cls: type[Any]) -> None:
    kinds = field_kinds(cls)
    for name, kind in kinds:
        for wrong in (True, None, -1, 1.0, "1", b"1", [], {}, U64_MAX):
            if (type(wrong) is bytes and kind.width == 1) or (wrong == U64_MAX and kind.maximum == U64_MAX):
                continue  # a valid value of this field
            error = refuse(msgpack.packb([cls.TAG, *(wrong if n == name else _zero(k) for n, k in kinds)]))
            assert error.code in ("message.fields", "message.limit", "message.lengths")
            assert name in error.text


def _zero(kind: FieldKind) -> Any:
    return b"" if kind.width else min(32, kind.maximum)


@pytest.mark.parametrize("cls", CONTROL, ids=lambda cls: cls.TAG)
def test_an_unknown_field_of_a_control_message_is_refused(cls: type[Any]) -> None:
    sample = next(s for s in CONTROL_SAMPLES if type(s) is cls)
    error = refuse(msgpack.packb([cls.TAG, {**sample.to_map(), "surprise": 1}]))
    assert error.code == "message.fields"
    assert "surprise" in error.text


def test_the_refusal_of_a_control_message_names_the_field() -> None:
    sample = control.Register(engine_id="e", world_size=1, key_bytes=32, num_blocks=1, block_tokens=1).to_map()
    for name, bad in [
        ("world_size", 0),
        ("key_bytes", 65),
        ("num_blocks", True),
        ("salt", "text"),
        ("facts", {"a": 1}),
    ]:
        assert f"register.{name}" in refuse(msgpack.packb(["register", {**sample, name: bad}])).text


def test_case_131_pickles_garbage_deep_nesting_and_huge_counts_are_refused_without_side_effect() -> None:
    """Case 131: whoever reaches the socket sends pickles, random bytes, huge frames, deep nesting."""

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (pytest.fail, ("a pickle was loaded",))

    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        refuse(pickle.dumps(Bomb(), protocol))
        only_refuses(msgpack.packb(["step", pickle.dumps(Bomb(), protocol)]))
    for nested in (
        b"\x91" * 100_000,
        b"\x81\xa1a" * 50_000,
        b"\xdd\x00\x00\xff\xff" * 5_000,
        b"\xdf\xff\xff\xff\xff" * 9,
    ):
        assert refuse(nested).code == "message.malformed"
    for huge in (
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
    ):
        assert refuse(huge).code == "message.malformed"
        assert refuse(b"\x92\xa4step" + huge).code == "message.malformed"
    for extension in (msgpack.ExtType(1, b""), msgpack.ExtType(5, b"abcd"), msgpack.Timestamp(1)):
        assert refuse(msgpack.packb(["status.answer", {"status": {"a": extension}}])).code == "message.malformed"


def test_case_131_a_small_message_that_announces_much_reserves_little() -> None:
    """Case 131: memory stays flat. Five bytes may announce 16 million items, at each of a thousand depths."""
    raw = b"\xdd\x00\xff\xff\xff" * 1000
    tracemalloc.start()
    try:
        refuse(raw)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20


def test_a_frame_past_the_limit_is_refused_by_its_length_alone() -> None:
    assert refuse(memoryview(bytearray(limits.MAX_FRAME_BYTES + 1))).code == "frame.size"  # type: ignore[arg-type]


def test_counts_past_their_limits_are_refused() -> None:
    many = bytes(8 * (limits.MAX_JOBS + 1))
    assert refuse(msgpack.packb(["renew", many])).code == "message.limit"
    for wide in (0, limits.MAX_KEY_BYTES + 1):
        error = refuse(msgpack.packb(["lookup", 1, 1, 0, 0, wide, b""]))
        assert error.code == "message.limit"
        assert "key_bytes" in error.text


def test_columns_that_disagree_are_refused_with_both_counts() -> None:
    done = hot.Done(jobs=pack_u64([1, 2]), outcomes=b"\0", copy_us=pack_u32([0, 0]))
    error = refuse(_raw(done))
    assert error.code == "message.lengths"
    assert "jobs has 2" in error.text
    assert "outcomes has 1" in error.text


@pytest.mark.parametrize(("tag", "name"), [(tag, name) for tag, shapes in SHAPES.items() for name in shapes])
@settings(max_examples=8)
@given(data=st.data())
def test_a_column_longer_than_its_companions_is_refused(tag: str, name: str, data: st.DataObject) -> None:
    message = data.draw(hot_messages(MESSAGES[tag]))
    kinds = dict(field_kinds(type(message)))
    more = getattr(message, name) + bytes(kinds[name].width)
    if tag == "lookup":  # any whole number of keys is a lookup
        message = replace(message, key_bytes=2, keys=b"")
        more = b"k"
    longer = replace(message, **{name: more})
    assert refuse(_raw(longer)).code == "message.lengths"
    with pytest.raises(LocalProtocolError):
        pack(longer)


@pytest.mark.parametrize(
    "message",
    [
        hot.Step(step=1, epoch=0, key_bytes=4, store_keys=b"1234"),
        hot.Step(
            step=1,
            epoch=0,
            key_bytes=4,
            store_tickets=pack_u64([1]),
            store_requests=pack_u64([1]),
            store_groups=b"\0",
            store_counts=pack_u32([2]),
            store_keys=b"1234",
            store_blocks=pack_u32([1]),
        ),
        hot.Plan(
            planned_to=1,
            tickets=pack_u64([1]),
            jobs=pack_u64([1]),
            kinds=b"\0",
            groups=b"\0",
            counts=pack_u32([U32_MAX]),
            slots=pack_u32([1]),
            generations=pack_u64([1]),
            blocks=pack_u32([1]),
        ),
        tether.Words(
            tickets=pack_u64([1]),
            kinds=b"\1",
            outcomes=b"\1",
            wait_us=pack_u32([0]),
            copy_us=pack_u32([0]),
            failed_counts=pack_u32([2]),
            failed_blocks=pack_u32([7]),
        ),
    ],
    ids=lambda message: message.TAG,
)
def test_counts_that_do_not_add_up_are_refused(message: Any) -> None:
    assert refuse(_raw(message)).code == "message.lengths"
    with pytest.raises(LocalProtocolError):
        pack(message)


@pytest.mark.parametrize(
    ("message", "name"),
    [
        (hot.Done(jobs=bytes(8), outcomes=b"\x0b", copy_us=bytes(4)), "outcomes"),
        (hot.JobsEnded(tickets=bytes(8), jobs=bytes(8), outcomes=b"\xff"), "outcomes"),
        (hot.Step(step=1, epoch=0, key_bytes=4, end_requests=bytes(8), end_reasons=b"\3"), "end_reasons"),
        (hot.LookupAnswer(lookup=1, hits=0, next=3, lease=0, lease_ms=0, retry_ms=0, reason=0, epoch=0), "next"),
    ],
)
def test_a_number_that_no_enum_has_never_reaches_a_handler(message: Any, name: str) -> None:
    error = refuse(_raw(message))
    assert error.code == "message.limit"
    assert name in error.text


def _raw(message: Any) -> bytes:
    """The wire form that a careless peer would send: nothing is checked."""
    return msgpack.packb([message.TAG, *(getattr(message, name) for name, _ in field_kinds(type(message)))])


def test_what_the_other_end_would_refuse_is_a_local_error_before_it_is_sent() -> None:
    good = hot.Renew(leases=pack_u64([1]))
    with pytest.raises(LocalProtocolError):
        pack(replace(good, leases=b"1234567"))
    with pytest.raises(LocalProtocolError):
        pack(replace(good, leases=bytes(8 * (limits.MAX_JOBS + 1))))
    with pytest.raises(LocalProtocolError):
        pack(tether.Begin(mark=-1, tickets=b""))
    with pytest.raises(LocalProtocolError):
        pack(control.StatusAnswer(status={"a": object()}))
    with pytest.raises(LocalProtocolError, match=r"frame\.size"):
        keys = bytes(limits.MAX_KEYS * limits.MAX_KEY_BYTES)
        pack(hot.Lookup(lookup=1, request=1, epoch=0, group=0, key_bytes=64, keys=keys))


def test_a_refusal_carries_code_text_and_fix_to_the_other_side() -> None:
    error = RefusedError("layout.slot_bytes", "4096 against 8192 \udc80" + "x" * 9000, "same size")
    there = unpack(pack(control.Refused.of(error))).error()
    assert there.code == error.code
    assert there.text.startswith("4096 against 8192")
    assert there.fix == error.fix


def test_a_probe_outside_its_memory_is_refused_at_decoding() -> None:
    for probe in (tether.Probe(handle=1, offset=0, expect=b"a"), tether.Probe(handle=0, offset=1279, expect=b"ab")):
        message = tether.RankRegister(engine_id="e", rank=0, world_size=1, layout=layout(), probes=(probe,))
        assert refuse(msgpack.packb([message.TAG, message.to_map()])).code == "layout.probe"


def test_an_attachment_names_as_many_block_sizes_as_groups_and_at_least_one() -> None:
    (attach,) = (sample for sample in CONTROL_SAMPLES if isinstance(sample, control.Attach))
    for sizes in ((), (128, 64)):
        error = refuse(msgpack.packb(["attach", {**attach.to_map(), "payload_bytes": sizes}]))
        assert error.code == "message.lengths"
    refuse(msgpack.packb(["attach", {**attach.to_map(), "payload_bytes": (), "block_tokens": ()}]))


def test_more_descriptors_than_the_kernel_passes_at_once_are_refused() -> None:
    for count, fits in ((limits.MAX_DESCRIPTORS - 1, True), (limits.MAX_DESCRIPTORS, False)):
        one = layout()
        many = one.model_copy(update={"handles": one.handles * count})
        message = tether.RankRegister(engine_id="e", rank=0, world_size=1, layout=many)
        raw = msgpack.packb([message.TAG, message.to_map()])
        if fits:
            assert unpack(raw) == message
        else:
            assert refuse(raw).code == "message.limit"


@pytest.mark.parametrize("values", [np.array([-1]), np.array([1 << 32]), [-1], [1 << 32]], ids=str)
def test_a_number_that_does_not_fit_its_column_is_an_error_and_never_wraps(values: Any) -> None:
    with pytest.raises(OverflowError):
        pack_u32(values)


def test_columns_hold_lists_and_arrays_alike() -> None:
    assert pack_u32([1, 2]) == pack_u32(np.array([1, 2])) == pack_u32((1, 2)) == b"\1\0\0\0\2\0\0\0"
    assert pack_u64([]) == pack_u64(np.array([], dtype=np.int64)) == b""
    with pytest.raises(TypeError):
        pack_u64(np.array([1.5]))
