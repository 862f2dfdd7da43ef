"""The client's core: what an engine's scheduler asks of kvferry, turned into messages and back. Sans-IO.

    engine ──lookup, hits, load, store, written, finish, end_step──▶ ┌────────────┐ ──outgoing()──▶ daemon
           ◀──Hits, tickets, Directive, JobEnd───────────────────── │ ClientCore │ ◀─on_message()── daemon
                                              attach, lost, tick ──▶ └────────────┘

It opens nothing, reads no clock and never waits: time is an argument, messages are values. Nothing the
daemon says or fails to say raises here. Without a daemon every lookup is a miss, every store is not taken
and every load is failed by the ranks.

Promises:
  * a ticket that `load` or `store` gave (> 0) yields exactly one JobEnd, and tickets never repeat;
  * a ticket withdrawn before its step was sent was heard of by nobody;
  * one incarnation of a request carries one load or any stores, never both: each direction has its own.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from kvferry.client.batch import Job, StepBatch
from kvferry.client.fence import FenceMirror
from kvferry.client.lookups import MS, Lookups, reason_of
from kvferry.client.types import ArgumentError, ClientCounters, Directive, Hits, JobEnd
from kvferry.proto import limits
from kvferry.proto.columns import u8, u32, u64
from kvferry.proto.control import (
    Goodbye,
    Hello,
    RanksChanged,
    Refused,
    Register,
    Registered,
    Rotate,
    Welcome,
)
from kvferry.proto.hot import JobsEnded, LookupAnswer, StepAnswer
from kvferry.proto.outcome import Ended, Kind, Outcome, Reason
from kvferry.proto.schema import Message

# Steps the daemon may owe an answer for. It answers within a millisecond; one that is this far behind is
# stopped or drowning, and more stores would only be memory. About 25 MB at 100 KB a step.
MAX_UNANSWERED_STEPS: Final = 256
# Ends and releases of an engine that steps no more are told by themselves after this.
IDLE_TELL_NS: Final = 100 * MS


class State(Enum):
    """How far the registration has come."""

    OFF = "off"
    HELLO = "hello"  # waiting for Welcome
    REGISTERING = "registering"  # waiting for Registered
    REGISTERED = "registered"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """What an engine says of itself. Times in nanoseconds."""

    engine_id: str
    world_size: int
    key_bytes: int
    num_blocks: int
    block_tokens: int
    facts: Mapping[str, str] = field(default_factory=dict)
    salt: bytes = b""
    patience_ns: int = 20 * MS


@dataclass(slots=True)
class _Request:
    """One name of the engine's: its live incarnations, one for each direction."""

    name: str
    load: int = 0  # incarnation of the lookup and the load that follows it; 0: none yet
    store: int = 0
    told: list[int] = field(default_factory=list)  # live incarnations that the daemon may have heard of
    loads: set[int] = field(default_factory=set)  # tickets without all ranks' words
    is_failed: bool = False  # a load of it failed: no more hits, or it might fail for ever


@dataclass(slots=True)
class _Open:
    """A ticket whose JobEnd is due."""

    name: str
    kind: Kind
    num_keys: int
    accepted: int
    reason: Reason = Reason.NONE
    is_revoked: bool = False


class ClientCore:
    """See the module's text. All methods are for one owner at a time."""

    def __init__(self, settings: ClientSettings) -> None:
        self.settings = settings
        self.counters = ClientCounters()
        self.state = State.OFF
        self.refusal: Refused | None = None
        self.num_attached = 0
        self.slots = 0
        self.namespace = ""
        self.incarnation = 0
        self.boot = 0
        self._salt = settings.salt
        self._registered_salt = settings.salt  # what the last Register named
        self._epoch = 0
        self._lookups = Lookups(settings.key_bytes, settings.patience_ns, self.counters)
        self._fence = FenceMirror()
        self._batch = StepBatch()
        self._requests: dict[str, _Request] = {}
        self._open: dict[int, _Open] = {}
        self._loading: dict[int, _Request] = {}  # load tickets without all ranks' words
        self._untold: set[int] = set()  # loads the ranks ended; the daemon's word on them is due
        self._ended: list[JobEnd] = []
        self._out: list[Message] = []
        self._last_ticket = 0
        self._last_request = 0
        self._steps = 0  # of the client's life
        self._sent_steps = 0  # within the registration
        self._answered_steps = 0

    # ---- the link ------------------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """Whether lookups may hit: registered, and all ranks are served."""
        return self.state is State.REGISTERED and self.num_attached == self.settings.world_size

    def attach(self, now_ns: int, *, software: str = "", pid: int = 0) -> None:
        """A new link is open: say hello and register. The same path at start and after each loss."""
        if self.state is not State.OFF:
            self.lost(now_ns)
        self.refusal = None
        self.state = State.HELLO
        self._out.append(Hello(role="client", software=software, pid=pid))

    def lost(self, now_ns: int) -> None:
        """The link is over. Stores and lookups end; loads are left to their ranks' words."""
        if self.state in (State.REGISTERED, State.REGISTERING):
            self.counters.detaches += 1
        self.state = State.OFF
        self.num_attached = self.incarnation = 0
        self._out.clear()
        self._sent_steps = self._answered_steps = 0
        self._lookups.restart(release=False)
        self._close_gate()
        batch = self._batch
        for ticket in list(batch.stores):
            self._withdraw(ticket)
        # A daemon that lives on without us could still publish these: nobody guards their blocks any more.
        self._revoke(self._fence.tickets())
        batch.orphans.update(batch.revoked)
        batch.fail_loads()
        for gathered in (batch.revoked, batch.cancelled, batch.ends, batch.written, batch.released):
            gathered.clear()
        for ticket in self._fence.tickets():
            self.counters.lost_stores += 1
            self._open[ticket].accepted = 0
            self._open[ticket].reason = Reason.OFF
            self._end(ticket, Outcome.CANCELLED)
        self._untold.clear()

    def refused(self, refusal: Refused, now_ns: int) -> None:
        """The daemon turned the link, or the registration, down."""
        self.lost(now_ns)
        self.state = State.REFUSED
        self.refusal = refusal

    def close(self, now_ns: int) -> list[Message]:
        """Last messages of an orderly end; the core is off afterwards."""
        said = self.state is not State.OFF
        self.lost(now_ns)
        return [Goodbye()] if said else []

    def on_message(self, msg: object, now_ns: int) -> None:
        """Take one message of the daemon. What does not belong here is counted and changes nothing."""
        if isinstance(msg, LookupAnswer):
            self._on_lookup_answer(msg, now_ns)
        elif isinstance(msg, StepAnswer):
            self._on_step_answer(msg, now_ns)
        elif isinstance(msg, JobsEnded):
            self._on_jobs_ended(msg)
        elif isinstance(msg, Welcome) and self.state is State.HELLO:
            self._on_welcome(msg)
        elif isinstance(msg, Registered) and self.state is State.REGISTERING:
            self.state = State.REGISTERED
            self.incarnation = msg.incarnation
            self.counters.attaches += 1
            if self._salt != self._registered_salt:
                # Rotated while the registration was on its way: it named a namespace that is ours no more.
                self._out.append(Rotate(salt=self._salt))
            self._on_ranks(msg)
        elif isinstance(msg, RanksChanged) and self.state is State.REGISTERED:
            self._on_ranks(msg)
        elif isinstance(msg, Refused):
            self.refused(msg, now_ns)
        else:
            self.counters.stale += 1

    def outgoing(self) -> list[Message]:
        """Messages to send now, in order; each is given once."""
        self._out += self._lookups.asks
        self._lookups.asks.clear()
        messages, self._out = self._out, []
        return messages

    def tick(self, now_ns: int) -> None:
        """Let time pass: leases, pending questions, and ends that no further step would tell."""
        self._lookups.tick(now_ns)
        self._gather_released(now_ns)
        batch = self._batch
        is_idle = batch.since_ns >= 0 and now_ns - batch.since_ns >= IDLE_TELL_NS
        # Never ahead of transfers: their step is the engine's to send, with its directive.
        if is_idle and self.state is State.REGISTERED and not (batch.has_transfers or batch.revoked):
            told = StepBatch(ends=batch.ends, released=batch.released)
            batch.ends, batch.released, batch.since_ns = {}, [], -1
            self._tell(told)

    def next_due_ns(self) -> int | None:
        """When `tick` has something to do; None if nothing waits for time."""
        due = self._lookups.next_due_ns()
        if self._batch.since_ns >= 0 and self.state is State.REGISTERED:
            tell = self._batch.since_ns + IDLE_TELL_NS
            due = tell if due is None else min(due, tell)
        return due

    # ---- the engine's verbs --------------------------------------------------------------------------

    def lookup(self, request: str, keys: Sequence[bytes] | bytes, now_ns: int, *, group: int = 0) -> None:
        """Ask how many leading keys are held; `hits` tells. A second call for the same request restarts it."""
        column = self._column(keys, group)
        self.counters.lookups += 1
        record = self._record(request)
        if record.is_failed or not column:
            self._lookups.drop(request)
            self._gather_released(now_ns)
            return
        if not record.load:
            record.load = self._new_incarnation(record)
        self._lookups.start(request, record.load, column, group, now_ns)

    def hits(self, request: str, now_ns: int) -> Hits:
        """What is known of the request's lookup; never waits."""
        record = self._requests.get(request)
        if record is None or record.is_failed:
            return Hits(True)
        return self._lookups.hits(request, now_ns)

    def is_awaited(self, request: str) -> bool:
        """Whether a first answer for this request is on its way."""
        return self._lookups.is_awaited(request)

    def load(
        self,
        request: str,
        keys: Sequence[bytes] | bytes,
        blocks: Sequence[int],
        now_ns: int,
        *,
        group: int = 0,
    ) -> int:
        """Bring these keys into these blocks; the load's ticket, > 0.

        Its end is the ranks' word (`load_ended`). What cannot be sent is failed by the ranks at once.
        """
        column, ids = self._pairs(keys, blocks, group)
        record = self._record(request)
        ticket = self._new_ticket()
        self.counters.loads += 1
        self._open[ticket] = _Open(request, Kind.LOAD, len(ids), 0)
        self._loading[ticket] = record
        record.loads.add(ticket)
        lease = self._lookups.take_lease(request, now_ns)
        if not ids or not self._can_send(column, len(ids)):
            if lease and self.state is State.REGISTERED:
                self._batch.released.append(lease)
            self._batch.failed_loads[ticket] = ids
            return ticket
        incarnation = record.load or self._new_incarnation(record)
        record.load = 0  # the next lookup or load of this request is a new attempt
        self._meet(ids)
        self._batch.add_load(Job(ticket, incarnation, request, group, column, ids, lease))
        return ticket

    def store(
        self,
        request: str,
        keys: Sequence[bytes] | bytes,
        blocks: Sequence[int],
        now_ns: int,
        *,
        group: int = 0,
    ) -> int:
        """Keep these blocks under these keys; the store's ticket, or 0 if it was not taken.

        Only the common part of keys and blocks counts.
        """
        column, ids = self._pairs(keys, blocks, group)
        if not ids:
            return 0
        if not self._can_send(column, len(ids)):
            self.counters.stores_off += 1
            return 0
        record = self._record(request)
        record.store = record.store or self._new_incarnation(record)
        ticket = self._new_ticket()
        self.counters.stores += 1
        self._open[ticket] = _Open(request, Kind.STORE, len(ids), len(ids))
        self._fence.add(ticket, ids)
        self._batch.add_store(Job(ticket, record.store, request, group, column, ids))
        return ticket

    def written(self, blocks: Iterable[int]) -> frozenset[int]:
        """These blocks get new contents from this step on; the stores that lose by it.

        Each of them is revoked by the next directive, or withdrawn if its step was not sent yet.
        """
        blocks = [block for block in blocks if 0 <= block < self.settings.num_blocks]
        hit = self._meet(blocks)
        if len(self._fence):  # without an unended store there is nothing that the daemon could meet
            self._batch.write(blocks)
        return hit

    def storing(self, blocks: Iterable[int]) -> frozenset[int]:
        """Unended stores that read any of these blocks. A question: nothing changes."""
        return frozenset(self._fence.readers(blocks))

    def forget(self, request: str, now_ns: int) -> None:
        """Drop the request's lookup and lease without ending it."""
        self._lookups.drop(request)
        self._gather_released(now_ns)

    def finish(self, request: str, now_ns: int) -> None:
        """The request is over. Its stores go on; a load of it is cancelled, and its word still comes."""
        self._close_request(request, Ended.FINISHED, now_ns)

    def abort(self, request: str, now_ns: int) -> None:
        """The request was given up by its user. As `finish`."""
        self._close_request(request, Ended.ABORTED, now_ns)

    def preempt(self, request: str, now_ns: int) -> None:
        """The request lost its blocks and comes back as a new attempt; its old stores stay with the old one."""
        record = self._requests.get(request)
        self._lookups.drop(request, release=self.state is not State.REGISTERED)
        if record is not None:
            self._tell_ended(record, Ended.PREEMPTED, now_ns)
        self._gather_released(now_ns)

    def cancel(self, ticket: int, now_ns: int) -> None:
        """Nobody wants this transfer any more. Unknown and ended tickets are harmless."""
        if ticket in self._batch.stores:
            self._withdraw(ticket)
        elif ticket in self._batch.loads:
            self._batch.failed_loads[ticket] = self._batch.loads.pop(ticket).blocks
        elif ticket in self._loading and ticket not in self._batch.failed_loads:
            self._batch.cancelled[ticket] = None
            self._batch.cancelled_loads[ticket] = None
        elif ticket in self._fence:
            self._batch.cancelled[ticket] = None

    def end_step(self, now_ns: int) -> Directive:
        """Send this step's message, if there is one, and say what the ranks must do."""
        self._gather_released(now_ns)
        self._steps += 1
        batch, self._batch = self._batch, StepBatch()
        if self.state is not State.REGISTERED:
            batch.fail_loads()
        directive = batch.directive(self._steps)
        if self.state is State.REGISTERED:
            self._tell(batch)
        return directive

    def load_ended(self, ticket: int, ok: bool) -> None:
        """All ranks have given their word on this load."""
        record = self._loading.pop(ticket, None)
        if record is None:
            self.counters.stale += 1
            return
        record.loads.discard(ticket)
        if not ok:
            self.counters.loads_failed += 1
            record.is_failed = True
            if self._requests.get(record.name) is record:
                self._lookups.drop(record.name)
        if ticket in self._open:
            if self.state is State.REGISTERED:
                self._untold.add(ticket)
            self._end(ticket, Outcome.OK if ok else Outcome.COPY_FAILED)

    def poll(self) -> list[JobEnd]:
        """Tickets that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def rotate(self, salt: bytes, now_ns: int) -> None:
        """Move this engine to the namespace of `salt`: nothing stored so far is found, nothing unended counts."""
        self._salt = salt
        self._lookups.clear()
        for ticket in list(self._batch.stores):
            self._withdraw(ticket)
        self._revoke(self._fence.tickets())
        self._gather_released(now_ns)
        if self.state is State.REGISTERED:
            self._out.append(Rotate(salt=salt))

    def describe(self) -> dict[str, Any]:
        """Gauges as plain values."""
        return {
            "state": self.state.value,
            "attached_ranks": self.num_attached,
            "world_size": self.settings.world_size,
            "namespace": self.namespace,
            "epoch": self._epoch,
            "slots": self.slots,
            "requests": len(self._requests),
            "lookups": len(self._lookups),
            "leases": self._lookups.leases,
            "stores_open": len(self._fence),
            "loads_open": len(self._loading),
            "steps_unanswered": self._sent_steps - self._answered_steps,
        }

    # ---- messages ------------------------------------------------------------------------------------

    def _on_welcome(self, msg: Welcome) -> None:
        settings = self.settings
        self.boot = msg.boot
        self._registered_salt = self._salt
        self.state = State.REGISTERING
        self._out.append(
            Register(
                engine_id=settings.engine_id,
                world_size=settings.world_size,
                key_bytes=settings.key_bytes,
                num_blocks=settings.num_blocks,
                block_tokens=settings.block_tokens,
                facts=dict(settings.facts),
                salt=self._salt,
            )
        )

    def _on_ranks(self, msg: Registered | RanksChanged) -> None:
        if msg.namespace != self.namespace:
            self._lookups.restart(release=True)
        self.num_attached, self.namespace, self.slots = msg.attached, msg.namespace, msg.slots
        self._adopt(msg.epoch)
        self._close_gate()

    def _on_lookup_answer(self, msg: LookupAnswer, now_ns: int) -> None:
        if self.state is not State.REGISTERED:
            self.counters.stale += 1
            return
        self._adopt(msg.epoch)
        self._lookups.answer(msg, now_ns)

    def _on_step_answer(self, msg: StepAnswer, now_ns: int) -> None:
        if self.state is not State.REGISTERED or not self._answered_steps < msg.step <= self._sent_steps:
            self.counters.stale += 1
            return
        self._answered_steps = msg.step
        self._adopt(msg.epoch)
        columns = (u64(msg.tickets), u64(msg.jobs), u32(msg.accepted), u8(msg.reasons))
        for ticket, job_id, accepted, number in zip(*(column.tolist() for column in columns), strict=True):
            job = self._open.get(ticket)
            reason = reason_of(number)
            if job_id == 0:
                self._untold.discard(ticket)
            if job is None:
                continue  # the ranks ended it first
            job.accepted, job.reason = min(accepted, job.num_keys), reason
            if reason is not Reason.NONE:
                refused = self.counters.refused
                refused[reason.name] = refused.get(reason.name, 0) + job.num_keys - job.accepted
            if job_id == 0:
                held = reason is Reason.NONE and job.kind is Kind.STORE
                self._end(ticket, Outcome.OK if held else Outcome.CANCELLED)
            elif job.kind is Kind.STORE:
                self._fence.keep_first(ticket, job.accepted)
        self.counters.wait_for += len(msg.wait_for) // 8

    def _on_jobs_ended(self, msg: JobsEnded) -> None:
        for ticket, number in zip(u64(msg.tickets).tolist(), u8(msg.outcomes).tolist(), strict=True):
            if ticket in self._open:
                self._end(ticket, _outcome_of(number))
            elif ticket in self._untold:
                self._untold.discard(ticket)
            else:
                self.counters.stale += 1

    # ---- deeds ---------------------------------------------------------------------------------------
    def _close_request(self, name: str, why: Ended, now_ns: int) -> None:
        self._lookups.drop(name, release=self.state is not State.REGISTERED)
        record = self._requests.pop(name, None)
        if record is not None:
            for ticket in list(record.loads):
                self.cancel(ticket, now_ns)
            self._tell_ended(record, why, now_ns)
        self._gather_released(now_ns)

    def _tell_ended(self, record: _Request, why: Ended, now_ns: int) -> None:
        if self.state is State.REGISTERED and record.told:
            self._batch.ends.update(dict.fromkeys(record.told, why))
            if self._batch.since_ns < 0:
                self._batch.since_ns = now_ns
        record.told.clear()
        record.load = record.store = 0

    def _gather_released(self, now_ns: int) -> None:
        released = self._lookups.released
        if released and self.state is State.REGISTERED:
            self._batch.released += released
            if self._batch.since_ns < 0:
                self._batch.since_ns = now_ns
        released.clear()

    def _tell(self, batch: StepBatch) -> None:
        step = batch.build(self._sent_steps + 1, self._epoch, self.settings.key_bytes)
        if step is None:
            return
        self._sent_steps += 1
        self._out += self._lookups.asks
        self._lookups.asks.clear()
        self._out.append(step)
        self._batch.take_rest_of(batch)

    def _meet(self, blocks: Iterable[int]) -> frozenset[int]:
        """Take the losers of a write to `blocks` out: withdrawn if unsent, else revoked. Each is named once."""
        losers = [t for t in sorted(self._fence.readers(blocks)) if not self._open[t].is_revoked]
        for ticket in losers:
            if ticket in self._batch.stores:
                self._withdraw(ticket)
        self._revoke(ticket for ticket in losers if ticket in self._fence)
        return frozenset(losers)

    def _revoke(self, tickets: Iterable[int]) -> None:
        for ticket in tickets:
            job = self._open[ticket]
            if not job.is_revoked:
                job.is_revoked = True
                self.counters.revokes += 1
                self._batch.revoked[ticket] = None

    def _withdraw(self, ticket: int) -> None:
        self._batch.remove_store(ticket)
        self.counters.withdrawn += 1
        self._open[ticket].accepted = 0
        self._end(ticket, Outcome.CANCELLED)

    def _end(self, ticket: int, outcome: Outcome) -> None:
        """The one exit of every ticket."""
        job = self._open.pop(ticket, None)
        if job is None:
            return
        if job.kind is Kind.STORE:
            self._fence.end(ticket)
        self._ended.append(JobEnd(ticket, job.name, job.kind, outcome, job.reason, job.accepted))

    def _adopt(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch = self._lookups.epoch = epoch
            self._lookups.restart(release=True)

    def _close_gate(self) -> None:
        if self.attached:
            self._lookups.closed = None
        else:
            self._lookups.closed = Reason.RANKS_AWAY if self.state is State.REGISTERED else Reason.OFF

    def _can_send(self, keys: bytes, num_blocks: int) -> bool:
        return (
            self.attached
            and self._sent_steps - self._answered_steps < MAX_UNANSWERED_STEPS
            and self._batch.has_room(len(keys), num_blocks)
        )

    def _record(self, name: str) -> _Request:
        record = self._requests.get(name)
        if record is None:
            record = self._requests[name] = _Request(name)
        return record

    def _new_incarnation(self, record: _Request) -> int:
        self._last_request += 1
        record.told.append(self._last_request)
        return self._last_request

    def _new_ticket(self) -> int:
        self._last_ticket += 1
        return self._last_ticket

    def _column(self, keys: Sequence[bytes] | bytes, group: int) -> bytes:
        width = self.settings.key_bytes
        if not 0 <= group < limits.MAX_GROUPS:
            raise ArgumentError(f"group {group} is outside 0..{limits.MAX_GROUPS - 1}")
        if isinstance(keys, bytes | bytearray | memoryview):
            column = bytes(keys)
            if len(column) % width:
                raise ArgumentError(f"keys have {len(column)} bytes, no multiple of key_bytes = {width}")
            return column
        for key in keys:
            if len(key) != width:
                raise ArgumentError(f"a key has {len(key)} bytes; this client was made for key_bytes = {width}")
        return b"".join(keys)

    def _pairs(self, keys: Sequence[bytes] | bytes, blocks: Sequence[int], group: int) -> tuple[bytes, tuple[int, ...]]:
        """The common part of keys and blocks."""
        column = self._column(keys, group)
        width = self.settings.key_bytes
        ids = tuple(int(block) for block in blocks[: len(column) // width])
        if ids and not (min(ids) >= 0 and max(ids) < self.settings.num_blocks):
            raise ArgumentError(f"block ids {min(ids)}..{max(ids)} are outside 0..{self.settings.num_blocks - 1}")
        return column[: len(ids) * width], ids


def _outcome_of(number: int) -> Outcome:
    """The outcome of that number; a failure for one that this build does not know."""
    return Outcome(number) if number in Outcome._value2member_map_ else Outcome.COPY_FAILED
