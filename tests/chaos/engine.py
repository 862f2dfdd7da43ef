"""An engine as the drill sees it: asked, listened to, killed. One thread reads its events.

    ask ──▶ child ──▶ pieces of answers ──▶ Stream: one request, until its end
                             └─▶ Stalls: how long nothing came

Never raises for what an engine did: a stream ends as OK, FAILED (with the reason) or CUT (we killed the engine).
"""

import json
import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import vllm_lab as lab

from .talks import Answer

CHILD = Path(__file__).parent / "child.py"
START_S = 240.0
NOTED_S = 0.5  # a wait for a token that is shorter is no stall
# The engine's own kernels are made anew instead of kept for each shape of a batch, of which a cache that returns in
# pieces makes hundreds: they would grow its ranks by 100 MiB in the time of a drill, and hide a growth of ours.
NOTHING_KEPT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0"}


class End(Enum):
    """How a stream ended."""

    OK = "ok"
    FAILED = "failed"
    CUT = "cut"  # the drill killed the engine under it


@dataclass(frozen=True, slots=True)
class Stall:
    """A time without a token. Seconds on the monotonic clock."""

    since: float
    until: float
    what: str

    @property
    def seconds(self) -> float:
        return self.until - self.since


@dataclass(slots=True)
class Stream:
    """One request under way."""

    name: str
    due_tokens: int
    last: float  # when it was asked, then when its last token came
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    cached: int = 0
    end: End | None = None
    why: str = ""
    over: threading.Event = field(default_factory=threading.Event)

    def answer(self) -> Answer:
        """What came."""
        return Answer(tuple(self.tokens), tuple(self.logprobs), self.cached)

    def close(self, end: End, why: str = "") -> None:
        if self.end is None:
            self.end, self.why = end, why
            self.over.set()


class Engine:
    """One running engine. `stalls` are waits of one request for a token, `silences` those of all of them."""

    def __init__(self, folder: Path, model: Path, *, name: str, **options: Any) -> None:
        self._lab = lab.start_engine(folder, model, name=name, program=CHILD, env=NOTHING_KEPT, **options)
        self.pgid = self._lab.process.pid
        self.log = self._lab.log
        self.stalls: list[Stall] = []
        self.silences: list[Stall] = []
        self._lock = threading.Lock()
        self._streams: dict[str, Stream] = {}
        self._heard = 0.0  # the last token of any request, or the first question after a rest
        self._cutting = False
        self._gone = ""
        self._reader: threading.Thread | None = None

    def wait_ready(self, timeout_s: float = START_S) -> None:
        """Wait for its start; LabError if it fails."""
        self._lab.answer(timeout_s)
        self._reader = threading.Thread(target=self._read, name="engine-events", daemon=True)
        self._reader.start()

    def warm_up(self, num_tokens: int) -> None:
        """A first request, which takes longer than others: it counts as a part of the start."""
        stream = self.ask("warm-up", lab.prompt(999_999, num_tokens), 4, top=2)
        if not stream.over.wait(START_S) or stream.end is not End.OK:
            raise lab.LabError(f"the first request: {stream.why or 'no end'}\n{self.tail()}")
        self.stalls.clear()
        self.silences.clear()

    def ask(self, name: str, prompt: list[int], max_tokens: int, top: int = 0) -> Stream:
        """Start a request."""
        stream = Stream(name, max_tokens, time.monotonic())
        with self._lock:
            if self._cutting or self._gone:
                stream.close(End.CUT if self._cutting else End.FAILED, self._gone)
                return stream
            if not self._streams:
                self._heard = stream.last
            self._streams[name] = stream
            with suppress(lab.LabError):  # an engine that is gone: its events end too, and the reader says so
                self._lab.send(id=name, prompt=prompt, max_tokens=max_tokens, top=top)
        return stream

    def kill(self) -> None:
        """SIGKILL to the engine and all its processes; streams under way are cut."""
        with self._lock:
            self._cutting = True
            now = time.monotonic()
            for stream in self._streams.values():  # what stood still until now counts, though it will not end
                _note(self.stalls, Stall(stream.last, now, f"{stream.name}, token {len(stream.tokens)}, cut"))
        self.stop()

    def stop(self) -> None:
        """End it without ceremony. Idempotent."""
        with suppress(ProcessLookupError):
            os.killpg(self.pgid, signal.SIGKILL)
        self._lab.process.wait()
        if self._reader is not None:
            self._reader.join(10)
        if self._lab.process.stdin is not None and not self._lab.process.stdin.closed:
            with suppress(OSError):
                self._lab.process.stdin.close()
            os.close(self._lab.answers)

    @property
    def is_running(self) -> bool:
        """Whether it still answers; False after an end that nobody asked for, too."""
        return not self._gone

    def tail(self) -> str:
        """The end of its log."""
        return self._lab.tail()

    # ---- the reader ----------------------------------------------------------------------------------

    def _read(self) -> None:
        pending = b""
        while chunk := os.read(self._lab.answers, 1 << 16):
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                self._hear(json.loads(line))
        with self._lock:
            self._gone = "the engine ended by itself"
            for stream in self._streams.values():
                stream.close(End.CUT if self._cutting else End.FAILED, self._gone)
            self._streams.clear()

    def _hear(self, event: dict[str, Any]) -> None:
        with self._lock:
            stream = self._streams.get(event.get("id", ""))
            if stream is None:
                return
            if "error" in event:
                self._finish(stream, End.FAILED, event["error"])
                return
            now = event["t"]
            what = f"{stream.name}, token {len(stream.tokens)}"
            _note(self.stalls, Stall(stream.last, now, what))
            _note(self.silences, Stall(self._heard, now, what))
            stream.last = self._heard = now
            stream.tokens += event["tokens"]
            stream.logprobs += event["logprobs"]
            stream.gaps += event["gaps"]
            stream.cached = max(stream.cached, event["cached"])
            if event["end"] == "length" and len(stream.tokens) == stream.due_tokens:
                self._finish(stream, End.OK)
            elif event["end"] is not None:
                self._finish(stream, End.FAILED, f"{len(stream.tokens)} tokens, then {event['end']!r}")

    def _finish(self, stream: Stream, end: End, why: str = "") -> None:
        del self._streams[stream.name]
        stream.close(end, why)


def _note(stalls: list[Stall], stall: Stall) -> None:
    if stall.seconds >= NOTED_S:
        stalls.append(stall)
