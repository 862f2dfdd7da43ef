"""The rank's core: which loads and stores of this rank were begun where, and what became of them. Sans-IO.

    engine ──begin_loads, begin_stores, poll──▶ ┌──────────┐ ──outgoing()──▶ worker (Begin, CancelTickets)
           ◀──RankReport────────────────────── │ RankCore │ ◀──on_message()── worker (Words)
                         attach, lost, dead ──▶ └──────────┘

A load's blocks belong to the transfer until somebody who knows says otherwise:

    begun at worker w ──Words of w──▶ OK or FAILED(blocks)
                      ──w is dead (its pidfd says so)──▶ FAILED(all blocks)
                      ──deadline──▶ CancelTickets, and on waiting: a deadline is no proof
                      ──tether of w ended──▶ nothing yet: that is a notice, not the proof
    never sent to any worker ──▶ FAILED(all blocks) at once: nothing can write there

Where the device cannot write marks (`marks.py`, mode host) a begin waits in here until the device is past it:

    begun ──hold > 0──▶ held ──release(hold)──▶ outgoing()
                         ├──revoked (a store)──▶ withdrawn: it reads nothing any more
                         └──worker lost──▶ never sent, see above

Each load ticket of a directive is reported exactly once, whatever happens. Stores need no word: one that
is lost spoils a slot and never an engine, so a store that cannot be begun is dropped and counted. A worker may have
plans of what was not begun: it knew that it serves this rank before the rank did. So it is told, with the
attachment, and keeps neither slots nor fences waiting for a begin.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvferry.client.types import Directive, LoadEnd, RankCounters, RankReport
from kvferry.proto import limits
from kvferry.proto.columns import pack_u64, u8, u32, u64
from kvferry.proto.outcome import Outcome
from kvferry.proto.schema import Message
from kvferry.proto.tether import Begin, CancelTickets, Detach, Words

DEFAULT_LOAD_TIMEOUT_NS: Final = 5_000_000_000
# A repeat of a directive follows at once, if at all; an engine has far fewer loads in one step.
REMEMBERED_LOADS: Final = 4096
# Tickets not begun for want of a worker, to be told to the next: those of the moment of its attachment matter.
REMEMBERED_UNBEGUN: Final = 1024


@dataclass(slots=True)
class _Load:
    """One load that a worker may be writing for."""

    blocks: tuple[int, ...]
    worker: int  # incarnation it was begun at
    deadline_ns: int
    is_cancelled: bool = False


@dataclass(slots=True)
class _Held:
    """Begins that the device has not come to."""

    hold: int
    tickets: list[int]
    mark: int


class RankCore:
    """See the module's text. All methods are for one owner at a time."""

    def __init__(self, load_timeout_ns: int = DEFAULT_LOAD_TIMEOUT_NS) -> None:
        self.counters = RankCounters()
        self.worker = 0  # incarnation of the worker that serves this rank now; 0: none
        self._load_timeout_ns = load_timeout_ns
        self._loads: dict[int, _Load] = {}
        self._stores: dict[int, int] = {}  # begun and without a word -> worker
        self._seen: dict[int, None] = {}  # load tickets of late: a directive that comes twice begins nothing twice
        self._load_ends: list[LoadEnd] = []
        self._store_ends: list[int] = []
        self._out: list[Message] = []
        self._held: deque[_Held] = deque()
        self._unbegun: deque[int] = deque(maxlen=REMEMBERED_UNBEGUN)
        self._declined: set[int] = set()  # told to the worker; nobody waits for its words on them

    # ---- the worker ----------------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """Whether a worker serves this rank."""
        return self.worker != 0

    def attach(self, worker: int) -> None:
        """`worker` serves this rank from now on. The same path the first time and later."""
        self.lost()
        self.worker = worker
        self.counters.attaches += 1
        unbegun = list(self._unbegun)
        self._unbegun.clear()
        self._decline(unbegun)

    def lost(self) -> None:
        """The tether ended: a notice of the worker's death. Its loads stay open until there is proof."""
        if not self.worker:
            return
        self.worker = 0
        self.counters.detaches += 1
        self._out.clear()
        self._declined.clear()
        held, self._held = self._held, deque()
        for ticket in (ticket for begin in held for ticket in begin.tickets):
            if (load := self._loads.get(ticket)) is not None:
                self._end_load(ticket, LoadEnd(ticket, False, load.blocks, Outcome.NOT_BEGUN))
            elif ticket in self._stores:
                self._drop_store(ticket)

    def dead(self, worker: int) -> None:
        """`worker`'s process is gone, proven: nothing of it touches memory any more."""
        if worker == self.worker:
            self.lost()
        for ticket, load in list(self._loads.items()):
            if load.worker == worker:
                self._end_load(ticket, LoadEnd(ticket, False, load.blocks, Outcome.WORKER_DIED))
        for ticket, begun_at in list(self._stores.items()):
            if begun_at == worker:
                self._end_store(ticket)

    @property
    def has_ends(self) -> bool:
        """Whether `poll` has a load's end to tell."""
        return bool(self._load_ends)

    def awaited_workers(self) -> set[int]:
        """Workers whose word or proof of death is still needed."""
        return {load.worker for load in self._loads.values()} | set(self._stores.values())

    def on_message(self, msg: object, worker: int) -> None:
        """Take a message that came from `worker`. What does not belong here is counted and changes nothing."""
        if not isinstance(msg, Words):
            self.counters.stale += 1
            return
        start = 0
        columns = (msg.tickets, msg.outcomes, msg.wait_us, msg.copy_us, msg.failed_counts)
        views = (u64(columns[0]), u8(columns[1]), u32(columns[2]), u32(columns[3]), u32(columns[4]))
        failed_blocks = u32(msg.failed_blocks).tolist()
        for ticket, number, wait_us, copy_us, count in zip(*(view.tolist() for view in views), strict=True):
            failed = tuple(failed_blocks[start : start + count])
            start += count
            load = self._loads.get(ticket)
            if load is not None and load.worker == worker:
                self._end_load(ticket, _load_end(ticket, load.blocks, number, failed, wait_us, copy_us))
            elif self._stores.get(ticket) == worker:
                self._end_store(ticket)
            elif ticket in self._declined:
                self._declined.discard(ticket)
            else:
                self.counters.stale += 1

    def outgoing(self) -> list[Message]:
        """Messages for the present worker, in order; each is given once."""
        messages, self._out = self._out, []
        return messages

    # ---- the engine's verbs --------------------------------------------------------------------------

    def begin_loads(self, directive: Directive, mark: int | None, now_ns: int, hold: int = 0) -> None:
        """The blocks of this directive's loads may be written once the mark word reaches `mark`.

        `mark` None: there is no mark, so nothing is begun. `hold` > 0: nothing is sent before `release` of it.
        """
        for ticket, blocks in directive.failed_loads:
            if self._is_new(ticket):
                self._end_load(ticket, LoadEnd(ticket, False, blocks, Outcome.NOT_PLANNED))
        begun, unbegun = [], []
        for ticket, blocks in directive.loads:
            if not self._is_new(ticket):
                continue
            if self.worker and mark is not None:
                self._loads[ticket] = _Load(blocks, self.worker, now_ns + self._load_timeout_ns)
                begun.append(ticket)
            else:
                self._end_load(ticket, LoadEnd(ticket, False, blocks, Outcome.NOT_BEGUN))
                unbegun.append(ticket)
        self.counters.loads += len(begun)
        self._begin(begun, mark, hold)
        self._decline(unbegun)
        self._cancel(directive.cancels)

    def begin_stores(self, directive: Directive, mark: int | None, hold: int = 0) -> None:
        """The blocks of this directive's stores may be read once the mark word reaches `mark`. As `begin_loads`."""
        revoked = set(directive.revokes)
        begun, unbegun = [], []
        for ticket in directive.stores:
            if ticket in self._stores or ticket in revoked:
                continue
            if self.worker and mark is not None:
                self._stores[ticket] = self.worker
                begun.append(ticket)
            else:
                self.counters.stores_dropped += 1
                self._store_ends.append(ticket)
                unbegun.append(ticket)
        self.counters.stores += len(begun)
        self._begin(begun, mark, hold)
        self._decline(unbegun)

    @property
    def has_held(self) -> bool:
        """Whether a begin waits for the device."""
        return bool(self._held)

    def release(self, hold: int) -> None:
        """The device is past `hold`: begins that waited for it, or for less, go out."""
        while self._held and self._held[0].hold <= hold:
            begin = self._held.popleft()
            awaited = [ticket for ticket in begin.tickets if ticket in self._loads or ticket in self._stores]
            self._begin(awaited, begin.mark, 0)

    def withdraw(self, tickets: Iterable[int]) -> None:
        """The blocks of these stores will be overwritten: those that no worker has heard of are not begun."""
        if not self._held:
            return
        given_up = set(tickets) & self._stores.keys()
        for begin in self._held:
            for ticket in [ticket for ticket in begin.tickets if ticket in given_up]:
                begin.tickets.remove(ticket)
                self._drop_store(ticket)

    def tick(self, now_ns: int) -> None:
        """Cancel, once, what passed its deadline; it stays open until its worker's word or proven death."""
        late = [t for t, load in self._loads.items() if not load.is_cancelled and now_ns >= load.deadline_ns]
        self.counters.load_deadlines += len(late)
        self._cancel(late)

    def next_due_ns(self) -> int | None:
        """When `tick` has something to do; None if no load is open."""
        return min((load.deadline_ns for load in self._loads.values() if not load.is_cancelled), default=None)

    def poll(self) -> RankReport:
        """What ended since the last call."""
        report = RankReport(tuple(self._load_ends), tuple(self._store_ends))
        self._load_ends, self._store_ends = [], []
        return report

    def detach(self) -> None:
        """Ask the worker to end politely."""
        if self.worker:
            self._out.append(Detach())

    @property
    def open_stores(self) -> frozenset[int]:
        """Stores that a worker may still be reading for."""
        return frozenset(self._stores)

    @property
    def open_loads(self) -> frozenset[int]:
        """Loads whose blocks still belong to a transfer."""
        return frozenset(self._loads)

    # ---- deeds ---------------------------------------------------------------------------------------

    def _is_new(self, ticket: int) -> bool:
        if ticket in self._seen:
            self.counters.stale += 1
            return False
        self._seen[ticket] = None
        if len(self._seen) > REMEMBERED_LOADS:
            del self._seen[next(iter(self._seen))]
        return True

    def _begin(self, tickets: Sequence[int], mark: int | None, hold: int) -> None:
        if mark is None or not tickets:
            return
        if hold:
            self._held.append(_Held(hold, list(tickets), mark))
            return
        for at in range(0, len(tickets), limits.MAX_JOBS):
            self._out.append(Begin(mark, pack_u64(tickets[at : at + limits.MAX_JOBS])))

    def _cancel(self, tickets: Sequence[int]) -> None:
        told = []
        for ticket in tickets:
            load = self._loads.get(ticket)
            if load is None or load.is_cancelled:
                continue
            load.is_cancelled = True
            if load.worker == self.worker:
                told.append(ticket)
        self._tell_cancelled(told)

    def _decline(self, tickets: Sequence[int]) -> None:
        """These are never begun here: whoever has plans of them need not wait."""
        if self.worker:
            self._declined.update(tickets)
            self._tell_cancelled(tickets)
        else:
            self._unbegun.extend(tickets)

    def _tell_cancelled(self, tickets: Sequence[int]) -> None:
        for at in range(0, len(tickets), limits.MAX_JOBS):
            self._out.append(CancelTickets(pack_u64(tickets[at : at + limits.MAX_JOBS])))

    def _end_load(self, ticket: int, end: LoadEnd) -> None:
        self._loads.pop(ticket, None)
        if not end.ok:
            self.counters.loads_failed += 1
        self._load_ends.append(end)

    def _end_store(self, ticket: int) -> None:
        del self._stores[ticket]
        self._store_ends.append(ticket)

    def _drop_store(self, ticket: int) -> None:
        """It was counted as begun, and never told to a worker."""
        self.counters.stores -= 1
        self.counters.stores_dropped += 1
        self._end_store(ticket)


def _load_end(
    ticket: int, blocks: tuple[int, ...], number: int, failed: tuple[int, ...], wait_us: int, copy_us: int
) -> LoadEnd:
    """One rank's end of a load, from its worker's word.

    A failure that names no block, or a block that is not the load's, is a failure of the whole load:
    reporting a foreign block would make an engine recompute, or truncate, somebody else's.
    """
    if number == Outcome.OK and not failed:
        return LoadEnd(ticket, True, (), Outcome.OK, wait_us, copy_us)
    known = number in Outcome._value2member_map_ and number != Outcome.OK
    outcome = Outcome(number) if known else Outcome.COPY_FAILED
    named = failed if failed and set(failed) <= set(blocks) else blocks
    return LoadEnd(ticket, False, named, outcome, wait_us, copy_us)
