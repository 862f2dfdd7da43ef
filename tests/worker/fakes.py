"""A worker core at a bench: a page and headers in plain memory, a device that ends batches when told."""

import os
import time
from collections.abc import Iterable

import numpy as np

from kvferry.gpu_worker.api import (
    Action,
    Begun,
    Copied,
    Event,
    JobsCancelled,
    Planned,
    SubmitCopy,
    TellDaemon,
    TellRank,
    TicketsCancelled,
    TimePassed,
    WorkerSettings,
)
from kvferry.gpu_worker.core import WorkerCore
from kvferry.proto.columns import pack_u8, pack_u32, pack_u64, u8, u32, u64
from kvferry.proto.hot import Cancel, Done, Plan
from kvferry.proto.limits import PAGE_BYTES
from kvferry.proto.outcome import Kind, Outcome
from kvferry.proto.page import PageReader, PageWriter
from kvferry.proto.schema import pack, unpack
from kvferry.proto.tether import Begin, CancelTickets

STORE, LOAD = Kind.STORE, Kind.LOAD
BLOCK_BYTES = 1 << 20
SECOND = 1_000_000_000


class Headers:
    """Generation words of a small pool."""

    def __init__(self, num_slots: int) -> None:
        self.gen_open = np.zeros(num_slots, dtype=np.uint64)
        self.gen_close = np.zeros(num_slots, dtype=np.uint64)
        self.log: list[str] = []

    def open(self, slots, generations) -> None:
        self.gen_open[slots] = generations
        self.log.append("open")

    def close(self, slots, generations) -> None:
        self.gen_close[slots] = generations
        self.log.append("close")

    def torn(self, slots, generations):
        bad = (self.gen_open[slots] != generations) | (self.gen_close[slots] != generations)
        return np.flatnonzero(bad).astype(np.uint32)

    def hold(self, slots: Iterable[int], generation: int) -> None:
        """These slots were stored by somebody, whole."""
        for slot in slots:
            self.gen_open[slot] = self.gen_close[slot] = generation


class FakePeer:
    """A link that takes everything and says what it was given."""

    def __init__(self) -> None:
        self.inbox: list = []
        self.sent: list = []
        self.refusal = None
        self.alive = True
        self.dies_after_inbox = self.is_full = False
        self.link = self
        self.in_flight = 0
        self.zmq_socket = self
        self._fd, self._tether_fd = os.eventfd(0), os.eventfd(0)

    def fileno(self) -> int:
        return self._fd

    def tether_fileno(self) -> int:
        return self._tether_fd

    def getsockopt(self, option) -> int:
        return bool(self.inbox)

    def next_due_ns(self):
        return None

    def receive(self) -> list:
        messages, self.inbox = self.inbox, []
        if self.dies_after_inbox:
            self.close()
        return messages

    def send(self, message) -> bool:
        if not self.is_full:
            self.sent.append(message)
        return not self.is_full

    def flush(self) -> None: ...
    def tick(self) -> None: ...

    def wait(self, timeout_s) -> None:
        time.sleep(timeout_s)

    def close(self) -> None:
        if self.alive:
            self.alive = False
            os.close(self._fd)
            os.close(self._tether_fd)

    def dones(self) -> list[tuple[int, Outcome]]:
        return [
            (job, Outcome(outcome))
            for done in self.sent
            if isinstance(done, Done)
            for job, outcome in zip(u64(done.jobs).tolist(), u8(done.outcomes).tolist(), strict=True)
        ]


class Bench:
    """A core, its surroundings, and what it has said so far."""

    def __init__(self, **settings) -> None:
        self.settings = WorkerSettings(
            **{"payload_bytes": (BLOCK_BYTES,), "num_blocks": 10_000, "num_slots": 10_000, **settings}
        )
        memory = memoryview(bytearray(PAGE_BYTES))
        self.engine = PageWriter(memory)
        self.page = PageReader(memory)
        self.headers = Headers(self.settings.num_slots)
        self.core = WorkerCore(self.settings, self.page, self.headers)
        self.now_ns = 1_000_000
        self.running: list[SubmitCopy] = []  # at the device, oldest first
        self.words: list[tuple[int, Kind, Outcome, tuple[int, ...]]] = []
        self.spans: dict[int, tuple[int, int]] = {}  # ticket -> wait_us, copy_us
        self.dones: list[tuple[int, Outcome]] = []

    def step(self, event: Event) -> list[Action]:
        actions = self.core.step(event, self.now_ns)
        for kind in (TellRank, TellDaemon):
            assert sum(isinstance(action, kind) for action in actions) <= 1
        for action in actions:
            match action:
                case SubmitCopy():
                    self.running.append(action)
                case TellDaemon(message):
                    message = unpack(pack(message))
                    self.dones += zip(
                        u64(message.jobs).tolist(), map(Outcome, u8(message.outcomes).tolist()), strict=True
                    )
                case TellRank(message):
                    self._take_words(unpack(pack(message)))
        return actions

    def _take_words(self, message) -> None:
        start = 0
        rows = zip(
            u64(message.tickets).tolist(),
            u8(message.kinds).tolist(),
            u8(message.outcomes).tolist(),
            u32(message.failed_counts).tolist(),
            u32(message.wait_us).tolist(),
            u32(message.copy_us).tolist(),
            strict=True,
        )
        for ticket, kind, outcome, count, wait_us, copy_us in rows:
            blocks = tuple(u32(message.failed_blocks)[start : start + count].tolist())
            start += count
            self.words.append((ticket, Kind(kind), Outcome(outcome), blocks))
            self.spans[ticket] = (wait_us, copy_us)

    # ---- the outside world ---------------------------------------------------------------------

    def plan(
        self,
        ticket: int,
        kind: Kind,
        blocks: Iterable[int],
        slots: Iterable[int] | None = None,
        *,
        generation: int = 1,
        job: int | None = None,
        group: int = 0,
        planned_to: int | None = None,
    ) -> list[Action]:
        blocks = list(blocks)
        slots = blocks if slots is None else list(slots)
        return self.step(
            Planned(
                Plan(
                    planned_to=ticket if planned_to is None else planned_to,
                    tickets=pack_u64([ticket]),
                    jobs=pack_u64([100 + ticket if job is None else job]),
                    kinds=pack_u8([kind]),
                    groups=pack_u8([group]),
                    counts=pack_u32([len(blocks)]),
                    slots=pack_u32(slots),
                    generations=pack_u64([generation] * len(blocks)),
                    blocks=pack_u32(blocks),
                )
            )
        )

    def planned_to(self, ticket: int) -> list[Action]:
        """A plan that says only that everything up to `ticket` is decided."""
        return self.step(Planned(Plan(planned_to=ticket)))

    def begin(self, *tickets: int, mark: int | None = None) -> list[Action]:
        """The engine moves its mark and names these tickets; with `mark` given it has not moved yet."""
        return self.step(Begun(Begin(mark=self.engine.signal() if mark is None else mark, tickets=pack_u64(tickets))))

    def cancel_jobs(self, *jobs: int) -> list[Action]:
        return self.step(JobsCancelled(Cancel(jobs=pack_u64(jobs))))

    def cancel_tickets(self, *tickets: int) -> list[Action]:
        return self.step(TicketsCancelled(CancelTickets(tickets=pack_u64(tickets))))

    def copied(self, ok: bool = True) -> list[Action]:
        """The oldest batch at the device ends."""
        return self.step(Copied(self.running.pop(0).token, ok))

    def run_dry(self) -> None:
        """The device ends all it has and all it is given then."""
        while self.running:
            self.copied()

    def pass_time(self, nanoseconds: int = 0) -> list[Action]:
        self.now_ns += nanoseconds
        return self.step(TimePassed())


# ---- ticket 1 in each state in which it can wait, and copying ------------------------------------


def planned(bench: Bench) -> None:
    bench.plan(1, LOAD, [4, 5])


def begun(bench: Bench) -> None:
    bench.begin(1)


def paired(bench: Bench) -> None:
    bench.plan(1, LOAD, [4, 5])
    bench.begin(1, mark=bench.engine.mark() + 1)


def ready(bench: Bench) -> None:
    """Behind two stores' worth of other loads, so that no room is left for it."""
    bench.headers.hold(range(10, 20), 1)
    bench.plan(101, LOAD, [10])
    bench.plan(102, LOAD, [11])
    bench.begin(101, 102)
    bench.plan(1, LOAD, [4, 5], planned_to=102)
    bench.begin(1)


def copying(bench: Bench) -> None:
    bench.plan(1, LOAD, [4, 5])
    bench.begin(1)


WAITING = [planned, begun, paired, ready]
