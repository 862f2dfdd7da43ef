"""The scheduler side as it is used: its budget, its one thread, and that nothing of ours reaches the engine."""

import gc
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvferry import Client, ConfigError, Directive, Hits, Reason
from kvferry.client import client as shell
from kvferry.client.arguments import check_settings
from kvferry.client.core import ClientSettings
from kvferry.client.types import ArgumentError
from kvferry.net.paths import RunDir
from kvferry.proto.control import Goodbye, Hello, Refused, Register, Registered, Welcome
from kvferry.proto.errors import LostError
from kvferry.proto.hot import Lookup, LookupAnswer, Step
from kvferry.proto.outcome import Next
from tests.client.fakes import MS, chain, refused


class FakeCarrier:
    """A link whose daemon is a function from what was sent to what comes back, after `wait`."""

    def __init__(self, clock: "Clock", answer: Callable[[Any], list[Any]]) -> None:
        self.clock, self.answer = clock, answer
        self.refusal: Refused | None = None
        self.alive = True
        self.sent: list[Any] = []
        self.inbox: list[Any] = []
        self.waits: list[float] = []
        self.answers_during_wait = False
        self.broken: set[str] = set()
        self.has_room = True

    def _touch(self, name: str) -> None:
        if name in self.broken:
            raise RuntimeError(f"{name} is broken")

    def tether_fileno(self) -> int:
        return -1

    def send(self, message: Any) -> bool:
        self._touch("send")
        if self.has_room:
            self.sent.append(message)
            if not self.answers_during_wait:
                self.inbox += self.answer(message)
        return self.has_room

    def flush(self) -> None:
        self._touch("flush")

    def receive(self) -> list[Any]:
        self._touch("receive")
        messages, self.inbox = self.inbox, []
        return messages

    def tick(self) -> None:
        self._touch("tick")

    def wait(self, timeout_s: float) -> bool:
        self._touch("wait")
        self.waits.append(timeout_s)
        self.clock.now_ns += int(timeout_s * 1e9) if not self.answers_during_wait else 100_000
        if self.answers_during_wait:
            self.inbox += self.answer(self.sent[-1])
        return bool(self.inbox)

    def close(self) -> None:
        self.alive = False


class Clock:
    def __init__(self) -> None:
        self.now_ns = 1_000 * MS

    def __call__(self) -> int:
        return self.now_ns


def daemon(message: Any) -> list[Any]:
    """Welcomes and registers whoever comes; answers no lookup."""
    if isinstance(message, Hello):
        return [Welcome(major=1, minor=0, boot=7, tp_size=1)]
    if isinstance(message, Register):
        return [Registered(incarnation=9, namespace="space", epoch=1, attached=1, slots=64)]
    return []


def generous(message: Any) -> list[Any]:
    """As `daemon`, and everything asked for is a hit."""
    if isinstance(message, Lookup):
        return [LookupAnswer(message.lookup, len(message.keys) // 8, int(Next.END), 5, 9000, 0, 0, 1)]
    return daemon(message)


class Stage:
    """A client over a fake carrier and a fake clock, without its own thread: tests call `turn`."""

    def __init__(self, answer: Callable[[Any], list[Any]] = daemon) -> None:
        self.clock = Clock()
        self.answer = answer
        self.carriers: list[FakeCarrier] = []
        self.notes: list[str] = []
        self.is_there = True
        self.client = Client(
            "engine",
            world_size=1,
            key_bytes=8,
            num_blocks=100,
            block_tokens=16,
            run_dir="/nonexistent/kvferry",
            on_note=self.notes.append,
            connect=self._connect,
            now_ns=self.clock,
            start=False,
        )

    def _connect(self, run_dir: RunDir) -> FakeCarrier:
        if not self.is_there:
            raise LostError("daemon.lost", "nobody there")
        self.carriers.append(FakeCarrier(self.clock, self.answer))
        return self.carriers[-1]

    @property
    def carrier(self) -> FakeCarrier:
        return self.carriers[-1]

    def turn(self, ms: float = 0) -> None:
        """What the own thread does once, some time later."""
        self.clock.now_ns += int(ms * MS)
        self.client.housekeep()

    def attached(self) -> "Stage":
        for _ in range(3):
            self.turn()
        assert self.client.attached
        return self


@contextmanager
def stage(answer: Callable[[Any], list[Any]] = daemon) -> Iterator[Stage]:
    made = Stage(answer)
    try:
        yield made
    finally:
        made.client.close()


def every_call(client: Client) -> None:
    """Each verb once, as an engine calls them in a step."""
    client.lookup("r", chain(1, 2))
    assert isinstance(client.hits("r"), Hits)
    assert client.load("r", chain(1), [1]) > 0
    assert client.store("r", chain(2), [2]) >= 0
    assert isinstance(client.written([2]), frozenset)
    assert isinstance(client.storing([2]), frozenset)
    client.cancel(1)
    assert isinstance(client.end_step(), Directive)
    client.load_ended(1, False)
    client.load_ended(12345, False)
    client.preempt("r")
    client.forget("r")
    client.rotate(b"x")
    client.finish("r")
    client.abort("r")
    assert isinstance(client.poll(), list)
    assert isinstance(client.describe(), dict)


# ---- budget ------------------------------------------------------------------------------------------


def test_hits_waits_no_longer_than_the_steps_budget_over_all_requests() -> None:
    with stage() as s:
        s.attached()
        for name in ("a", "b", "c"):
            s.client.lookup(name, chain(1))
        begin_ns = s.clock.now_ns
        for name in ("a", "b", "c"):
            assert not s.client.hits(name).ready
        assert s.clock.now_ns - begin_ns == 2 * MS
        assert len(s.carrier.waits) == 1


def test_the_budget_is_whole_again_after_the_step() -> None:
    with stage() as s:
        s.attached()
        s.client.lookup("a", chain(1))
        for _ in range(3):
            s.client.hits("a")
            s.client.end_step()
        assert [round(each, 6) for each in s.carrier.waits] == [0.002] * 3


def test_hits_returns_as_soon_as_its_answer_is_there() -> None:
    with stage(generous) as s:
        s.attached()
        s.carrier.answers_during_wait = True
        s.client.lookup("a", chain(1, 2))
        assert s.client.hits("a").count == 2
        assert len(s.carrier.waits) == 1


def test_a_daemon_that_never_answers_is_a_miss_after_the_patience() -> None:
    """Case 48: a request is not asked for ever."""
    with stage() as s:
        s.attached()
        s.client.lookup("a", chain(1))
        asked = 0
        while not (found := s.client.hits("a")).ready:
            asked += 1
            s.client.end_step()
        assert found == Hits(True) and 1 <= asked <= 11


def test_an_answered_pending_costs_no_budget() -> None:
    def pending(message: Any) -> list[Any]:
        if isinstance(message, Lookup):
            return [LookupAnswer(message.lookup, 0, int(Next.PENDING), 0, 0, 5, 0, 1)]
        return daemon(message)

    with stage(pending) as s:
        s.attached()
        s.client.lookup("a", chain(1))
        assert not s.client.hits("a").ready
        assert s.carrier.waits == []


# ---- never raises ------------------------------------------------------------------------------------


@pytest.mark.parametrize("deed", ["send", "flush", "receive", "tick", "wait"])
def test_a_link_that_breaks_in_any_deed_never_reaches_the_engine(deed: str) -> None:
    with stage() as s:
        s.attached()
        s.carrier.broken = {deed}
        every_call(s.client)
        s.turn()
        every_call(s.client)


def test_no_sidecar_answers_every_call() -> None:
    """Case 46: a hundred requests without a daemon are a hundred misses."""
    with stage() as s:
        s.is_there = False
        s.carrier.alive = False
        s.turn()
        for _ in range(100):
            every_call(s.client)
        assert not s.client.attached


@pytest.mark.parametrize(
    "message",
    [None, "text", 17, object(), Goodbye(), Hello(role="client"), Step(1, 1, 8), Lookup(1, 1, 1, 0, 8, b"")],
)
def test_messages_that_do_not_belong_here_are_counted(message: Any) -> None:
    """Case 21: a sidecar can never raise in the engine."""
    with stage() as s:
        s.attached()
        s.carrier.inbox = [message]
        every_call(s.client)
        assert s.client.counters.stale >= 1


def test_malformed_columns_drop_the_link_and_never_reach_the_engine() -> None:
    """The codec refuses these; should one get through, the client is off, not broken."""
    from kvferry.proto.hot import StepAnswer

    with stage() as s:
        s.attached()
        s.client.store("a", chain(1), [1])
        s.client.end_step()
        s.carrier.inbox = [StepAnswer(1, 1, tickets=b"odd", jobs=b"", accepted=b"", reasons=b"")]
        every_call(s.client)
        assert not s.client.attached
        assert any("internal error" in note for note in s.notes)


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


SANE: dict[str, Any] = {"engine_id": "e", "world_size": 1, "key_bytes": 8, "num_blocks": 8, "block_tokens": 16}


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


def test_a_second_client_of_an_engine_says_no_ticket_of_the_first() -> None:
    seen: list[int] = []
    for _ in range(2):
        with stage() as s:
            s.attached()
            seen += [s.client.store("r", chain(n), [n]) for n in range(3)]
            seen.append(s.client.load("l", chain(1), [9]))
    assert len(set(seen)) == 8 and seen == sorted(seen)


def test_a_listener_that_raises_is_not_the_engines_trouble() -> None:
    with stage() as s:
        s.client._on_note = lambda text: 1 / 0  # type: ignore[assignment, return-value]
        s.attached()
        every_call(s.client)


def test_after_close_every_call_answers_as_without_a_sidecar() -> None:
    with stage() as s:
        s.attached()
        s.client.close()
        s.client.close()
        assert isinstance(s.carrier.sent[-1], Goodbye)
        every_call(s.client)
        assert s.client.hits("r").reason in (Reason.OFF, Reason.NONE)
        assert not s.client.wait_attached(0.01)


# ---- coming and going --------------------------------------------------------------------------------


def test_each_change_of_state_is_one_line() -> None:
    with stage() as s:
        s.attached()
        for _ in range(50):
            s.turn(50)
            every_call(s.client)
        assert s.notes == ["attached to the sidecar at /nonexistent/kvferry: 64 slots"]
        s.is_there = s.carrier.alive = False
        for _ in range(50):
            s.turn(500)
        assert len(s.notes) == 2 and s.notes[1].startswith("no sidecar at /nonexistent/kvferry")
        s.is_there = True
        s.turn(2000)
        s.attached()
        assert len(s.notes) == 3


def test_a_lost_daemon_is_looked_for_at_a_bounded_pace() -> None:
    with stage() as s:
        s.attached()
        s.carrier.alive = s.is_there = False
        tries = 0

        def refuse(run_dir: RunDir) -> FakeCarrier:
            nonlocal tries
            tries += 1
            raise LostError("daemon.lost", "nobody there")

        s.client._connect = refuse
        for _ in range(200):
            s.turn(50)
        assert 12 <= tries <= 20, "100 ms, growing to 1 s, for 10 s"


def test_registration_is_the_same_after_a_loss() -> None:
    """Case 45: ten restarts, ten registrations, and hits after each."""
    with stage(generous) as s:
        for _ in range(10):
            s.turn(2000)
            s.attached()
            s.client.lookup("a", chain(1))
            assert s.client.hits("a").count == 1
            s.carrier.alive = False
            s.turn()
            assert not s.client.attached
        assert len(s.carriers) == 10


def test_a_refused_engine_stays_off_with_one_line_and_asks_again_slowly() -> None:
    def refusing(message: Any) -> list[Any]:
        return [refused()] if isinstance(message, Register) else daemon(message)

    with stage(refusing) as s:
        for _ in range(100):
            s.turn(50)
            every_call(s.client)
        assert s.notes == [
            "the sidecar refused this engine: register.world_size: 2 against 4 (fix: start kvferry with --tp-size 4)"
        ]
        assert len(s.carriers) == 1
        s.answer = daemon
        s.turn(10_000)
        s.attached()
        assert len(s.carriers) == 2


def test_a_refusal_that_passes_by_itself_is_asked_again_soon() -> None:
    def taken(message: Any) -> list[Any]:
        return [refused("register.engine_taken")] if isinstance(message, Register) else daemon(message)

    with stage(taken) as s:
        s.turn()
        s.turn()
        s.answer = daemon
        s.turn(600)
        s.attached()


def test_a_daemon_that_welcomes_nobody_is_given_up() -> None:
    with stage(lambda message: []) as s:
        s.turn(4000)
        assert len(s.carriers) == 1 and s.carrier.alive
        s.turn(1500)
        assert not s.carrier.alive
        s.turn(2000)
        assert len(s.carriers) == 2


def test_a_daemon_that_says_nothing_is_no_absent_one() -> None:
    with stage(lambda message: []) as s:
        for _ in range(200):
            s.turn(100)
        assert s.notes == ["the daemon at /nonexistent/kvferry does not answer: every lookup is a miss until it does"]
        s.is_there = s.carrier.alive = False
        s.turn(100)
        s.turn(2000)
        assert len(s.notes) == 2 and s.notes[1].startswith("no sidecar at /nonexistent/kvferry")
        s.is_there, s.answer = True, daemon
        s.turn(2000)
        s.attached()
        assert len(s.notes) == 3


def test_without_a_listener_a_refusal_is_a_warning_and_a_change_of_state_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refusing(message: Any) -> list[Any]:
        return [refused()] if isinstance(message, Register) else daemon(message)

    caplog.set_level(logging.INFO, "kvferry.client")
    for answer in (daemon, refusing):
        with stage(answer) as s:
            s.client._on_note = None
            for _ in range(3):
                s.turn()
    assert [(one.levelname, one.getMessage()[:31]) for one in caplog.records] == [
        ("INFO", "attached to the sidecar at /non"),
        ("WARNING", "the sidecar refused this engine"),
    ]


def test_messages_wait_for_room_in_the_window_and_keep_their_order() -> None:
    with stage() as s:
        s.attached()
        s.carrier.has_room = False
        s.client.lookup("a", chain(1))
        s.client.store("a", chain(2), [2])
        s.client.end_step()
        s.carrier.has_room = True
        s.client.poll()
        assert [type(message) for message in s.carrier.sent[-2:]] == [Lookup, Step]


def test_an_error_in_the_own_thread_does_not_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[int] = []

    def fail(self: Client) -> float:
        turns.append(1)
        raise RuntimeError("a bug of ours")

    with Client("e", world_size=1, key_bytes=8, num_blocks=1, block_tokens=1, run_dir=tmp_path) as client:
        monkeypatch.setattr("kvferry.client.background.AFTER_ERROR_S", 0.001)
        monkeypatch.setattr(Client, "housekeep", fail)
        end = time.monotonic() + 10
        while len(turns) < 3 and time.monotonic() < end:
            time.sleep(0.005)
        assert len(turns) >= 3 and client._thread.is_alive()


def test_leases_are_renewed_without_a_call_of_the_engine() -> None:
    """Case 10, 43: renewal hangs on no hook."""
    with stage(generous) as s:
        s.attached()
        s.client.lookup("a", chain(1))
        s.client.hits("a")
        before = len(s.carrier.sent)
        for _ in range(100):
            s.turn(50)
        assert len(s.carrier.sent) == before + 1


# ---- as a guest in the engine's process --------------------------------------------------------------


def test_importing_opens_nothing_and_loads_neither_torch_nor_zmq() -> None:
    code = (
        "import sys, threading, os; fds = len(os.listdir('/proc/self/fd'));"
        "import kvferry, kvferry.client; kvferry.Hits;"
        "assert not [m for m in ('torch', 'zmq', 'numpy') if m in sys.modules], sys.modules.keys();"
        "assert threading.active_count() == 1 and len(os.listdir('/proc/self/fd')) == fds;"
        "from kvferry import Client, RankClient;"
        "assert not [m for m in ('torch', 'zmq') if m in sys.modules]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)


def test_an_engine_that_forgets_to_close_ends_all_the_same(tmp_path: Path) -> None:
    code = (
        "from kvferry import Client;"
        f"c = Client('e', world_size=1, key_bytes=8, num_blocks=1, block_tokens=1, run_dir={str(tmp_path)!r})"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], timeout=20, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_forgotten_client_takes_its_thread_with_it(tmp_path: Path) -> None:
    client = Client("e", world_size=1, key_bytes=8, num_blocks=1, block_tokens=1, run_dir=tmp_path)
    thread = client._thread
    del client
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_many_threads_may_call_at_once(tmp_path: Path) -> None:
    with Client("e", world_size=1, key_bytes=8, num_blocks=100, block_tokens=1, run_dir=tmp_path) as client:
        errors: list[BaseException] = []

        def call() -> None:
            try:
                for _ in range(50):
                    client.lookup("r", chain(1, 2))
                    client.hits("r")
                    client.end_step()
                    client.poll()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert not errors


def test_waiting_for_a_sidecar_that_is_not_there_ends_at_its_timeout(tmp_path: Path) -> None:
    with Client("e", world_size=1, key_bytes=8, num_blocks=1, block_tokens=1, run_dir=tmp_path) as client:
        begin = time.monotonic()
        assert not client.wait_attached(0.1)
        assert time.monotonic() - begin < 2
        assert shell.RETRY_S <= 0.1 <= shell.RETRY_MAX_S <= 1, "a restarted daemon is found within a second"
