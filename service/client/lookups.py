"""The client's lookups and leases: who asked what, what is known of it, what must be renewed. Sans-IO.

    UNASKED ──ask──▶ WAITING ──answer──▶ KNOWN ──load──▶ (gone, lease consumed)
       ▲                │ patience over     │ lease over, epoch changed
       │                ▼                   │
       │             GIVEN UP               │            A late answer names a lookup id that nobody waits
       └────────────────────────────────────┘            for any more: dropped, its lease given back.

A lookup that was given up is gone as a whole: only a new `start` asks again. An answer is remembered until
something may have changed, so an engine that asks the same question every step pays a dict access. A lease
is renewed only while the engine keeps asking for it: one that was left alone ends by itself. The daemon ends
a request's earlier lease itself when it is asked again and when it hears of the request's end, so what is
given back here by name is only what neither of these covers.
"""

from dataclasses import dataclass
from typing import Final

from kvferry.client.types import ClientCounters, Hits
from kvferry.proto import limits
from kvferry.proto.columns import pack_u64
from kvferry.proto.hot import Lookup, LookupAnswer, Renew
from kvferry.proto.outcome import Next, Reason

MS: Final = 1_000_000
# A miss may have become a hit by another engine's store: worth a new question this often, if still wanted.
MISS_REFRESH_NS: Final = 1_000 * MS
NEVER: Final = 1 << 63
# Hits without a lease may be evicted at any moment: promise no older answer than this.
UNLEASED_REFRESH_NS: Final = 50 * MS
# An engine that asked for a request's hits no later than this still wants its lease.
LEASE_WANTED_NS: Final = 60_000 * MS
MAX_LOOKUP_KEY_BYTES: Final = 16 << 20  # of one question; a longer chain is cut, not refused


@dataclass(slots=True)
class _Entry:
    """What is known of one request's chain."""

    request: int  # incarnation
    keys: bytes
    group: int
    wanted_ns: int  # when the engine last showed interest
    waiting_for: int = 0  # lookup id without an answer
    since_ns: int = -1  # first `hits` call: patience runs from here
    given_up: bool = False
    known: bool = False
    counted: bool = False
    count: int = 0
    next: Next = Next.MISS
    reason: Reason = Reason.NONE
    retry_ms: int = 0
    ask_again_ns: int = -1  # -1: the answer stays good
    lease: int = 0
    lease_ns: int = 0
    renewed_ns: int = 0


class Lookups:
    """All lookups of one client. Messages to send gather in `asks`, leases to give back in `released`."""

    def __init__(self, key_bytes: int, patience_ns: int, counters: ClientCounters) -> None:
        self.asks: list[Lookup | Renew] = []
        self.released: list[int] = []
        self.epoch = 0
        self.closed: Reason | None = Reason.OFF  # why nothing can hit now; None: ask the daemon
        self._key_bytes = key_bytes
        self._patience_ns = patience_ns
        self._counters = counters
        self._entries: dict[str, _Entry] = {}
        self._waiting: dict[int, str | None] = {}  # lookup id -> request; None: its end was told to the daemon
        self._next_id = 1
        self._due_ns = NEVER  # no entry has anything to do before this: a tick of a quiet client looks at none

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def leases(self) -> int:
        """Leases held."""
        return sum(1 for entry in self._entries.values() if entry.lease)

    def start(self, name: str, request: int, keys: bytes, group: int, now_ns: int) -> None:
        """Ask for `keys` on behalf of `name`, afresh."""
        old = self._entries.get(name)
        asks_again = bool(keys) and self.closed is None and old is not None
        is_replaced = asks_again and old is not None and (old.request, old.group) == (request, group)
        self.drop(name, release=not is_replaced)
        widest = min(limits.MAX_KEYS * self._key_bytes, MAX_LOOKUP_KEY_BYTES)
        keys = keys[: widest - widest % self._key_bytes]
        self._entries[name] = entry = _Entry(request, keys, group, now_ns)
        if self.closed is None and keys:
            self._ask(name, entry)

    def hits(self, name: str, now_ns: int) -> Hits:
        """What is known of `name`'s chain now."""
        entry = self._entries.get(name)
        if entry is None or not entry.keys:
            return Hits(True)
        if self.closed is not None:
            return Hits(True, reason=self.closed)
        if entry.given_up:
            return Hits(True)
        entry.wanted_ns = now_ns
        if entry.lease:
            self._note_due(entry, now_ns)
        if entry.since_ns < 0:
            entry.since_ns = now_ns
        if not entry.waiting_for and (not entry.known or 0 <= entry.ask_again_ns <= now_ns):
            self._ask(name, entry)
        patient = now_ns - entry.since_ns < self._patience_ns
        if not entry.known:
            if patient:
                return Hits(False)
            self._give_up(entry)
            return Hits(True)
        if entry.next is Next.PENDING and patient:
            self._note_due(entry, now_ns)
            return Hits(False, entry.count, entry.next, entry.retry_ms, entry.reason)
        if not entry.counted:
            entry.counted = True
            self._counters.hits += entry.count
        return Hits(True, entry.count, entry.next, entry.retry_ms, entry.reason)

    def is_awaited(self, name: str) -> bool:
        """Whether an answer that `hits` needs is on its way: waiting for it may help."""
        entry = self._entries.get(name)
        return entry is not None and bool(entry.waiting_for) and not entry.known and self.closed is None

    def expects(self, lookup: int) -> bool:
        """Whether the daemon owes an answer to this question."""
        return lookup in self._waiting

    def answer(self, msg: LookupAnswer, now_ns: int) -> None:
        """Take the daemon's answer; a late one is dropped and its lease given back."""
        was_ended = msg.lookup in self._waiting
        name = self._waiting.pop(msg.lookup, None)
        if name is None:
            self._counters.late_lookups += 1
            if not was_ended:
                self._release(msg.lease)
            return
        entry = self._entries[name]
        entry.waiting_for = 0
        entry.known = True
        entry.count = min(msg.hits, len(entry.keys) // self._key_bytes)
        entry.next = Next(msg.next)
        entry.reason = reason_of(msg.reason)
        entry.retry_ms = msg.retry_ms
        entry.lease = msg.lease
        entry.lease_ns = msg.lease_ms * MS
        entry.renewed_ns = now_ns
        entry.ask_again_ns = self._ask_again(entry, now_ns)
        self._note_due(entry, now_ns)

    def take_lease(self, name: str, now_ns: int) -> int:
        """The load of `name` begins: its lease (0: none) passes to the load, and the lookup is gone."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return 0
        self._waiting.pop(entry.waiting_for, None)
        return entry.lease if now_ns < entry.renewed_ns + entry.lease_ns else 0

    def drop(self, name: str, *, release: bool = True) -> None:
        """Forget the lookup of `name`; harmless if there is none.

        release: give its lease back, now or when a late answer brings it. Else the daemon ends it by itself.
        """
        entry = self._entries.pop(name, None)
        if entry is None:
            return
        if release:
            self._waiting.pop(entry.waiting_for, None)
            self._release(entry.lease)
        elif entry.waiting_for:
            self._waiting[entry.waiting_for] = None

    def restart(self, *, release: bool) -> None:
        """Nothing that was answered holds any more (daemon lost, or the epoch changed): ask anew when asked."""
        self._waiting.clear()
        for entry in self._entries.values():
            if release:
                self._release(entry.lease)
            entry.known, entry.lease, entry.waiting_for, entry.since_ns = False, 0, 0, -1
        if not release:
            self.asks.clear()
            self.released.clear()

    def clear(self) -> None:
        """Forget every lookup and give every lease back."""
        for name in list(self._entries):
            self.drop(name)

    def tick(self, now_ns: int) -> None:
        """Renew leases that are wanted, drop those that ended, repeat pending questions that are waited for."""
        if self.closed is Reason.OFF or now_ns < self._due_ns:
            return
        renew = []
        self._due_ns = NEVER
        for name, entry in self._entries.items():
            if entry.lease:
                if now_ns >= entry.renewed_ns + entry.lease_ns:
                    entry.lease, entry.known, entry.since_ns = 0, False, -1
                elif self._is_wanted(entry) and now_ns >= entry.renewed_ns + entry.lease_ns // 3:
                    entry.renewed_ns = now_ns
                    renew.append(entry.lease)
            due_ns = self._question_due_ns(entry)
            is_patient = now_ns - entry.since_ns < self._patience_ns
            if due_ns is not None and due_ns <= now_ns and is_patient and self.closed is None:
                self._ask(name, entry)
            self._note_due(entry, now_ns)
        for at in range(0, len(renew), limits.MAX_JOBS):
            self.asks.append(Renew(pack_u64(renew[at : at + limits.MAX_JOBS])))

    def next_due_ns(self) -> int | None:
        """When `tick` has something to do, or a little earlier; None if nothing is leased or pending."""
        return self._due_ns if self._due_ns < NEVER and self.closed is None else None

    def _is_wanted(self, entry: _Entry) -> bool:
        return entry.renewed_ns + entry.lease_ns // 3 - entry.wanted_ns < LEASE_WANTED_NS

    def _question_due_ns(self, entry: _Entry) -> int | None:
        """When a pending answer is to be asked for again by time alone: only while somebody waits for it."""
        if not entry.known or entry.next is not Next.PENDING or entry.waiting_for or entry.since_ns < 0:
            return None
        return entry.ask_again_ns if entry.ask_again_ns < entry.since_ns + self._patience_ns else None

    def _note_due(self, entry: _Entry, now_ns: int) -> None:
        if entry.lease:
            lasts_ns = entry.lease_ns // 3 if self._is_wanted(entry) else entry.lease_ns
            self._due_ns = min(self._due_ns, entry.renewed_ns + lasts_ns)
        question_ns = self._question_due_ns(entry)
        if question_ns is not None and question_ns > now_ns:
            self._due_ns = min(self._due_ns, question_ns)

    def _ask(self, name: str, entry: _Entry) -> None:
        entry.lease = 0  # the daemon ends it when the question comes
        entry.waiting_for = self._next_id
        self._next_id += 1
        self._waiting[entry.waiting_for] = name
        self.asks.append(Lookup(entry.waiting_for, entry.request, self.epoch, entry.group, self._key_bytes, entry.keys))

    def _give_up(self, entry: _Entry) -> None:
        self._waiting.pop(entry.waiting_for, None)
        entry.waiting_for = 0
        entry.given_up = True

    def _ask_again(self, entry: _Entry, now_ns: int) -> int:
        if entry.next is Next.PENDING:
            return now_ns + max(entry.retry_ms, 1) * MS
        if entry.count and not entry.lease:
            return now_ns + UNLEASED_REFRESH_NS
        return now_ns + MISS_REFRESH_NS if entry.next is Next.MISS else -1

    def _release(self, lease: int) -> None:
        if lease:
            self.released.append(lease)


def reason_of(number: int) -> Reason:
    """The reason of that number; OFF for one that this build does not know."""
    return Reason(number) if number in Reason._value2member_map_ else Reason.OFF
