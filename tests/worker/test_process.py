"""The real worker process against a daemon, a supervisor and a rank that the test plays."""

import contextlib
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from kvferry.proto.columns import pack_u64, u8, u32, u64
from kvferry.proto.control import Attach, Attached, Refused
from kvferry.proto.hot import Cancel, Done
from kvferry.proto.outcome import Kind, Outcome
from kvferry.proto.tether import Begin, Detach, Words
from tests.worker.sidecar import FakeRank, RankGone

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[2]


@pytest.fixture
def connect(sidecar):
    """Connects ranks to a ready worker, and closes them at the end."""
    sidecar.make_spare()
    with contextlib.ExitStack() as stack:

        def make() -> FakeRank:
            rank = FakeRank(sidecar.run_dir)
            stack.callback(rank.close)
            return rank

        yield make


@pytest.fixture
def served(sidecar, connect):
    """A sidecar whose worker serves a rank."""
    rank = connect()
    registered = sidecar.serve(rank)
    assert registered.pid == sidecar.worker.pid
    return sidecar, rank


def transfer(sidecar, rank, ticket, kind, blocks, slots, generation=1):
    """Plan and begin one job; its outcome at the rank and at the daemon, and the failed blocks."""
    sidecar.plan(ticket, kind, blocks, slots, generation)
    rank.send(Begin(mark=rank.page.signal(), tickets=pack_u64([ticket])))
    words, done = rank.take(Words), sidecar.daemon.take(Done)
    assert u64(words.tickets).tolist() == [ticket]
    assert u64(done.jobs).tolist() == [sidecar.job(ticket)]
    assert u8(done.outcomes).tolist() == u8(words.outcomes).tolist()
    return Outcome(int(u8(words.outcomes)[0])), u32(words.failed_blocks).tolist()


def test_blocks_stored_and_loaded_into_others_have_the_same_bytes(served):
    sidecar, rank = served
    patterns = [rank.stamp(block, seed=block) for block in (3, 1, 7)]
    assert transfer(sidecar, rank, 1, Kind.STORE, [3, 1, 7], [5, 0, 2]) == (Outcome.OK, [])
    assert transfer(sidecar, rank, 2, Kind.LOAD, [9, 10, 11], [5, 0, 2]) == (Outcome.OK, [])
    for block, pattern in zip((9, 10, 11), patterns, strict=True):
        assert np.array_equal(rank.kv[:, block], pattern)


def test_a_load_of_a_slot_that_was_never_stored_fails_and_the_worker_lives(served):
    """Case 26: a failed read is a result; the worker's pid stays."""
    sidecar, rank = served
    rank.stamp(3, seed=1)
    transfer(sidecar, rank, 1, Kind.STORE, [3], [5])
    assert transfer(sidecar, rank, 2, Kind.LOAD, [8, 9], [5, 6]) == (Outcome.TORN, [9])
    assert sidecar.worker.poll() is None
    assert transfer(sidecar, rank, 3, Kind.LOAD, [8], [5]) == (Outcome.OK, [])


def test_many_jobs_at_once_move_exactly_the_bytes_that_they_name(served):
    """A dumb twin in numpy holds what each slot and block must hold; jobs overlap in time, never in place."""
    sidecar, rank = served
    random = np.random.default_rng(5)
    rank.kv[:] = random.integers(0, 256, rank.kv.shape, dtype=np.uint8)
    slots: dict[int, np.ndarray] = {}
    generations = dict.fromkeys(range(8), 0)
    ticket = 0
    for _ in range(30):
        places = random.permutation(8).tolist()
        blocks = random.permutation(16).tolist()
        expected, begun = {}, []
        while places:
            ticket += 1
            count = int(random.integers(1, 4))
            mine, places = places[:count], places[count:]
            theirs = [blocks.pop() for _ in mine]
            if random.random() < 0.5:
                for slot, block in zip(mine, theirs, strict=True):
                    generations[slot] = ticket
                    slots[slot] = rank.kv[:, block].copy()
                sidecar.plan(ticket, Kind.STORE, theirs, mine, generation=ticket)
                expected[ticket] = Outcome.OK
            else:
                # A load's plan names one generation here: slots of another are torn for it.
                generation = generations[mine[0]]
                sidecar.plan(ticket, Kind.LOAD, theirs, mine, generation=generation)
                whole = generation > 0 and all(generations[slot] == generation for slot in mine)
                expected[ticket] = Outcome.OK if whole else Outcome.TORN
                for slot, block in zip(mine, theirs, strict=True):
                    if generations[slot] == generation > 0:
                        expected[block, "bytes"] = slots[slot]
            begun.append(ticket)
        rank.send(Begin(mark=rank.page.signal(), tickets=pack_u64(begun)))
        ended = {}
        while len(ended) < len(begun):
            words = rank.take(Words)
            ended |= dict(zip(u64(words.tickets).tolist(), u8(words.outcomes).tolist(), strict=True))
        assert ended == {number: outcome for number, outcome in expected.items() if isinstance(number, int)}
        for place, wanted in expected.items():
            if isinstance(place, tuple):
                assert np.array_equal(rank.kv[:, place[0]], wanted)


def test_two_engines_share_a_pool_file_and_one_of_them_dies_alone(sidecar, connect):
    """Case 87, and case 83: each worker reports for itself; the other's bytes, jobs and process stay."""
    first = connect()
    sidecar.serve(first)
    first_link = sidecar.daemon.link
    sidecar.spawn()
    sidecar.make_spare(worker=1)
    second = connect()
    sidecar.serve(second, worker=1)
    second_link = sidecar.daemon.link

    sidecar.daemon.link = first_link
    pattern = first.stamp(3, seed=3)
    assert transfer(sidecar, first, 1, Kind.STORE, [3], [6]) == (Outcome.OK, [])
    sidecar.plan(2, Kind.STORE, [4], [7])
    sidecar.processes[0].send_signal(signal.SIGSTOP)
    first.send(Begin(mark=first.page.signal(), tickets=pack_u64([2])))
    sidecar.processes[0].send_signal(signal.SIGKILL)
    first.socket.close()

    sidecar.daemon.link = second_link
    assert transfer(sidecar, second, 1, Kind.LOAD, [9], [6]) == (Outcome.OK, [])
    assert np.array_equal(second.kv[:, 9], pattern)
    assert sidecar.processes[1].poll() is None


def test_the_end_of_the_tether_makes_the_worker_report_and_exit(served):
    sidecar, rank = served
    rank.socket.close()
    sidecar.daemon.take(RankGone)
    assert sidecar.wait_exit(2) == 0


def test_a_detach_ends_politely(served):
    sidecar, rank = served
    rank.send(Detach())
    assert rank.at_end()
    sidecar.daemon.take(RankGone)
    assert sidecar.wait_exit(2) == 0


def test_what_was_planned_and_never_begun_is_reported_when_the_rank_goes(served):
    sidecar, rank = served
    sidecar.plan(4, Kind.LOAD, [1], [1])
    rank.send(Begin(mark=rank.page.mark() + 1, tickets=pack_u64([4])))
    rank.socket.close()
    done = sidecar.daemon.take(Done)
    assert u8(done.outcomes).tolist() == [Outcome.ENGINE_GONE]
    assert sidecar.wait_exit(2) == 0


def test_a_killed_rank_process_takes_its_worker_with_it(sidecar, tmp_path):
    """Also when a child of the engine still holds the tether open: the pidfd tells."""
    sidecar.make_spare()
    engine = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(f"""
            import os, sys, time
            from kvferry.net.paths import RunDir
            from tests.worker.sidecar import FakeRank
            rank = FakeRank(RunDir.at({str(tmp_path)!r}))
            rank.register()
            os.set_inheritable(rank.socket.fileno(), True)
            if os.fork() == 0:
                os.setsid(); time.sleep(4); os._exit(0)
            time.sleep(30)
            """),
        ],
        cwd=ROOT,
    )
    sidecar.daemon.take(Attach)
    sidecar.daemon.send(Attached(slots=8))
    sidecar.hear("taken")
    engine.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    engine.wait()
    assert sidecar.wait_exit(2) == 0
    assert time.monotonic() - killed < 2


def test_a_stop_ends_a_spare_and_a_serving_worker(served):
    sidecar, rank = served
    sidecar.control.send({"event": "stop"})
    assert sidecar.wait_exit(2) == 0
    assert rank.at_end()


def test_a_spare_ends_with_its_supervisor(sidecar):
    sidecar.make_spare()
    sidecar.control.close()
    assert sidecar.wait_exit(2) == 0


def test_the_rank_holds_a_proof_of_its_workers_death(served):
    sidecar, rank = served
    assert select.select([rank.worker_pidfd], [], [], 0)[0] == []
    sidecar.worker.kill()
    assert select.select([rank.worker_pidfd], [], [], 5)[0] == [rank.worker_pidfd]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"rank": 3}, "register.rank"),
        ({"major": 9}, "frame.version"),
        ({"probes": [{"handle": 0, "offset": 0, "expect": b"not these bytes"}]}, "layout.probe"),
    ],
)
def test_a_rank_that_cannot_be_served_is_refused_by_name(sidecar, connect, changes, code):
    rank = connect()
    rank.register(**changes)
    refused = rank.take(Refused)
    assert refused.code == code
    assert rank.at_end()
    sidecar.hear("taken")
    assert sidecar.wait_exit(2) == 0


def test_a_rank_that_the_daemon_refuses_hears_its_words(sidecar, connect):
    rank = connect()
    rank.register()
    sidecar.daemon.take(Attach)
    sidecar.daemon.send(Refused(code="layout.slot_bytes", text="8192 and 4096", fix="choose one"))
    refused = rank.take(Refused)
    assert (refused.code, refused.text, refused.fix) == ("layout.slot_bytes", "8192 and 4096", "choose one")
    assert sidecar.wait_exit(2) == 0


def test_a_missing_descriptor_is_refused(sidecar, connect):
    rank = connect()
    rank.register(fds=[rank.kv_fd])
    assert rank.take(Refused).code == "message.fields"


def test_a_connection_that_says_nothing_leaves_the_spare_a_spare(sidecar, connect):
    for _ in range(3):
        connect().close()
    rank = connect()
    rank.socket.sendall(b"\x03\x00\x00\x00abc")
    assert rank.take(Refused).code == "message.malformed"
    rank = connect()
    assert sidecar.serve(rank).slots == 8


def test_a_rank_that_says_nonsense_loses_its_tether_and_nothing_else(served):
    sidecar, rank = served
    rank.send(Cancel(jobs=b""))
    assert rank.take(Refused).code == "message.unexpected"
    sidecar.daemon.take(RankGone)
    assert sidecar.wait_exit(2) == 0


def test_a_worker_on_the_cpu_and_the_daemon_import_neither_torch_nor_cuda():
    heavy = ["torch", "cuda", "kvferry.cuda", "kvferry.client"]
    end = f"print([n for n in {heavy} if n in sys.modules], any('.cuda' in n for n in sys.modules))"
    worker = "import sys, kvferry.gpu_worker.__main__; from kvferry.gpu_worker.devices import open_device; "
    worker += "open_device('cpu'); "
    for code in (worker, "import sys, kvferry.scheduler_daemon.__main__; ", "import sys, kvferry.supervise.shell; "):
        said = subprocess.run([sys.executable, "-c", code + end], capture_output=True, text=True)
        assert said.stdout.strip() == "[] False", (code, said)
