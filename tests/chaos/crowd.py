"""Users who talk to the engine side by side without a pause, and compare every answer with the baseline's.

    learn      an engine alone answers every talk once: the baseline
    Crowd      users replay the talks in random order over whichever engine stands at the desk

A request that was under way when the drill killed the engine is asked again at the next one: that is neither a
failure nor an answer. Everything else that is not exactly the baseline's answer is recorded.
"""

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from .engine import End, Engine
from .talks import CLEAR, Answer, Talk, difference

HUNG_S = 60.0  # a request without an end for this long has failed
THINK_S = 0.15  # at most, between two turns


@dataclass(frozen=True, slots=True)
class Known:
    """A talk with the answers that are due."""

    talk: Talk
    answers: tuple[Answer, ...]


def learn(engine: Engine, talks: Sequence[Talk], users: int) -> list[Known]:
    """Have each talk answered once; those whose every token is a clear choice. AssertionError if the engine fails."""

    def play(talk: Talk) -> Known | None:
        answers: list[Answer] = []
        for turn in range(len(talk.turns)):
            name = f"baseline-{talk.number}-{turn}"
            stream = engine.ask(name, talk.prompt(turn, answers), talk.answer_tokens, top=2)
            assert stream.over.wait(HUNG_S), f"{name} has no end\n{engine.tail()}"
            assert stream.end is End.OK, f"{name}: {stream.why}\n{engine.tail()}"
            if min(stream.gaps) < CLEAR:
                return None
            answers.append(stream.answer())
        return Known(talk, tuple(answers))

    with ThreadPoolExecutor(users) as pool:
        return [known for known in pool.map(play, talks) if known is not None]


class Desk:
    """Where the users find the engine. Empty while the drill restarts it."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._changed = threading.Condition()

    def put(self, engine: Engine | None) -> None:
        """From now on this one answers; None: nobody does."""
        with self._changed:
            self._engine = engine
            self._changed.notify_all()

    def get(self, closing: Callable[[], bool]) -> Engine | None:
        """The engine, as soon as there is one; None if the crowd goes home first."""
        with self._changed:
            while self._engine is None and not closing():
                self._changed.wait(0.2)
            return None if closing() else self._engine


@dataclass(slots=True)
class Tally:
    """What happened to the users' requests."""

    asked: int = 0
    answered: int = 0
    cut: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class Crowd:
    """Users from `start` to `close`. The tally may be read at any time."""

    def __init__(self, desk: Desk, known: Sequence[Known], users: int, seed: int) -> None:
        self.tally = Tally()
        self._desk = desk
        self._known = known
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._number = 0
        self._users = [
            threading.Thread(target=self._user, args=(random.Random(seed * 1009 + n),), name=f"user-{n}", daemon=True)
            for n in range(users)
        ]

    def start(self) -> None:
        for user in self._users:
            user.start()

    def close(self, timeout_s: float = HUNG_S + 10) -> None:
        """Have the users end their turns and go home."""
        self._closing.set()
        until = time.monotonic() + timeout_s
        for user in self._users:
            user.join(max(until - time.monotonic(), 0.1))
        left = [user.name for user in self._users if user.is_alive()]
        if left:
            self.tally.failed.append(f"still waiting at the end: {', '.join(left)}")

    # ---- a user --------------------------------------------------------------------------------------

    def _user(self, rng: random.Random) -> None:
        while not self._closing.is_set():
            known = rng.choice(self._known)
            for turn in range(len(known.talk.turns)):
                if self._closing.is_set():
                    return
                self._turn(known, turn)
                self._closing.wait(rng.uniform(0, THINK_S))

    def _turn(self, known: Known, turn: int) -> None:
        prompt = known.talk.prompt(turn, known.answers)
        while (engine := self._desk.get(self._closing.is_set)) is not None:
            with self._lock:
                self._number += 1
                self.tally.asked += 1
                name = f"{known.talk.number}.{turn}-{self._number}"
            stream = engine.ask(name, prompt, known.talk.answer_tokens)
            if not stream.over.wait(HUNG_S):
                stream.close(End.FAILED, f"no end after {HUNG_S:.0f} s, {len(stream.tokens)} tokens came")
            if stream.end is not End.CUT:
                self._take(name, known.answers[turn], len(prompt), stream.end, stream.why, stream.answer())
                return
            with self._lock:
                self.tally.cut += 1
            self._closing.wait(0.1)  # the drill takes the dead engine from the desk

    def _take(self, name: str, due: Answer, num_prompt: int, end: End | None, why: str, mine: Answer) -> None:
        wrong = difference(mine, due) if end is End.OK else ""
        with self._lock:
            if end is not End.OK:
                self.tally.failed.append(f"{name}: {why}")
                return
            self.tally.answered += 1
            self.tally.prompt_tokens += num_prompt
            self.tally.cached_tokens += mine.cached
            if wrong:
                self.tally.wrong.append(f"{name} ({mine.cached} of {num_prompt} tokens cached): {wrong}")
