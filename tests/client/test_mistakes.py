"""The engine's own mistakes are told at once, by name, and cost it neither its link nor its stores."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvferry import Client, ConfigError
from kvferry.client.arguments import check_settings
from kvferry.client.core import ClientSettings
from kvferry.client.types import ArgumentError
from kvferry.net.paths import RunDir
from kvferry.proto.control import Register
from tests.client.fakes import chain
from tests.client.stage import FakeCarrier, stage

SANE: dict[str, Any] = {"engine_id": "e", "world_size": 1, "key_bytes": 8, "num_blocks": 8, "block_tokens": 16}


def test_the_callers_own_mistakes_are_told() -> None:
    with stage() as s:
        s.attached()
        with pytest.raises(ValueError, match="key_bytes = 8"):
            s.client.lookup("a", [b"short"])
        with pytest.raises(ValueError, match=r"outside 0\.\.99"):
            s.client.store("a", chain(1), [100])
        assert s.client.attached
    with pytest.raises(ConfigError, match=r"run_dir\.length"):
        Client("e", world_size=1, key_bytes=8, num_blocks=1, block_tokens=1, run_dir="/x" * 80)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"key_bytes": 0}, "key_bytes = 0 is outside 1..64"),
        ({"key_bytes": 65}, "key_bytes = 65 is outside 1..64"),
        ({"key_bytes": "32"}, "key_bytes is a str; it must be an int"),
        ({"num_blocks": 0}, f"num_blocks = 0 is outside 1..{1 << 28}"),
        ({"num_blocks": (1 << 28) + 1}, f"num_blocks = {(1 << 28) + 1} is outside 1..{1 << 28}"),
        ({"block_tokens": 0}, f"block_tokens = 0 is outside 1..{1 << 20}"),
        ({"world_size": 0}, "world_size = 0 is outside 1..64"),
        ({"world_size": 65}, "world_size = 65 is outside 1..64"),
        ({"engine_id": ""}, "engine_id is ''; it must be a text that is not empty"),
        ({"engine_id": "e" * 4097}, "engine_id has 4097 characters; at most 4096 are allowed"),
        ({"salt": bytes(257)}, "salt has 257 bytes; at most 256 are allowed"),
        ({"salt": "text"}, "salt is a str; it must be bytes"),
        ({"facts": {str(n): "" for n in range(65)}}, "there are 65 facts; at most 64 are allowed"),
        ({"facts": {"model": "m" * 4097}}, "fact 'model' has 4097 characters; at most 4096 are allowed"),
        ({"facts": {"n" * 4097: ""}}, "the name of a fact has 4097 characters; at most 4096 are allowed"),
        ({"facts": {"layers": 2}}, "fact 'layers' is a int; it must be text"),
    ],
)
def test_an_engine_that_no_daemon_could_take_is_told_at_once(wrong: dict[str, Any], said: str, tmp_path: Path) -> None:
    def never(run_dir: RunDir) -> FakeCarrier:
        raise AssertionError("nothing is sent")

    with pytest.raises(ArgumentError) as told:
        Client(**{**SANE, **wrong}, run_dir=tmp_path, connect=never)
    assert str(told.value) == said


def test_the_bounds_of_an_engine_are_those_of_the_wire() -> None:
    widest = {**SANE, "engine_id": "e" * 4096, "key_bytes": 64, "world_size": 64, "salt": bytes(256)}
    widest |= {"num_blocks": 1 << 28, "block_tokens": 1 << 20, "facts": {f"{n:04096}": "v" * 4096 for n in range(64)}}
    for engine in (SANE, widest):
        check_settings(ClientSettings(**engine))
        Register(**engine)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda c: c.lookup("r", ["a" * 8]), "a key is a str; keys must be bytes, 8 each"),
        (lambda c: c.lookup("r", "a" * 8), "a key is a str; keys must be bytes, 8 each"),
        (lambda c: c.store("r", [12345678], [1]), "a key is a int; keys must be bytes, 8 each"),
        (lambda c: c.store("r", None, [1]), "keys are a NoneType; they must be bytes in a sequence"),
        (lambda c: c.store("r", b"seven..", [1]), "keys have 7 bytes, no multiple of key_bytes = 8"),
        (lambda c: c.store("r", chain(1), [-1]), "block ids -1..-1 are outside 0..99"),
        (lambda c: c.store("r", chain(1), ["1"]), "blocks must be ints in a sequence: "),
        (lambda c: c.store("r", chain(1), 1), "blocks must be ints in a sequence: "),
        (lambda c: c.store("r", chain(1), [1], group=16), "group = 16 is outside 0..15"),
        (lambda c: c.store("r", chain(1), [1], group="a"), "group is a str; it must be an int"),
        (lambda c: c.load("r", ["a" * 8], [1]), "a key is a str; keys must be bytes, 8 each"),
        (lambda c: c.load("r", chain(1, 2, 3), [4, 5, 4]), "block 4 is named twice: 3 keys for 2 blocks"),
        (lambda c: c.written(["1"]), "blocks must be ints in a sequence: "),
        (lambda c: c.storing(None), "blocks must be ints in a sequence: "),
        *(
            (call, "request is a list; it must be text")
            for call in (
                lambda c: c.lookup(["r"], chain(1)),
                lambda c: c.hits(["r"]),
                lambda c: c.store(["r"], chain(1), [1]),
                lambda c: c.load(["r"], chain(1), [1]),
                lambda c: c.forget(["r"]),
                lambda c: c.finish(["r"]),
                lambda c: c.abort(["r"]),
                lambda c: c.preempt(["r"]),
            )
        ),
        (lambda c: c.finish(7), "request is a int; it must be text"),
        (lambda c: c.cancel([1]), "ticket is a list; it must be the int that load or store gave"),
        (lambda c: c.load_ended({}, True), "ticket is a dict; it must be the int that load or store gave"),
        (lambda c: c.rotate(bytes(257)), "salt has 257 bytes; at most 256 are allowed"),
    ],
)
def test_a_mistake_in_a_call_leaves_the_link_and_the_stores_alone(call: Callable[[Any], Any], said: str) -> None:
    with stage() as s:
        s.attached()
        ticket = s.client.store("before", chain(1), [1])
        s.client.end_step()
        sent = len(s.carrier.sent)
        with pytest.raises(ArgumentError) as told:
            call(s.client)
        assert str(told.value).startswith(said)
        assert not s.client.end_step() and s.client.poll() == []
        assert s.client.attached and s.client.storing([1]) == {ticket} and len(s.carrier.sent) == sent
