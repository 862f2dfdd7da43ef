"""What the worker's core does about a cancel, by the daemon or by the rank, in each state of a ticket."""

import pytest

from kvferry.proto.outcome import Outcome
from tests.worker.fakes import BLOCK_BYTES, LOAD, STORE, WAITING, Bench, begun, copying, paired, planned, ready


@pytest.mark.parametrize("state", [planned, paired, ready])
def test_a_cancel_by_the_daemon_ends_what_does_not_copy_at_once(bench, state):
    state(bench)
    bench.cancel_jobs(101)
    assert (101, Outcome.CANCELLED) in bench.dones
    words = [word for word in bench.words if word[0] == 1]
    assert words == ([] if state is planned else [(1, LOAD, Outcome.CANCELLED, (4, 5))])
    bench.run_dry()
    assert bench.core.at_rest()


@pytest.mark.parametrize("state", WAITING)
def test_a_cancel_by_the_rank_ends_what_does_not_copy_with_one_word(bench, state):
    state(bench)
    bench.cancel_tickets(1)
    bench.cancel_tickets(1)
    (word,) = [word for word in bench.words if word[0] == 1]
    assert word[:3] == (1, LOAD, Outcome.CANCELLED)
    assert ((101, Outcome.CANCELLED) in bench.dones) is (state is not begun)
    bench.run_dry()
    assert bench.core.at_rest()


@pytest.mark.parametrize("by_rank", [True, False])
def test_a_cancelled_copy_is_over_only_when_its_running_batches_are(by_rank):
    bench = Bench(batch_bytes=BLOCK_BYTES)
    bench.headers.hold(range(8), 1)
    bench.plan(1, LOAD, range(8))
    bench.begin(1)
    bench.cancel_tickets(1) if by_rank else bench.cancel_jobs(101)
    assert bench.words == bench.dones == [] and not bench.core.at_rest()
    bench.copied()
    assert bench.words == [] and len(bench.running) == 1
    bench.copied()
    assert bench.running == []
    assert bench.words == [(1, LOAD, Outcome.CANCELLED, tuple(range(8)))]
    assert bench.dones == [(101, Outcome.CANCELLED)]


def test_a_cancelled_store_leaves_its_slot_torn(bench):
    bench.plan(1, STORE, [4])
    bench.begin(1)
    bench.cancel_jobs(101)
    bench.run_dry()
    assert bench.headers.log == ["open"]


def test_a_cancel_of_an_unseen_ticket_refuses_its_later_plan(bench):
    bench.cancel_tickets(7)
    assert bench.words == [(7, LOAD, Outcome.CANCELLED, ())]
    bench.plan(7, STORE, [4])
    bench.plan(7, STORE, [4])
    bench.begin(7)
    assert bench.dones == [(107, Outcome.CANCELLED)]
    assert len(bench.words) == 1 and bench.running == []


def test_a_late_or_unknown_cancel_is_counted_and_changes_nothing(bench):
    bench.headers.hold([4, 5], 1)
    copying(bench)
    bench.run_dry()
    bench.cancel_jobs(101, 999)
    bench.cancel_tickets(1)
    assert len(bench.words) == len(bench.dones) == 1
    assert bench.core.counters["late_cancels"] == 3
