"""The page through which a rank says its mark and its revokes: whoever exported it may let go of it at once."""

import os
import signal

import pytest

from kvferry.proto.columns import pack_u64
from kvferry.proto.hot import Done
from kvferry.proto.outcome import Kind, Outcome
from kvferry.proto.tether import Begin, RankRegistered
from tests.worker.sidecar import FakeRank
from tests.worker.test_process import transfer

pytestmark = pytest.mark.process


def test_a_rank_may_close_its_descriptors_as_soon_as_they_are_sent(sidecar):
    """Case 9: what was exported lives as long as its importer needs it."""
    sidecar.make_spare()
    rank = FakeRank(sidecar.run_dir)
    try:
        rank.register()
        for fd in (rank.kv_fd, rank.page_fd):
            os.close(fd)
        # Their numbers are others' from now on: `close` must not close those.
        rank.kv_fd = rank.page_fd = -1
        sidecar.attach()
        sidecar.hear("taken")
        rank.take(RankRegistered)
        pattern = rank.stamp(3, seed=3)
        assert transfer(sidecar, rank, 1, Kind.STORE, [3], [5]) == (Outcome.OK, [])
        assert transfer(sidecar, rank, 2, Kind.LOAD, [9], [5]) == (Outcome.OK, [])
        assert (rank.kv[:, 9] == pattern).all()
    finally:
        rank.close()


def test_a_rank_that_dies_before_its_mark_leaves_no_unordered_copy_and_no_crash(sidecar):
    """Case 9, case 1: the mark never came, so nothing was read, and the worker ends in order."""
    sidecar.make_spare()
    rank = FakeRank(sidecar.run_dir)
    sidecar.serve(rank)
    sidecar.plan(1, Kind.STORE, [3], [5])
    rank.send(Begin(mark=rank.page.mark() + 1, tickets=pack_u64([1])))
    sidecar.daemon.settle()
    rank.close()
    done = sidecar.daemon.take(Done)
    assert list(done.outcomes) == [Outcome.ENGINE_GONE]
    assert sidecar.wait_exit(2) == 0
    assert sidecar.worker.returncode != -signal.SIGBUS
