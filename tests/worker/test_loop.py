"""The serving loop in this process: slow, stuck and failing devices, which a real process cannot be asked for."""

import socket
import threading
from collections import deque

import numpy as np
import pytest

from kvferry.gpu_worker import loop
from kvferry.gpu_worker.api import Copied, SubmitCopy, WorkerSettings
from kvferry.gpu_worker.copies import Copies
from kvferry.gpu_worker.core import WorkerCore
from kvferry.gpu_worker.daemon_link import DaemonLink
from kvferry.gpu_worker.layout import Planner
from kvferry.gpu_worker.rank_link import RankTether
from kvferry.net.channel import Channel
from kvferry.proto.codec import unpack
from kvferry.proto.columns import pack_u64, u8, u32, u64
from kvferry.proto.control import Attach, RankGone, Welcome
from kvferry.proto.limits import PAGE_BYTES
from kvferry.proto.outcome import Kind, Outcome
from kvferry.proto.page import PageReader, PageWriter
from kvferry.proto.tether import Begin, Deframer, Words, frame
from tests.contracts.conftest import CpuLab, address
from tests.worker.fakes import Bench, FakePeer, Headers
from tests.worker.layouts import RECORDED

NUM_SLOTS = 8
ATTACH = Attach(
    worker=1, engine_id="e", rank=0, world_size=1, layout_digest="", payload_bytes=(1,), block_tokens=(1,),
    num_blocks=1, pool_bytes=1,
)  # fmt: skip


class Stand:
    """A service around a lab's device; the rank's end of its tether, and time that the loop spends by itself."""

    def __init__(self, lab: CpuLab) -> None:
        self.lab = lab
        layout = RECORDED[0]
        group = layout.group()
        self.engine = lab.engine(layout.nbytes)
        self.mapping = lab.device.attach(self.engine.handle, self.engine.fd)
        pool = lab.host(NUM_SLOTS * group.slot_bytes)
        self.planner = Planner(group, [self.mapping.base], address(pool), group.slot_bytes, NUM_SLOTS)
        page = memoryview(bytearray(PAGE_BYTES))
        self.page = PageWriter(page)
        self.headers = Headers(NUM_SLOTS)
        settings = WorkerSettings((group.payload_bytes,), layout.sizes[1], NUM_SLOTS)
        self.peer = FakePeer()
        self.peer.inbox.append(Welcome(major=1, minor=1, boot=0, tp_size=1))
        daemon = DaemonLink(lambda: self.peer)
        assert isinstance(daemon.receive()[0], Welcome)
        self.control, theirs = Channel.pair()
        self.child_control = Channel(theirs)
        self.rank, ours = socket.socketpair(socket.AF_UNIX)
        self.tether = RankTether(ours)
        self.service = loop.Service(
            daemon,
            self.child_control,
            lab.device,
            self.tether,
            WorkerCore(settings, PageReader(page), self.headers),
            Copies(lab.device, [self.planner]),
            attach=ATTACH,
            slots=NUM_SLOTS,
            inbox=deque(),
        )

    def close(self) -> None:
        for end in (self.control, self.child_control, self.rank, self.tether):
            end.close()

    def plan(self, ticket: int, kind: Kind, blocks: list[int]) -> None:
        bench = Bench()  # borrowed for its way of making plans
        taken = []
        bench.step = taken.append
        bench.plan(ticket, kind, blocks)
        self.peer.inbox.append(taken[0].message)

    def begin(self, *tickets: int) -> None:
        self.rank.sendall(frame(Begin(mark=self.page.signal(), tickets=pack_u64(tickets))))

    def words(self) -> list[tuple[int, Outcome, list[int]]]:
        """All that the rank has been told up to the end of the tether."""
        deframer, rows = Deframer(), []
        while data := self.rank.recv(1 << 16):
            for body in deframer.feed(data):
                words = unpack(body)
                assert isinstance(words, Words)
                (count,) = u32(words.failed_counts).tolist()
                assert count == len(u32(words.failed_blocks))
                rows.append(
                    (
                        int(u64(words.tickets)[0]),
                        Outcome(int(u8(words.outcomes)[0])),
                        u32(words.failed_blocks).tolist(),
                    )
                )
        return rows


@pytest.fixture
def stand(lab, monkeypatch):
    monkeypatch.setattr(loop, "DRAIN_S", 0.2)
    monkeypatch.setattr(loop, "LEAVE_S", 0.2)
    made = Stand(lab)
    yield made
    made.close()


def test_a_stuck_copy_makes_the_worker_exit_by_its_bound_and_say_so(stand):
    """Nothing is reported of the stuck job: only the process's death is the proof that it is over."""
    stand.lab.stall()
    stand.plan(1, Kind.STORE, [1])
    stand.begin(1)
    stand.rank.shutdown(socket.SHUT_WR)
    assert stand.service.run() == loop.EXIT_STUCK
    assert stand.peer.dones() == []
    assert isinstance(stand.peer.sent[-1], RankGone)


def test_a_slow_copy_is_drained_before_the_worker_exits(stand):
    stand.lab.knobs.bytes_per_s = 20_000  # 960 bytes in 48 ms
    stand.plan(1, Kind.STORE, [1])
    stand.begin(1)
    stand.rank.shutdown(socket.SHUT_WR)
    assert stand.service.run() == 0
    assert stand.peer.dones() == [(101, Outcome.ENGINE_GONE)]
    assert stand.headers.log == ["open"]


def test_a_failed_copy_is_told_with_its_blocks_and_the_worker_goes_on(stand):
    """Case 26, case 89: one rank's failure is that job's failure."""
    stand.lab.knobs.fail_after = 0
    stand.headers.hold([2, 3], 1)
    stand.plan(1, Kind.LOAD, [2, 3])
    stand.begin(1)
    stand.control.send({"event": "stop"})
    assert stand.service.run() == 0
    assert stand.words() == [(1, Outcome.COPY_FAILED, [2, 3])]


def test_a_stop_lets_a_running_load_end_well(stand):
    stand.lab.knobs.bytes_per_s = 20_000
    stand.headers.hold([2], 1)
    stand.plan(1, Kind.LOAD, [2])
    stand.begin(1)
    stand.control.send({"event": "stop"})
    assert stand.service.run() == 0
    assert stand.words() == [(1, Outcome.OK, [])]
    assert not stand.engine.view[RECORDED[0].block_bytes(2)].any()


def test_a_mark_that_moves_without_any_message_is_seen(stand):
    stand.headers.hold([2], 1)
    stand.plan(1, Kind.LOAD, [2])
    stand.rank.sendall(frame(Begin(mark=1, tickets=pack_u64([1]))))
    service = threading.Thread(target=stand.service.run)
    service.start()
    stand.page.signal()
    stand.rank.settimeout(10)
    (size,) = np.frombuffer(stand.rank.recv(4), dtype="<u4")
    assert u8(unpack(stand.rank.recv(int(size))).outcomes).tolist() == [Outcome.OK]
    stand.rank.shutdown(socket.SHUT_WR)
    service.join(10)
    assert not service.is_alive()


def test_a_copy_that_the_device_refuses_ends_at_once_though_nothing_else_wakes_the_worker(stand, caplog):
    """Not by its job's deadline: no descriptor tells of what the device never had."""
    stand.lab.device.detach(stand.mapping)
    stand.headers.hold([2, 3], 1)
    stand.plan(1, Kind.LOAD, [2, 3])
    stand.begin(1)
    service = threading.Thread(target=stand.service.run)
    service.start()
    stand.rank.settimeout(10)
    (size,) = np.frombuffer(stand.rank.recv(4), dtype="<u4")
    word = unpack(stand.rank.recv(int(size)))
    assert u8(word.outcomes).tolist() == [Outcome.COPY_FAILED] and u32(word.failed_blocks).tolist() == [2, 3]
    assert "plan.address" in caplog.text
    stand.rank.shutdown(socket.SHUT_WR)
    service.join(10)
    assert not service.is_alive()
    assert stand.peer.dones() == [(101, Outcome.COPY_FAILED)]


def test_a_bug_in_a_plan_is_a_failed_batch_and_touches_nothing(stand):
    copies = Copies(stand.lab.device, [stand.planner])
    outside = np.array([NUM_SLOTS], dtype=np.uint32)
    copies.submit(SubmitCopy(5, Kind.STORE, 0, slots=outside, blocks=np.zeros(1, dtype=np.uint32)))
    assert copies.ended() == [Copied(5, False)]
    assert copies.ended() == []
