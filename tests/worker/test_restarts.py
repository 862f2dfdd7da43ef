"""The real worker process through the deaths and returns of its daemon, which the test plays."""

import random
import select
import time
from pathlib import Path

import numpy as np
import pytest

from kvferry.proto.columns import u64
from kvferry.proto.control import Attach, Attached, Drained, Goodbye, Hello, Refused, Welcome
from kvferry.proto.hot import Done, Plan
from kvferry.proto.outcome import Kind, Outcome
from kvferry.proto.tether import RankRegistered
from tests.worker.sidecar import WORKER_ID, FakeDaemon, FakeRank, Sidecar, wait_for
from tests.worker.test_process import transfer
from tests.worker.traffic import Traffic, bring_to_rest, hear_all

pytestmark = pytest.mark.process


@pytest.fixture
def rank(sidecar):
    """A rank that the sidecar's worker serves; slot 5 holds what its block 3 held."""
    sidecar.make_spare()
    made = FakeRank(sidecar.run_dir)
    sidecar.serve(made)
    made.stamp(3, seed=1)
    transfer(sidecar, made, 1, Kind.STORE, [3], [5])
    yield made
    made.close()


def said(daemon: FakeDaemon, seconds: float = 0.3) -> list:
    """All that the workers say within this time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        daemon.turn()
    return [message for _, message in daemon.inbox]


def come_back(sidecar: Sidecar) -> Attach:
    """The next boot, up to the seat of the worker that was there before."""
    sidecar.start_daemon()
    assert sidecar.daemon.greet().worker == WORKER_ID
    return sidecar.attach()


# ---- a serving worker ------------------------------------------------------------------------------


def test_a_rank_is_served_by_the_same_worker_after_a_restart_and_hears_nothing_of_it(sidecar, rank):
    """Rule 10: the pool's bytes, the mappings and the tether are there; only the plans' maker is another."""
    sidecar.lose_daemon()
    attach = come_back(sidecar)
    assert (attach.worker, attach.rank, attach.num_blocks) == (WORKER_ID, 0, 16)
    assert transfer(sidecar, rank, 2, Kind.LOAD, [9], [5]) == (Outcome.OK, [])
    assert np.array_equal(rank.kv[:, 9], rank.kv[:, 3])
    assert rank.hear() == []


def test_a_begun_load_is_answered_without_a_daemon_and_the_next_hears_drained_after_it(sidecar, rank):
    """Rule 10: a slot may be given away only when nobody who learnt of it from the old boot reads it any more."""
    sidecar.plan(2, Kind.LOAD, [9], [5])
    rank.begin(2, ahead=1)
    rank.begin(50, ahead=1)  # has no plan: answered at once when the daemon goes
    sidecar.daemon.settle()
    sidecar.lose_daemon()
    assert rank.word() == (50, Outcome.NOT_PLANNED)
    sidecar.start_daemon()
    sidecar.daemon.take(Hello)
    sidecar.daemon.send(Welcome(major=1, minor=1, boot=sidecar.daemon.boot, tp_size=1))
    assert said(sidecar.daemon) == []
    rank.page.signal()
    assert rank.word() == (2, Outcome.OK)
    assert np.array_equal(rank.kv[:, 9], rank.kv[:, 3])
    assert sidecar.daemon.take(Drained).boot == sidecar.daemon.boot
    sidecar.attach()
    # Nobody is told of the old boot's job.
    assert not [message for message in said(sidecar.daemon) if isinstance(message, Done)]


def test_a_begun_load_whose_mark_never_comes_holds_the_next_boot_up_for_two_seconds_at_most(sidecar, rank):
    sidecar.plan(2, Kind.LOAD, [9], [5])
    rank.begin(2, ahead=1)
    rank.begin(50, ahead=1)
    sidecar.daemon.settle()
    sidecar.lose_daemon()
    lost = time.monotonic()
    assert rank.word() == (50, Outcome.NOT_PLANNED)
    come_back(sidecar)
    assert time.monotonic() - lost < 4
    assert rank.word() == (2, Outcome.NOT_BEGUN)


def test_a_store_that_waits_is_dropped_with_its_daemon_and_its_slot_stays_as_it_was(sidecar, rank):
    sidecar.plan(2, Kind.STORE, [4], [5], generation=2)
    sidecar.plan(3, Kind.STORE, [4], [6])
    rank.begin(2, ahead=1)
    sidecar.daemon.settle()
    sidecar.lose_daemon()
    assert rank.word() == (2, Outcome.CANCELLED)
    rank.begin(3)
    assert rank.word() == (3, Outcome.NOT_BEGUN)
    come_back(sidecar)
    assert transfer(sidecar, rank, 4, Kind.LOAD, [9], [5]) == (Outcome.OK, [])


def test_a_begin_without_a_daemon_is_answered_at_once(sidecar, rank):
    """The engine recomputes now, and not when a bound has passed."""
    sidecar.lose_daemon()
    rank.begin(2)
    asked = time.monotonic()
    assert rank.word() == (2, Outcome.NOT_PLANNED)
    assert time.monotonic() - asked < 1
    come_back(sidecar)
    assert transfer(sidecar, rank, 3, Kind.LOAD, [9], [5]) == (Outcome.OK, [])


def test_what_an_old_boot_decided_says_nothing_about_the_tickets_of_the_next(sidecar, rank):
    sidecar.daemon.send(Plan(planned_to=1000))
    rank.begin(2)
    assert rank.word() == (2, Outcome.NOT_PLANNED)
    sidecar.lose_daemon()
    come_back(sidecar)
    rank.begin(3)
    sidecar.plan(3, Kind.LOAD, [9], [5])
    assert rank.word() == (3, Outcome.OK)


def test_a_begin_may_overtake_the_daemons_verdict(sidecar, rank):
    """Between the tether and the link there is no order: the client may know of our seat before we do."""
    sidecar.lose_daemon()
    sidecar.start_daemon()
    sidecar.daemon.greet()
    sidecar.daemon.take(Attach)
    rank.begin(2)
    time.sleep(0.05)
    sidecar.daemon.send(Attached(slots=8))
    sidecar.plan(2, Kind.LOAD, [9], [5])
    assert rank.word() == (2, Outcome.OK)


def test_plans_of_an_old_boot_are_refused_by_their_job_ids(sidecar, rank):
    """Rule 11: only the newest boot is obeyed, whoever hands its words on."""
    old_job = sidecar.job(7)
    sidecar.lose_daemon()
    come_back(sidecar)
    new_job, sidecar.job = sidecar.job, lambda ticket: old_job
    sidecar.plan(7, Kind.STORE, [4], [5], generation=2)
    sidecar.job = new_job
    rank.begin(7)
    sidecar.plan(8, Kind.LOAD, [9], [5])
    assert rank.word() == (7, Outcome.NOT_PLANNED)
    rank.begin(8)
    assert rank.word() == (8, Outcome.OK)
    assert u64(sidecar.daemon.take(Done).jobs).tolist() == [sidecar.job(8)]


def test_a_link_that_ends_while_its_daemon_lives_is_followed_by_another(sidecar, rank):
    sidecar.daemon.hang_up()
    assert sidecar.daemon.greet().worker == WORKER_ID
    sidecar.attach()
    assert transfer(sidecar, rank, 2, Kind.LOAD, [9], [5]) == (Outcome.OK, [])


def test_a_daemon_that_stood_still_for_longer_than_a_link_bears_finds_its_worker_on_another(sidecar, rank):
    """SIGSTOP of the daemon for six seconds: loads go on, and the worker says over the new link that all is over."""
    sidecar.plan(2, Kind.LOAD, [9], [5])
    sidecar.plan(3, Kind.LOAD, [10], [5])
    sidecar.daemon.settle()
    rank.begin(2)
    assert rank.word() == (2, Outcome.OK)
    stopped = time.monotonic()
    rank.socket.settimeout(15)
    rank.begin(3, ahead=1)
    assert rank.word() == (3, Outcome.NOT_BEGUN)  # two seconds after the link was given up
    assert 5 < time.monotonic() - stopped < 12
    assert sidecar.daemon.greet().worker == WORKER_ID
    # Said over the first link before it was given up; of the other load the daemon hears no more than `drained`.
    assert u64(sidecar.daemon.take(Done).jobs).tolist() == [sidecar.job(2)]
    sidecar.attach()
    assert transfer(sidecar, rank, 4, Kind.LOAD, [11], [5])[0] is Outcome.OK


@pytest.mark.parametrize("answer", ["refused", "larger"])
def test_a_rank_that_the_next_boot_does_not_seat_finds_another_worker(sidecar, rank, answer):
    """The tether ends, the process too: the rank has its proof and registers anew, where it hears the reason."""
    sidecar.lose_daemon()
    sidecar.start_daemon()
    sidecar.daemon.greet()
    if answer == "refused":
        sidecar.daemon.take(Attach)
        sidecar.daemon.send(Refused(code="layout.slot_bytes", text="8192 and 4096", fix="choose one"))
    else:
        sidecar.attach(slots=9)
    assert rank.at_end()
    sidecar.daemon.take(Goodbye)
    assert sidecar.wait_exit(2) == 0
    assert select.select([rank.worker_pidfd], [], [], 5)[0]


@pytest.mark.parametrize("who", ["rank", "supervisor"])
def test_a_worker_without_a_daemon_ends_with_its_rank_and_with_its_supervisor(sidecar, rank, who):
    """I7: the wait for a daemon has no end, the worker's life has."""
    sidecar.lose_daemon()
    time.sleep(0.3)
    assert sidecar.worker.poll() is None
    rank.socket.close() if who == "rank" else sidecar.control.close()
    assert sidecar.worker.wait(2) == 0
    sidecar.start_daemon()


# ---- a spare ---------------------------------------------------------------------------------------


def test_a_spare_outlives_its_daemon_and_serves_under_the_next(sidecar):
    sidecar.make_spare()
    sidecar.lose_daemon()
    sidecar.start_daemon()
    assert sidecar.daemon.greet().worker == WORKER_ID
    rank = FakeRank(sidecar.run_dir)
    assert sidecar.serve(rank).boot == sidecar.daemon.boot
    assert transfer(sidecar, rank, 1, Kind.STORE, [3], [5]) == (Outcome.OK, [])
    rank.close()


def test_a_rank_that_knocks_while_no_daemon_is_there_waits_at_the_door(sidecar):
    """It is neither refused nor does it use up the spare."""
    sidecar.make_spare()
    sidecar.lose_daemon()
    rank = FakeRank(sidecar.run_dir)
    rank.register()
    assert not select.select([rank.socket, sidecar.control], [], [], 0.5)[0]
    sidecar.start_daemon()
    sidecar.daemon.greet()
    sidecar.attach()
    assert rank.take(RankRegistered).boot == sidecar.daemon.boot
    rank.close()


def test_a_daemon_that_dies_while_a_rank_registers_is_replaced_under_it(sidecar):
    sidecar.make_spare()
    rank = FakeRank(sidecar.run_dir)
    rank.register()
    sidecar.daemon.take(Attach)
    sidecar.lose_daemon()
    come_back(sidecar)
    assert rank.take(RankRegistered).boot == sidecar.daemon.boot
    rank.close()


def test_a_worker_that_finds_no_daemon_at_its_start_waits_for_one(tmp_path):
    sidecar = Sidecar(tmp_path)
    sidecar.lose_daemon()
    assert not select.select([sidecar.control], [], [], 1)[0] and sidecar.worker.poll() is None
    sidecar.start_daemon()
    sidecar.make_spare()
    sidecar.close()


def test_a_spare_that_speaks_another_version_than_the_next_boot_ends(sidecar):
    sidecar.make_spare()
    sidecar.lose_daemon()
    sidecar.start_daemon()
    sidecar.daemon.take(Hello)
    sidecar.daemon.send(Refused(code="hello.version", text="1 and 2", fix="install the same kvferry"))
    assert sidecar.wait_exit(2) == 0


# ---- again and again -------------------------------------------------------------------------------

BIG_RUN = 256 << 10  # two layers: half a MiB a block, so that copies run when the daemon dies


@pytest.fixture
def two_ranks(tmp_path):
    """Workers of two ranks, each with an engine rank at work."""
    sidecar = Sidecar(tmp_path, pool_bytes=8 * (2 * BIG_RUN + 4096), num_ranks=2)
    traffic = []
    for _ in range(2):
        sidecar.daemon.greet()
    for number in range(2):
        sidecar.hear("ready", number)
        rank = FakeRank(sidecar.run_dir, num_blocks=12, num_layers=2, run=BIG_RUN, rank=number)
        sidecar.serve(rank, worker=number)
        traffic.append(Traffic(sidecar, rank, sidecar.daemon.link, num_slots=8, seed=number))
    yield sidecar, traffic
    for each in traffic:
        each.rank.close()
    sidecar.close()


def seat_again(sidecar: Sidecar, traffic: list[Traffic]) -> None:
    """The next boot seats both workers under their ids."""
    sidecar.start_daemon()
    for _ in traffic:
        sidecar.daemon.greet()
    for _ in traffic:
        attach = sidecar.attach()
        traffic[attach.rank].link = sidecar.daemon.link
        assert attach.worker == WORKER_ID + attach.rank


def test_ten_restarts_under_load_leave_no_ticket_without_its_word_and_no_byte_wrong(two_ranks):
    """Case 45: each time some jobs wait for their mark, some are queued, some copy: every one gets one word, at once or
    when its copy is over, and no new boot hears of an old one's jobs."""
    sidecar, traffic = two_ranks
    luck = random.Random(1)
    for _ in range(10):
        for _ in range(luck.randint(3, 12)):
            for each in traffic:
                each.begin_some()
            hear_all(sidecar.daemon, traffic)
        sidecar.lose_daemon()
        for each in traffic:
            each.daemon_is_gone()
            each.rank.page.signal()
        lost = time.monotonic()
        seat_again(sidecar, traffic)
        bring_to_rest(sidecar.daemon, traffic)
        assert time.monotonic() - lost < 5
    for each in traffic:
        assert each.loads_ok > 10 and each.ended[Outcome.CANCELLED] > 0
    assert [process.poll() for process in sidecar.processes] == [None, None]


def test_a_hundred_restarts_leave_no_descriptor_thread_or_memory_behind(sidecar, rank):
    def held() -> tuple[int, int, int]:
        proc = Path(f"/proc/{sidecar.worker.pid}")
        status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
        return len(list((proc / "fd").iterdir())), int(status["Threads"]), int(status["VmRSS"].split()[0])

    ticket = 1
    before = (0, 0, 0)
    for cycle in range(100):
        sidecar.lose_daemon()
        come_back(sidecar)
        ticket += 1
        assert transfer(sidecar, rank, ticket, Kind.LOAD, [9], [5]) == (Outcome.OK, [])
        if cycle == 9:
            before = held()
    # ZeroMQ closes a socket's descriptors in a thread of its own.
    wait_for(lambda: held()[0] <= before[0] + 1, "closed descriptors")
    _, threads, rss_kib = held()
    assert threads == before[1]
    assert rss_kib < before[2] + 4096
