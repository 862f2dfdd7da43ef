"""The worker's link to whichever daemon runs now, over links that the test plays."""

import time

import pytest

from kvferry.gpu_worker import daemon_link
from kvferry.gpu_worker.daemon_link import DaemonLink, LinkLost
from kvferry.proto.control import Attached, Drained, Goodbye, Hello, RankGone, Refused, Welcome
from kvferry.proto.errors import LostError
from tests.worker.fakes import FakePeer

WELCOME = Welcome(major=1, minor=1, boot=7, tp_size=1)


class World:
    """Daemons that come and go; every link that was ever made to one."""

    def __init__(self) -> None:
        self.is_there = True
        self.peers: list[FakePeer] = []
        self.link = DaemonLink(self._connect)

    def _connect(self) -> FakePeer:
        if not self.is_there:
            raise LostError("daemon.lost", "nobody listens")
        assert not any(peer.alive for peer in self.peers), "two links at once"
        self.peers.append(FakePeer())
        return self.peers[-1]

    @property
    def peer(self) -> FakePeer:
        return self.peers[-1]

    def open(self) -> None:
        self.link.receive()
        self.peer.inbox.append(WELCOME)
        assert self.link.receive() == [WELCOME] and self.link.is_open

    def receive_after_retry(self) -> list:
        due = self.link.next_due_s()
        assert due - time.monotonic() <= daemon_link.RETRY_S
        time.sleep(max(due - time.monotonic(), 0))
        return self.link.receive()


@pytest.fixture
def world():
    made = World()
    yield made
    for peer in made.peers:
        peer.close()


def test_each_link_begins_with_a_hello_and_is_open_from_its_welcome_on(world):
    assert world.link.receive() == [] and not world.link.is_open
    (hello,) = world.peer.sent
    assert isinstance(hello, Hello) and hello.role == "worker"
    world.link.send(Drained(worker=1, boot=7))  # nobody is there yet who could take it
    assert world.peer.sent == [hello]
    world.open()
    world.link.send(Drained(worker=1, boot=7))
    assert world.peer.sent[1:] == [Drained(worker=1, boot=7)]


def test_without_a_daemon_it_tries_ten_times_a_second_for_ever(world):
    world.is_there = False
    for _ in range(5):
        assert world.receive_after_retry() == [] and world.link.filenos == ()
    assert world.link.receive() == [] and world.peers == []
    world.is_there = True
    world.receive_after_retry()
    assert len(world.peers) == 1


def test_a_link_that_ends_is_told_behind_its_last_words_and_followed_by_another(world):
    world.open()
    world.peer.inbox.append(Attached(slots=8))
    world.peer.dies_after_inbox = True
    attached, lost = world.link.receive()
    assert attached == Attached(slots=8) and isinstance(lost, LinkLost)
    assert not world.link.is_open and world.link.filenos == ()
    assert world.receive_after_retry() == []
    assert len(world.peers) == 2
    world.open()


def test_a_link_that_ends_before_it_was_open_is_not_told_of(world):
    world.link.receive()
    world.peer.close()
    assert world.link.has_news()
    assert world.link.receive() == []


def test_a_daemon_that_is_reached_and_says_nothing_is_tried_over_another_link(world, monkeypatch):
    """It was stopped when it was greeted, or lost the hello: its silence has a bound."""
    monkeypatch.setattr(daemon_link, "GREET_S", 0.05)
    world.link.receive()
    time.sleep(0.06)
    assert world.link.next_due_s() <= time.monotonic()
    assert world.link.receive() == []
    assert not world.peer.alive
    world.receive_after_retry()
    assert len(world.peers) == 2


@pytest.mark.parametrize("way", ["message", "close"])
def test_a_refusal_of_our_version_is_told(world, way):
    refused = Refused(code="hello.version", text="1 and 2")
    world.link.receive()
    if way == "message":
        world.peer.inbox.append(refused)
    else:
        world.peer.refusal = refused
        world.peer.close()
    assert world.link.receive() == [refused]


def test_a_daemon_that_does_not_know_the_link_is_greeted_over_another(world):
    """It came between our connection and our hello."""
    world.link.receive()
    world.peer.refusal = Refused(code="frame.link", text="unknown")
    world.peer.close()
    assert world.link.receive() == []
    world.receive_after_retry()
    assert len(world.peers) == 2


def test_a_daemon_that_does_not_read_loses_the_link(world):
    """Bytes in flight towards it are bounded by the link's window, also while it is stopped."""
    world.open()
    world.peer.is_full = True
    world.link.send(Drained(worker=1, boot=7))
    assert world.link.filenos == () and world.link.has_news()
    (lost,) = world.link.receive()
    assert isinstance(lost, LinkLost) and "window" in lost.why


@pytest.mark.parametrize(("serves", "last"), [(True, RankGone), (False, Goodbye)])
def test_the_end_is_said_and_waited_for_no_longer_than_half_a_second(world, serves, last):
    world.open()
    world.peer.in_flight = 1
    began = time.monotonic()
    world.link.close(serves=serves)
    assert time.monotonic() - began < 2 * daemon_link.GOODBYE_S
    assert isinstance(world.peer.sent[-1], last) and not world.peer.alive
