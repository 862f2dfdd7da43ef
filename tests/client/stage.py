"""A client over a fake link and a fake clock: its daemon is a function, and tests take its thread's turns for it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvferry import Client, Directive, Hits
from kvferry.net.paths import RunDir
from kvferry.proto.control import Hello, Refused, Register, Registered, Welcome
from kvferry.proto.errors import LostError
from kvferry.proto.hot import Lookup, LookupAnswer
from kvferry.proto.outcome import Next
from tests.client.fakes import MS, chain


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
