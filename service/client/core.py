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

from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any, Final

from kvferry.client.arguments import block_ids, check_request, check_salt, check_ticket, key_column, pairs, targets
from kvferry.client.batch import Job, StepBatch
from kvferry.client.lookups import MS, Lookups
from kvferry.client.registration import ClientSettings, Registration, State
from kvferry.client.requests import Request, Requests
from kvferry.client.transfers import Transfers
from kvferry.client.types import ClientCounters, Directive, Hits, JobEnd
from kvferry.proto.control import Goodbye, RanksChanged, Refused, Registered, Welcome
from kvferry.proto.hot import JobsEnded, LookupAnswer, StepAnswer
from kvferry.proto.outcome import Ended, Reason
from kvferry.proto.schema import Message

__all__ = ["ClientCore", "ClientSettings", "State"]

# Steps the daemon may owe an answer for. It answers within a millisecond; one that is this far behind is
# stopped or drowning, and more stores would only be memory. About 25 MB at 100 KB a step.
MAX_UNANSWERED_STEPS: Final = 256
# Ends and releases of an engine that steps no more are told by themselves after this.
IDLE_TELL_NS: Final = 100 * MS


class ClientCore:
    """See the module's text. All methods are for one owner at a time."""

    def __init__(self, settings: ClientSettings, tickets: Iterator[int] | None = None) -> None:
        """`tickets`: where new ones come from, rising; 1, 2, ... by default."""
        self.settings = settings
        self.counters = ClientCounters()
        self.registration = Registration(settings)
        self._epoch = 0
        self._lookups = Lookups(settings.key_bytes, settings.patience_ns, self.counters)
        self._requests = Requests()
        self._transfers = Transfers(self.counters, tickets or count(1))
        self._fence = self._transfers.fence
        self._batch = StepBatch()
        self._loading: dict[int, Request] = {}  # load tickets without all ranks' words
        self._out: list[Message] = []
        self._steps = 0  # of the client's life
        self._sent_steps = 0  # within the registration
        self._answered_steps = 0

    # ---- the link ------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """How far the registration has come."""
        return self.registration.state

    @property
    def attached(self) -> bool:
        """Whether lookups may hit: registered, and all ranks are served."""
        return self.registration.is_whole

    @property
    def refusal(self) -> Refused | None:
        """Why the daemon turned us down, if it did."""
        return self.registration.refusal

    @property
    def is_registered(self) -> bool:
        """Whether there is a daemon that takes steps."""
        return self.registration.state is State.REGISTERED

    def attach(self, now_ns: int, *, software: str = "", pid: int = 0) -> None:
        """A new link is open: say hello and register. The same path at start and after each loss."""
        if self.state is not State.OFF:
            self.lost(now_ns)
        self._out.append(self.registration.hello(software, pid))

    def lost(self, now_ns: int) -> None:
        """The link is over. Stores and lookups end; loads are left to their ranks' words."""
        self.counters.detaches += self.registration.lost()
        self._out.clear()
        self._sent_steps = self._answered_steps = 0
        self._lookups.restart(release=False)
        self._close_gate()
        for ticket in list(self._batch.stores):
            self._withdraw(ticket)
        # A daemon that lives on without us could still publish these: nobody guards their blocks any more.
        self._revoke(self._fence.tickets())
        self._batch.lost()
        self._transfers.lost()

    def refused(self, refusal: Refused, now_ns: int) -> None:
        """The daemon turned the link, or the registration, down."""
        self.lost(now_ns)
        self.registration.refuse(refusal)

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
            self._transfers.jobs_ended(msg)
        elif isinstance(msg, Welcome) and self.state is State.HELLO:
            self._out.append(self.registration.welcome(msg))
        elif isinstance(msg, Registered) and self.state is State.REGISTERING:
            self.counters.attaches += 1
            self._out += self.registration.registered(msg)
            self._on_ranks(msg)
        elif isinstance(msg, RanksChanged) and self.is_registered:
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
        if is_idle and self.is_registered and not (batch.has_transfers or batch.revoked):
            told = StepBatch(ends=batch.ends, released=batch.released)
            batch.ends, batch.released, batch.since_ns = {}, [], -1
            self._tell(told)

    def next_due_ns(self) -> int | None:
        """When `tick` has something to do; None if nothing waits for time."""
        due = self._lookups.next_due_ns()
        if self._batch.since_ns >= 0 and self.is_registered:
            tell = self._batch.since_ns + IDLE_TELL_NS
            due = tell if due is None else min(due, tell)
        return due

    # ---- the engine's verbs --------------------------------------------------------------------------

    def lookup(self, request: str, keys: Sequence[bytes] | bytes, now_ns: int, *, group: int = 0) -> None:
        """Ask how many leading keys are held; `hits` tells. A second call for the same request restarts it."""
        check_request(request)
        column = key_column(keys, self.settings.key_bytes, group)
        self.counters.lookups += 1
        record = self._requests.of(request)
        if record.is_failed or not column:
            self._lookups.drop(request)
            self._gather_released(now_ns)
            return
        self._lookups.start(request, self._requests.for_lookup(record), column, group, now_ns)

    def hits(self, request: str, now_ns: int) -> Hits:
        """What is known of the request's lookup; never waits."""
        check_request(request)
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

        Only the common part of keys and blocks counts. The end is the ranks' word (`load_ended`). What cannot be
        sent is failed by the ranks at once.
        """
        check_request(request)
        column, ids = targets(keys, blocks, self.settings.key_bytes, self.settings.num_blocks, group)
        record = self._requests.of(request)
        self.counters.loads += 1
        ticket = self._transfers.begin_load(request, len(ids))
        self._loading[ticket] = record
        record.loads.add(ticket)
        lease = self._lookups.take_lease(request, now_ns)
        if not ids or not self._can_send(column, len(ids)):
            if lease and self.is_registered:
                self._batch.released.append(lease)
            self._batch.failed_loads[ticket] = ids
            return ticket
        self._meet(ids)
        self._batch.add_load(Job(ticket, self._requests.for_load(record), request, group, column, ids, lease))
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
        check_request(request)
        column, ids = pairs(keys, blocks, self.settings.key_bytes, self.settings.num_blocks, group)
        if not ids:
            return 0
        if not self._can_send(column, len(ids)):
            self.counters.stores_off += 1
            return 0
        incarnation = self._requests.for_store(self._requests.of(request))
        self.counters.stores += 1
        ticket = self._transfers.begin_store(request, ids)
        self._batch.add_store(Job(ticket, incarnation, request, group, column, ids))
        return ticket

    def written(self, blocks: Iterable[int]) -> frozenset[int]:
        """These blocks get new contents from this step on; the stores that lose by it.

        Each of them is revoked by the next directive, or withdrawn if its step was not sent yet.
        """
        blocks = [block for block in block_ids(blocks) if 0 <= block < self.settings.num_blocks]
        hit = self._meet(blocks)
        if len(self._fence):  # without an unended store there is nothing that the daemon could meet
            self._batch.write(blocks)
        return hit

    def storing(self, blocks: Iterable[int]) -> frozenset[int]:
        """Unended stores that read any of these blocks. A question: nothing changes."""
        return frozenset(self._fence.readers(block_ids(blocks)))

    def forget(self, request: str, now_ns: int) -> None:
        """Drop the request's lookup and lease without ending it."""
        check_request(request)
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
        check_request(request)
        record = self._requests.get(request)
        self._lookups.drop(request, release=not self.is_registered)
        if record is not None:
            self._tell_ended(record, Ended.PREEMPTED, now_ns)
        self._gather_released(now_ns)

    def cancel(self, ticket: int, now_ns: int) -> None:
        """Nobody wants this transfer any more. Unknown and ended tickets are harmless."""
        check_ticket(ticket)
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
        if not self.is_registered:
            batch.fail_loads()
        directive = batch.directive(self._steps)
        if self.is_registered:
            self._tell(batch)
        return directive

    def load_ended(self, ticket: int, ok: bool) -> None:
        """All ranks have given their word on this load."""
        check_ticket(ticket)
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
        self._transfers.end_by_ranks(ticket, ok, daemon_will_tell=self.is_registered)

    def poll(self) -> list[JobEnd]:
        """Tickets that ended since the last call."""
        return self._transfers.poll()

    def rotate(self, salt: bytes, now_ns: int) -> None:
        """Move this engine to the namespace of `salt`: nothing stored so far is found, nothing unended counts."""
        check_salt(salt)
        self._lookups.clear()
        for ticket in list(self._batch.stores):
            self._withdraw(ticket)
        self._revoke(self._fence.tickets())
        self._gather_released(now_ns)
        self._out += self.registration.rotate(salt)

    def describe(self) -> dict[str, Any]:
        """Gauges as plain values."""
        return {
            "state": self.state.value,
            "attached_ranks": self.registration.num_attached,
            "world_size": self.settings.world_size,
            "namespace": self.registration.namespace,
            "epoch": self._epoch,
            "slots": self.registration.slots,
            "requests": len(self._requests),
            "lookups": len(self._lookups),
            "leases": self._lookups.leases,
            "stores_open": len(self._fence),
            "loads_open": len(self._loading),
            "steps_unanswered": self._sent_steps - self._answered_steps,
        }

    # ---- messages ------------------------------------------------------------------------------------

    def _on_ranks(self, msg: Registered | RanksChanged) -> None:
        if self.registration.ranks(msg):
            self._lookups.restart(release=True)
        self._adopt(msg.epoch)
        self._close_gate()

    def _on_lookup_answer(self, msg: LookupAnswer, now_ns: int) -> None:
        if not self.is_registered:
            self.counters.stale += 1
            return
        if self._lookups.expects(msg.lookup):  # the epoch of one that comes again may be over
            self._adopt(msg.epoch)
        self._lookups.answer(msg, now_ns)

    def _on_step_answer(self, msg: StepAnswer, now_ns: int) -> None:
        if not self.is_registered or not self._answered_steps < msg.step <= self._sent_steps:
            self.counters.stale += 1
            return
        self._answered_steps = msg.step
        self._adopt(msg.epoch)
        self._transfers.answer(msg)

    # ---- deeds ---------------------------------------------------------------------------------------
    def _close_request(self, name: str, why: Ended, now_ns: int) -> None:
        check_request(name)
        self._lookups.drop(name, release=not self.is_registered)
        record = self._requests.pop(name)
        if record is not None:
            for ticket in list(record.loads):
                self.cancel(ticket, now_ns)
            self._tell_ended(record, why, now_ns)
        self._gather_released(now_ns)

    def _tell_ended(self, record: Request, why: Ended, now_ns: int) -> None:
        ended = self._requests.end_attempts(record)
        if self.is_registered and ended:
            self._batch.ends.update(dict.fromkeys(ended, why))
            if self._batch.since_ns < 0:
                self._batch.since_ns = now_ns

    def _gather_released(self, now_ns: int) -> None:
        released = self._lookups.released
        if released and self.is_registered:
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
        losers = self._transfers.losers(blocks)
        for ticket in losers:
            if ticket in self._batch.stores:
                self._withdraw(ticket)
        self._revoke(ticket for ticket in losers if ticket in self._fence)
        return frozenset(losers)

    def _revoke(self, tickets: Iterable[int]) -> None:
        self._batch.revoked.update(dict.fromkeys(self._transfers.revoke(tickets)))

    def _withdraw(self, ticket: int) -> None:
        self._batch.remove_store(ticket)
        self.counters.withdrawn += 1
        self._transfers.end_unaccepted(ticket)

    def _adopt(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch = self._lookups.epoch = epoch
            self._lookups.restart(release=True)

    def _close_gate(self) -> None:
        if self.attached:
            self._lookups.closed = None
        else:
            self._lookups.closed = Reason.RANKS_AWAY if self.is_registered else Reason.OFF

    def _can_send(self, keys: bytes, num_blocks: int) -> bool:
        return (
            self.attached
            and self._sent_steps - self._answered_steps < MAX_UNANSWERED_STEPS
            and self._batch.has_room(len(keys), num_blocks)
        )
