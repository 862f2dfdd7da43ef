"""The real worker process when a copy hangs and when it is stopped itself: silence, and the proof of its death."""

import select
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from kvferry.gpu_worker.loop import EXIT_STUCK
from kvferry.proto.columns import pack_u64, u8
from kvferry.proto.control import Drained, Hello, Welcome
from kvferry.proto.hot import Cancel, Done
from kvferry.proto.outcome import Kind, Outcome
from kvferry.proto.tether import CancelTickets
from tests.worker.sidecar import WORKER_ID, FakeRank, Sidecar, wait_for
from tests.worker.test_process import transfer
from tests.worker.test_restarts import said

pytestmark = pytest.mark.process


@pytest.fixture
def sidecar(tmp_path):
    made = Sidecar(tmp_path, module="tests.worker.odd_worker")
    made.ranks = []
    yield made
    for rank in made.ranks:
        rank.close()
    made.close()


@pytest.fixture
def rank(sidecar):
    """A rank that is served; slots 5 and 6 hold what its block 3 held."""
    sidecar.make_spare()
    made = FakeRank(sidecar.run_dir)
    sidecar.serve(made)
    made.stamp(3, seed=1)
    transfer(sidecar, made, 1, Kind.STORE, [3, 3], [5, 6])
    yield made
    made.close()


def is_asleep(pid: int) -> bool:
    """Whether it stands, stopped, in the process table."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


def stall(sidecar: Sidecar, rank: FakeRank) -> None:
    """From now on a load (ticket 2, into block 9) and a store (ticket 3, of block 4 to slot 7) hang."""
    sidecar.worker.send_signal(signal.SIGUSR1)
    wait_for((sidecar.run_dir.path / "stalled").exists, "stall")
    sidecar.plan(2, Kind.LOAD, [9], [5])
    sidecar.plan(3, Kind.STORE, [4], [7])
    rank.begin(2, 3)
    rank.begin(50)  # is answered at once: then the others have been begun
    sidecar.plan(50, Kind.LOAD, [], [])
    assert rank.word() == (50, Outcome.OK)
    sidecar.daemon.take(Done)


def take_over(sidecar: Sidecar) -> FakeRank:
    """The engine's rank, attached again to a fresh worker."""
    sidecar.spawn(WORKER_ID + 1)
    sidecar.make_spare(worker=1)
    rank = FakeRank(sidecar.run_dir)
    sidecar.ranks.append(rank)
    sidecar.serve(rank, worker=1)
    return rank


def test_nothing_is_said_of_a_copy_that_hangs_until_its_process_is_dead(sidecar, rank):
    """I5, rule 1: cancels change nothing; the kill is the proof, and the rank holds it."""
    stall(sidecar, rank)
    sidecar.daemon.send(Cancel(jobs=pack_u64([sidecar.job(2), sidecar.job(3)])))
    rank.send(CancelTickets(tickets=pack_u64([2, 3])))
    assert said(sidecar.daemon, 0.7) == [] and rank.hear() == []
    assert select.select([rank.worker_pidfd], [], [], 0)[0] == []
    sidecar.worker.kill()
    assert select.select([rank.worker_pidfd], [], [], 2)[0]
    assert rank.at_end()
    again = take_over(sidecar)
    assert transfer(sidecar, again, 4, Kind.LOAD, [9, 10], [5, 7]) == (Outcome.TORN, [10])


def test_a_cancelled_copy_that_goes_on_after_all_closes_its_count(sidecar, rank):
    """Case 24: both sides hear of it once, when its last byte is over."""
    stall(sidecar, rank)
    sidecar.daemon.send(Cancel(jobs=pack_u64([sidecar.job(2), sidecar.job(3)])))
    sidecar.daemon.settle()
    sidecar.worker.send_signal(signal.SIGUSR2)
    assert sorted([rank.word(), rank.word()]) == [(2, Outcome.CANCELLED), (3, Outcome.CANCELLED)]
    outcomes = []
    while len(outcomes) < 2:
        outcomes += u8(sidecar.daemon.take(Done).outcomes).tolist()
    assert outcomes == [Outcome.CANCELLED] * 2
    assert transfer(sidecar, rank, 51, Kind.LOAD, [9, 10], [5, 7]) == (Outcome.TORN, [10])


def test_a_cancel_ends_what_is_queued_behind_a_copy_that_hangs_at_once(sidecar, rank):
    stall(sidecar, rank)
    for ticket in (51, 52, 53):
        sidecar.plan(ticket, Kind.LOAD, [8], [5])
    rank.begin(51, 52, 53)
    sidecar.daemon.settle()
    sidecar.daemon.send(Cancel(jobs=pack_u64([sidecar.job(53)])))
    assert rank.word() == (53, Outcome.CANCELLED)
    assert u8(sidecar.daemon.take(Done).outcomes).tolist() == [Outcome.CANCELLED]
    sidecar.worker.send_signal(signal.SIGUSR2)
    ended = dict(rank.word() for _ in range(4))
    assert ended == {2: Outcome.OK, 3: Outcome.OK, 51: Outcome.OK, 52: Outcome.OK}


def test_a_worker_whose_copy_hangs_never_says_drained_to_the_next_boot(sidecar, rank):
    """Rule 10: only its word or its reap lets the next boot give slots away."""
    stall(sidecar, rank)
    sidecar.lose_daemon()
    sidecar.start_daemon()
    sidecar.daemon.take(Hello)
    sidecar.daemon.send(Welcome(major=1, minor=1, boot=sidecar.daemon.boot, tp_size=1))
    assert said(sidecar.daemon, 0.7) == []
    sidecar.worker.send_signal(signal.SIGUSR2)
    assert sorted([rank.word(), rank.word()]) == [(2, Outcome.OK), (3, Outcome.CANCELLED)]
    sidecar.daemon.take(Drained)
    sidecar.attach()
    assert transfer(sidecar, rank, 51, Kind.LOAD, [9, 10], [5, 7]) == (Outcome.TORN, [10])


@pytest.mark.parametrize("who", ["rank", "supervisor"])
def test_a_worker_whose_copy_hangs_ends_itself_when_nobody_needs_it(sidecar, rank, who):
    """I7: its drain has a bound; its exit code says that it was not orderly."""
    stall(sidecar, rank)
    began = time.monotonic()
    rank.socket.close() if who == "rank" else sidecar.control.close()
    assert sidecar.wait_exit(3) == EXIT_STUCK
    assert time.monotonic() - began < 2.5
    assert not [message for _, message in sidecar.daemon.inbox if isinstance(message, Done)]


# ---- stopped ---------------------------------------------------------------------------------------


def test_a_worker_that_was_stopped_for_a_moment_goes_on_as_if_nothing_was(sidecar, rank):
    sidecar.worker.send_signal(signal.SIGSTOP)
    wait_for(lambda: is_asleep(sidecar.worker.pid), "stop")
    sidecar.plan(2, Kind.LOAD, [9], [5])
    rank.begin(2)
    assert said(sidecar.daemon, 0.7) == []
    sidecar.worker.send_signal(signal.SIGCONT)
    assert rank.word() == (2, Outcome.OK)
    assert np.array_equal(rank.kv[:, 9], rank.kv[:, 3])


def test_a_stopped_worker_dies_of_the_kill_and_what_it_was_storing_is_torn(sidecar, rank):
    """The grace is over: SIGKILL needs no SIGCONT, and the rank's proof comes with it."""
    stall(sidecar, rank)
    sidecar.worker.send_signal(signal.SIGSTOP)
    wait_for(lambda: is_asleep(sidecar.worker.pid), "stop")
    sidecar.worker.kill()
    assert select.select([rank.worker_pidfd], [], [], 2)[0]
    assert sidecar.worker.wait(2) == -signal.SIGKILL
    again = take_over(sidecar)
    assert transfer(sidecar, again, 4, Kind.LOAD, [9, 10], [5, 7]) == (Outcome.TORN, [10])


def test_a_worker_that_wakes_after_it_was_replaced_publishes_nothing(sidecar, rank):
    """Stopped in the middle of a store; its daemon gave its link up, its rank went on with another worker.

    Whether it closes the slot's header depends on what it sees first; only its `done` could publish it.
    """
    stall(sidecar, rank)
    sidecar.worker.send_signal(signal.SIGSTOP)
    wait_for(lambda: is_asleep(sidecar.worker.pid), "stop")
    sidecar.daemon.hang_up()
    rank.socket.close()
    again = take_over(sidecar)
    pattern = again.stamp(2, seed=9)
    assert transfer(sidecar, again, 4, Kind.STORE, [2], [0]) == (Outcome.OK, [])
    sidecar.worker.send_signal(signal.SIGUSR2)
    sidecar.worker.send_signal(signal.SIGCONT)
    assert sidecar.wait_exit(3) == 0
    assert not [message for _, message in sidecar.daemon.inbox if isinstance(message, Done)]
    link = sidecar.daemon.link
    assert transfer(sidecar, again, 5, Kind.LOAD, [9, 10], [0, 5]) == (Outcome.OK, [])
    assert link == sidecar.daemon.link and np.array_equal(again.kv[:, 9], pattern)


def test_a_worker_that_wakes_under_another_boot_drains_before_it_serves(sidecar, rank):
    """Its store was of a boot that nobody remembers: it is dropped, whatever the copy came to."""
    stall(sidecar, rank)
    sidecar.worker.send_signal(signal.SIGSTOP)
    wait_for(lambda: is_asleep(sidecar.worker.pid), "stop")
    sidecar.lose_daemon()
    sidecar.start_daemon()
    assert said(sidecar.daemon) == []
    sidecar.worker.send_signal(signal.SIGUSR2)
    sidecar.worker.send_signal(signal.SIGCONT)
    assert sidecar.daemon.greet().worker == WORKER_ID
    sidecar.attach()
    ended = dict([rank.word(), rank.word()])
    # The copies may have ended before the worker saw that its daemon was gone: a store's OK is then its own affair.
    assert ended[2] is Outcome.OK and ended[3] in (Outcome.OK, Outcome.CANCELLED)
    assert not [message for _, message in sidecar.daemon.inbox if isinstance(message, Done)]
