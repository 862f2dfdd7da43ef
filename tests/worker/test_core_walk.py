"""Random walks of the core against what must hold for any order of events."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.gpu_worker.api import DaemonFound, DaemonLost, RankLost
from kvferry.proto.outcome import Kind, Outcome
from tests.worker.fakes import BLOCK_BYTES, LOAD, STORE, Bench

NUM_TICKETS = 8

tickets = st.integers(1, NUM_TICKETS)
events = st.lists(
    st.one_of(
        st.tuples(st.just("plan"), tickets),
        st.tuples(st.just("plan"), tickets),
        st.tuples(st.just("begin"), tickets),
        st.tuples(st.just("begin"), tickets),
        st.tuples(st.just("begin early"), tickets),
        st.tuples(st.just("signal"), st.just(0)),
        st.tuples(st.just("copied"), st.booleans()),
        st.tuples(st.just("copied"), st.just(True)),
        st.tuples(st.just("copied"), st.just(True)),
        st.tuples(st.just("revoke"), tickets),
        st.tuples(st.just("cancel job"), tickets),
        st.tuples(st.just("cancel ticket"), tickets),
        st.tuples(st.just("tear"), st.integers(0, 3 * NUM_TICKETS)),
        st.tuples(st.just("time"), st.sampled_from([1000, 250_000, 3_000_000_000])),
    ),
    max_size=60,
)
LAST = {"none": None, "rank lost": RankLost(), "daemon lost": DaemonLost()}


class Walk:
    """A bench and what the walk has asked of it. Ticket t owns blocks and slots 3t .. 3t + 2."""

    def __init__(self, kinds: list[Kind]) -> None:
        self.bench = Bench(batch_bytes=2 * BLOCK_BYTES, num_blocks=64, num_slots=64)
        self.bench.headers.hold(range(64), 1)
        self.kinds = kinds
        self.planned: set[int] = set()
        self.named: set[int] = set()  # tickets that the rank has named
        self.marks: dict[int, int] = {}
        self.revoked_unfinished: set[int] = set()
        self.torn: set[int] = set()

    def take(self, name: str, value: int) -> None:
        bench = self.bench
        match name:
            case "plan":
                self.planned.add(value)
                bench.plan(value, self.kinds[value - 1], range(3 * value, 3 * value + 3), planned_to=0)
            case "begin" | "begin early":
                self.named.add(value)
                mark = bench.engine.mark() + 1 if name == "begin early" else bench.engine.signal()
                self.marks.setdefault(value, mark)
                bench.begin(value, mark=mark)
            case "signal":
                bench.engine.signal()
                bench.pass_time()
            case "copied":
                if bench.running:
                    bench.copied(bool(value))
            case "revoke":
                if value not in {word[0] for word in bench.words}:
                    self.revoked_unfinished.add(value)
                bench.engine.revoke([value])
            case "cancel job":
                bench.cancel_jobs(100 + value)
            case "cancel ticket":
                self.named.add(value)
                bench.cancel_tickets(value)
            case "tear":
                self.torn.add(value)
                bench.headers.gen_open[value] = 99
            case "time":
                bench.pass_time(value)

    def check(self) -> None:
        bench = self.bench
        for batch in bench.running:
            owners = set((batch.blocks // 3).tolist())
            assert len(owners) == 1 and (batch.blocks == batch.slots).all()
            assert self.marks[owners.pop()] <= bench.engine.mark()
        assert max(Counter(word[0] for word in bench.words).values(), default=0) <= 1
        assert max(Counter(job for job, _ in bench.dones).values(), default=0) <= 1
        for kind in Kind:
            running = [batch for batch in bench.running if batch.kind is kind]
            described = bench.core.describe()
            assert len(running) == described["batches_in_flight"][kind.name.lower()] <= 2
            nbytes = sum(len(batch.blocks) for batch in running) * BLOCK_BYTES
            assert nbytes == described["bytes_in_flight"][kind.name.lower()]
        # What is told as over has nothing at the device.
        over = {word[0] for word in bench.words} | {job - 100 for job, _ in bench.dones}
        assert not over & {int(batch.blocks[0]) // 3 for batch in bench.running}

    def settle(self) -> None:
        """Let everything run out: copies end, bounds pass."""
        for _ in range(3):
            self.bench.run_dry()
            self.bench.pass_time(11_000_000_000)
        self.bench.run_dry()


@given(events, st.lists(st.sampled_from(Kind), min_size=NUM_TICKETS, max_size=NUM_TICKETS), st.sampled_from(list(LAST)))
@settings(max_examples=300, deadline=None)
def test_every_named_ticket_gets_one_word_and_every_planned_job_one_done(walk_events, kinds, last):
    """I4, I5, I6, and case 20: all gauges are back at zero whatever came in whatever order."""
    walk = Walk(kinds)
    for name, value in walk_events:
        walk.take(name, value)
        walk.check()
    if LAST[last] is not None:
        words_before = len(walk.bench.words)
        walk.bench.step(LAST[last])
        walk.check()
        if last == "rank lost":
            assert len(walk.bench.words) == words_before
    walk.settle()
    walk.check()

    bench = walk.bench
    assert bench.core.at_rest() and bench.core.next_due_ns(bench.now_ns) is None
    words = {word[0]: word for word in bench.words}
    dones = {job - 100: outcome for job, outcome in bench.dones}
    if last != "rank lost":
        assert set(words) == walk.named
    if last != "daemon lost":
        assert set(dones) == walk.planned
    for ticket, outcome in dones.items():
        if outcome is Outcome.OK:
            assert kinds[ticket - 1] is LOAD or ticket not in walk.revoked_unfinished
            assert ticket in walk.marks
            assert words.get(ticket, (0, 0, Outcome.OK))[2] is Outcome.OK
    for ticket, kind, outcome, failed in words.values():
        if outcome is Outcome.OK:
            assert failed == ()
        elif outcome is Outcome.TORN:
            assert set(failed) <= walk.torn and failed
        elif kind is STORE:
            assert failed == ()
        else:
            assert set(failed) <= set(range(3 * ticket, 3 * ticket + 3))


OF_TICKETS = {"plan", "begin", "begin early", "revoke", "cancel job", "cancel ticket"}


@given(events, events, st.lists(st.sampled_from(Kind), min_size=2 * NUM_TICKETS, max_size=2 * NUM_TICKETS))
@settings(max_examples=200, deadline=None)
def test_every_named_ticket_gets_one_word_across_a_restart_and_the_new_boot_hears_of_its_own_jobs_alone(
    before, after, kinds
):
    """I4, I5, rule 10: in any order of events, also when what was begun under the old boot is still copying."""
    walk = Walk(kinds)
    for name, value in before:
        walk.take(name, value)
    dones_of_the_old = {job for job, _ in walk.bench.dones}
    walk.bench.step(DaemonLost())
    walk.check()
    walk.bench.step(DaemonFound(boot=0))
    for name, value in after:
        walk.take(name, value + NUM_TICKETS if name in OF_TICKETS else value)
        walk.check()
    walk.settle()
    walk.check()
    assert walk.bench.core.at_rest()
    assert {word[0] for word in walk.bench.words} == walk.named
    told = {job - 100 for job, _ in walk.bench.dones if job not in dones_of_the_old}
    assert told == {ticket for ticket in walk.planned if ticket > NUM_TICKETS}
