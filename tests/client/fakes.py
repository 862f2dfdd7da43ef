"""What stands in for the daemon and for time in the client's tests: answers are said one by one, by hand."""

from collections.abc import Sequence
from typing import Any, TypeVar

from kvferry.client.core import ClientCore, ClientSettings
from kvferry.proto.codec import pack, unpack
from kvferry.proto.columns import pack_u8, pack_u32, pack_u64, u8, u32, u64
from kvferry.proto.control import Hello, Refused, Register, Registered, Welcome
from kvferry.proto.hot import JobsEnded, Lookup, LookupAnswer, Renew, Step, StepAnswer
from kvferry.proto.ids import JobId
from kvferry.proto.outcome import Next, Outcome, Reason

M = TypeVar("M")
MS = 1_000_000
KEY_BYTES = 8


def key(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "big")


def chain(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


class Scene:
    """One ClientCore and a daemon played by the test. Time stands still unless `later` moves it."""

    def __init__(self, *, world_size: int = 1, num_blocks: int = 100, attach: bool = True) -> None:
        self.now_ns = 1_000 * MS
        self.core = ClientCore(
            ClientSettings("engine", world_size, KEY_BYTES, num_blocks, 16, facts={"model": "m"}, salt=b"s")
        )
        self.sent: list[Any] = []
        if attach:
            self.attach()

    def attach(self, *, epoch: int = 1, namespace: str = "space", attached: int | None = None) -> None:
        """The whole handshake, with all ranks there."""
        self.core.attach(self.now_ns)
        self.take(Hello)
        self.say(Welcome(major=1, minor=0, boot=7, tp_size=1))
        self.take(Register)
        ranks = self.core.settings.world_size if attached is None else attached
        self.say(Registered(incarnation=9, namespace=namespace, epoch=epoch, attached=ranks, slots=64))

    def later(self, ms: float) -> "Scene":
        self.now_ns += int(ms * MS)
        return self

    def say(self, message: Any) -> None:
        """The daemon says; over the wire's form, so that nothing is said that could not travel."""
        self.core.on_message(unpack(pack(message)), self.now_ns)

    def take(self, kind: type[M]) -> M:
        """The one message that the client has to say now."""
        messages = self.outgoing()
        assert len(messages) == 1 and isinstance(messages[0], kind), messages
        return messages[0]

    def outgoing(self) -> list[Any]:
        return [unpack(pack(message)) for message in self.core.outgoing()]

    # ---- shorthands ----------------------------------------------------------------------------------

    def ask(self, request: str, numbers: Sequence[int]) -> Lookup:
        self.core.lookup(request, chain(*numbers), self.now_ns)
        return self.take(Lookup)

    def answer(
        self,
        lookup: Lookup,
        hits: int,
        following: Next = Next.END,
        *,
        lease: int = 0,
        lease_ms: int = 9000,
        retry_ms: int = 0,
        reason: Reason = Reason.NONE,
        epoch: int = 1,
    ) -> None:
        self.say(LookupAnswer(lookup.lookup, hits, int(following), lease, lease_ms, retry_ms, int(reason), epoch))

    def leased(self, request: str, numbers: Sequence[int], lease: int = 77) -> None:
        """A lookup of these keys that hits them all."""
        self.answer(self.ask(request, numbers), len(numbers), lease=lease)

    def store(self, request: str, numbers: Sequence[int], blocks: Sequence[int]) -> int:
        return self.core.store(request, chain(*numbers), blocks, self.now_ns)

    def load(self, request: str, numbers: Sequence[int], blocks: Sequence[int]) -> int:
        return self.core.load(request, chain(*numbers), blocks, self.now_ns)

    def end_step(self) -> tuple[Any, Step | None]:
        """(directive, what was told to the daemon)."""
        directive = self.core.end_step(self.now_ns)
        steps = [message for message in self.outgoing() if isinstance(message, Step)]
        assert len(steps) <= 1
        return directive, steps[0] if steps else None

    def accept(self, step: Step, *, reason: Reason = Reason.NONE, accepted: int | None = None) -> None:
        """Answer every ticket of a step with a job, or with a refusal if there is a reason and nothing accepted."""
        tickets = [*u64(step.store_tickets).tolist(), *u64(step.load_tickets).tolist()]
        counts = [*u32(step.store_counts).tolist(), *u32(step.load_counts).tolist()]
        said = counts if accepted is None else [accepted] * len(counts)
        jobs = [0 if reason and not accepted else 1000 + ticket for ticket in tickets]
        reasons = pack_u8([reason] * len(tickets))
        self.say(StepAnswer(step.step, 1, pack_u64(tickets), pack_u64(jobs), pack_u32(said), reasons))

    def ended(self, *tickets: int, outcome: Outcome = Outcome.OK) -> None:
        jobs = [JobId(1000 + ticket) for ticket in tickets]
        self.say(JobsEnded(pack_u64(tickets), pack_u64(jobs), pack_u8([outcome] * len(tickets))))

    def running_store(self, request: str, numbers: Sequence[int], blocks: Sequence[int]) -> int:
        """A store that was accepted and has not ended."""
        ticket = self.store(request, numbers, blocks)
        _, step = self.end_step()
        assert step is not None
        self.accept(step)
        return ticket

    def renewals(self) -> list[int]:
        """Leases renewed by a tick now."""
        self.core.tick(self.now_ns)
        return [lease for msg in self.outgoing() if isinstance(msg, Renew) for lease in u64(msg.leases).tolist()]


def numbers_of(column: bytes, width: int = 8) -> list[int]:
    """The numbers in a column."""
    return {1: u8, 4: u32, 8: u64}[width](column).tolist()


def refused(code: str = "register.world_size") -> Refused:
    return Refused(code=code, text="2 against 4", fix="start kvferry with --tp-size 4")
