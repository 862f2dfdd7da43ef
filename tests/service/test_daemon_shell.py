"""The daemon's shell around a core that only writes down what it hears."""

import logging
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.net.channel import Channel
from kvferry.net.paths import RunDir
from kvferry.net.peer import Peer
from kvferry.proto.control import Goodbye, Hello, Refused, ResetAnswer, ResetAsk, StatusAnswer, StatusAsk, Welcome
from kvferry.proto.errors import LostError
from kvferry.proto.hot import Renew
from kvferry.proto.ids import LinkId, WorkerId
from kvferry.scheduler_daemon.core.api import (
    Action,
    AtRest,
    CloseLink,
    DrainBegun,
    Event,
    KeepEpochs,
    KillWorker,
    LinkLost,
    Note,
    Received,
    Send,
    TimePassed,
    WorkerReaped,
    WorkersListed,
)
from kvferry.scheduler_daemon.loop import Daemon


class Scribe:
    """A core that keeps its events and does what the test has laid out for them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.times: list[int] = []  # at which they came
        self.do: Callable[[Event], list[Action]] = lambda _event: []
        self.due: int | None = None

    def step(self, event: Event, now_ns: int) -> list[Action]:
        if event == WorkersListed(()):
            return []  # how every daemon begins: no test is about it
        self.events.append(event)
        self.times.append(now_ns)
        if isinstance(event, TimePassed):
            self.due = None
        return self.do(event)

    def next_due_ns(self) -> int | None:
        return self.due

    def status(self) -> dict[str, Any]:
        return {"boot": "b"}


class Slate:
    """A table file that only remembers which epochs it was given."""

    def __init__(self) -> None:
        self.epochs: list[tuple[tuple[bytes, int], ...]] = []
        self.boots = 3
        self.discarded = ""

    def keep_epochs(self, epochs: tuple[tuple[bytes, int], ...]) -> None:
        self.epochs.append(epochs)


class House:
    """A daemon in a thread, and the supervisor's end of its channel."""

    def __init__(self, path: Path, *, listed: bool = True, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.run_dir = RunDir.at(path)
        self.core = Scribe()
        self.control, theirs = Channel.pair()
        self.table = Slate()
        self.daemon = Daemon(self.run_dir, self.core, Channel(theirs), self.table, now_ns)
        if listed:
            self.control.send({"event": "workers", "workers": [], "daemon_restarts": 0, "workers_died": 0})
        self.thread = threading.Thread(target=self.daemon.run)
        self.thread.start()
        self.peers: list[Peer] = []

    def peer(self, *messages: Any) -> Peer:
        """A link that has said these messages."""
        one = Peer(self.run_dir, LinkId(secrets.randbits(63) | 1))
        self.peers.append(one)
        for message in messages:
            assert one.send(message)
        one.flush()
        return one

    def hear(self, *kinds: type[Event]) -> list[Event]:
        """Wait until the core has heard one event of each kind; those events, of these kinds."""
        wait_for(lambda: {type(event) for event in self.core.events} >= set(kinds))
        return [event for event in self.core.events if isinstance(event, kinds)]

    def close(self) -> None:
        for peer in self.peers:
            peer.close()
        self.control.send({"event": "stop"})
        self.thread.join(5)
        assert not self.thread.is_alive()
        self.control.close()


def wait_for(question: Callable[[], Any]) -> Any:
    end = time.monotonic() + 10
    while not (answer := question()):
        assert time.monotonic() < end
        time.sleep(0.002)
    return answer


@pytest.fixture
def house() -> Iterator[House]:
    with tempfile.TemporaryDirectory(prefix="kvf-", dir="/tmp") as path:
        one = House(Path(path))
        yield one
        one.close()


def heard(peer: Peer, kind: type[Any]) -> Any:
    """The first message of this kind that the peer receives."""
    got: list[Any] = []

    def look() -> bool:
        peer.tick()
        got.extend(message for message in peer.receive() if isinstance(message, kind))
        return bool(got)

    wait_for(look)
    return got[0]


def test_it_says_ready_and_both_sockets_are_private(house: House) -> None:
    assert wait_for(house.control.receive) == [{"event": "ready"}]
    for path in (house.run_dir.daemon, house.run_dir.tether):
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_message_reaches_the_core_and_its_answer_the_peer(house: House) -> None:
    def answer(event: Event) -> list[Action]:
        assert isinstance(event, Received)
        return [Send(event.link, Welcome(major=1, minor=0, boot=5, tp_size=1)), Note("a guest")]

    house.core.do = answer
    peer = house.peer(Hello(role="client"))
    assert heard(peer, Welcome).boot == 5
    house.core.do = lambda _event: []
    assert house.hear(Received) == [Received(peer.link.id, Hello(role="client"))]


def test_a_tethers_end_is_the_links_end_and_comes_after_the_last_words(house: House) -> None:
    peer = house.peer(Hello(role="client"), Renew(), Goodbye())
    house.hear(Received)
    wait_for(lambda: len(house.core.events) == 3)
    peer.close()
    house.hear(LinkLost)
    kinds = [type(event) for event in house.core.events]
    assert kinds == [Received, Received, Received, LinkLost]


def test_a_closed_link_hears_why_and_its_peer_knows_that_it_is_over(house: House) -> None:
    house.core.do = lambda event: (
        [Send(event.link, Refused(code="register.facts", text="t")), CloseLink(event.link)]
        if isinstance(event, Received)
        else []
    )
    peer = house.peer(Hello(role="client"))
    assert heard(peer, Refused).code == "register.facts"
    wait_for(lambda: peer.receive() or not peer.alive)
    assert not [event for event in house.core.events if isinstance(event, LinkLost)], "the core closed it itself"


def test_reaps_come_from_the_supervisor_and_kills_go_to_it(house: House) -> None:
    house.core.do = lambda event: [KillWorker(event.worker, "owes")] if isinstance(event, WorkerReaped) else []
    house.control.send({"event": "reaped", "worker": 42})
    house.control.send({"event": "something new"})
    assert house.hear(WorkerReaped) == [WorkerReaped(42)]
    wait_for(lambda: {"event": "kill", "worker": 42, "why": "owes"} in house.control.receive())


def test_time_passes_for_the_core_when_it_asked_for_it(house: House) -> None:
    house.core.due = time.monotonic_ns() + 20_000_000
    house.control.send({"event": "workers", "workers": []})
    house.hear(TimePassed)


def test_status_is_the_cores_and_the_shells(house: House) -> None:
    house.control.send(
        {"event": "workers", "workers": [{"worker": 255, "rank": 0, "pid": 7, "state": "spare", "engine": ""}]}
    )
    peer = house.peer(Hello(role="admin"), StatusAsk())
    status = heard(peer, StatusAnswer).status
    assert status["boot"] == "b"
    assert status["daemon_pid"] == os.getpid()
    assert status["uptime_s"] >= 0
    assert status["table"] == {"boots": 3, "discarded": ""}
    assert status["links"] == {"client": 0, "worker": 0, "admin": 1}
    assert status["workers"] in ([], [{"worker": f"{255:016x}", "rank": 0, "pid": 7, "state": "spare", "engine": ""}])


def test_a_note_of_a_loss_is_logged_as_a_warning(house: House, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("kvferry").propagate = True
    caplog.set_level(logging.INFO)
    house.core.do = lambda _event: [Note("a guest"), Note("keys were discarded", warn=True)]
    house.peer(Hello(role="client"))
    house.hear(Received)
    levels = {record.message: record.levelname for record in caplog.records}
    assert (levels["a guest"], levels["keys were discarded"]) == ("INFO", "WARNING")


def test_a_message_of_ours_that_breaks_the_protocol_ends_that_link_alone(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("kvferry").propagate = True
    bad = Renew(leases=b"123")  # no multiple of eight bytes
    other = house.peer(Hello(role="client"))
    house.hear(Received)
    house.core.do = lambda event: [Send(event.link, bad)] if isinstance(event, Received) else []  # type: ignore[arg-type]
    peer = house.peer(Hello(role="client"))
    assert house.hear(LinkLost)[-1] == LinkLost(peer.link.id)
    house.core.do = lambda _event: []
    other.send(Renew())
    other.flush()
    wait_for(lambda: Received(other.link.id, Renew()) in house.core.events)


def test_many_bad_frames_make_few_log_lines(house: House, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("kvferry").propagate = True
    caplog.set_level(logging.WARNING)
    for _ in range(50):
        peer = house.peer()
        peer._socket.send(b"garbage that is longer than a header")
    wait_for(lambda: house.daemon.status()["bad_messages"].get("frame.magic") == 50)
    lines = [record for record in caplog.records if "bad messages" in record.message]
    assert 1 <= len(lines) <= 3
    assert "frame.magic" in lines[0].message


def test_the_supervisors_end_is_the_daemons_end() -> None:
    with tempfile.TemporaryDirectory(prefix="kvf-", dir="/tmp") as path:
        one = House(Path(path))
        one.control.close()
        one.thread.join(5)
        assert not one.thread.is_alive()
        with pytest.raises(LostError, match="no daemon"):
            Peer(one.run_dir, LinkId(1))


def test_a_half_said_tether_hello_opens_nothing(house: House) -> None:
    with socket.socket(socket.AF_UNIX) as stream:
        stream.connect(str(house.run_dir.tether))
        stream.send(b"1234")
    peer = house.peer(Hello(role="client"))
    house.hear(Received)
    assert peer.alive


def test_who_outlived_the_last_daemon_is_known_before_anybody_can_speak() -> None:
    with tempfile.TemporaryDirectory(prefix="kvf-", dir="/tmp") as path:
        house = House(Path(path), listed=False)
        house.peer(Hello(role="worker"))
        listed = [{"worker": 7, "rank": 0, "pid": 1, "state": "taken", "engine": ""}]
        assert house.control.receive() == [], "not ready before it knows"
        house.control.send({"event": "workers", "workers": listed})
        house.control.send({"event": "workers", "workers": [*listed, {**listed[0], "worker": 8}]})
        house.hear(Received)
        assert house.core.events[0] == WorkersListed((WorkerId(7),))
        assert len(house.hear(WorkersListed)) == 1, "later lists are news for status alone"
        house.close()


def test_a_new_epoch_is_on_record_before_its_reset_is_answered(house: House) -> None:
    written_when_answered: list[int] = []

    def answer(event: Event) -> list[Action]:
        if not isinstance(event, Received) or not isinstance(event.message, ResetAsk):
            return []
        return [KeepEpochs(((bytes(16), 4),)), Send(event.link, ResetAnswer(epochs={"n": 4}, keys=1))]

    house.core.do = answer
    real_send = house.daemon._send

    def send(action: Send, now: int) -> list[Event]:
        written_when_answered.append(len(house.table.epochs))
        return real_send(action, now)

    house.daemon._send = send  # type: ignore[method-assign]
    peer = house.peer(Hello(role="admin"), ResetAsk(namespace="*"))
    assert heard(peer, ResetAnswer).epochs == {"n": 4}
    assert written_when_answered == [1]
    assert house.table.epochs == [((bytes(16), 4),)]


def test_a_drain_comes_from_the_supervisor_and_the_rest_is_told_to_it(house: House) -> None:
    house.core.do = lambda event: [AtRest()] if isinstance(event, DrainBegun) else []
    house.control.send({"event": "drain", "budget_ms": 1500})
    assert house.hear(DrainBegun) == [DrainBegun(1_500_000_000)]
    wait_for(lambda: {"event": "drained"} in house.control.receive())


# ---- a daemon that stood still ---------------------------------------------------------------------------


class Stops:
    """A clock that can be put on by hand: for its owner that is as if it had been stopped."""

    def __init__(self) -> None:
        self.skipped_ns = 0

    def __call__(self) -> int:
        return time.monotonic_ns() + self.skipped_ns


@pytest.mark.parametrize("moment", ["between two turns", "amid a turn"])
def test_time_in_which_the_daemon_was_stopped_does_not_pass(moment: str) -> None:
    """Deadlines, graces and links that have waited do not run out by our own standing still: what would have met them
    is in our sockets. Amid a turn a stop is the worst: what is said in it is said under an old time."""
    clock = Stops()
    minute = 60_000_000_000
    with tempfile.TemporaryDirectory(prefix="kvf-", dir="/tmp") as path:
        house = House(Path(path), now_ns=clock)

        def answer(event: Event) -> list[Action]:
            if isinstance(event, Received) and isinstance(event.message, Hello):
                clock.skipped_ns += minute if moment == "amid a turn" else 0
                return [Send(event.link, Welcome(major=1, minor=0, boot=5, tp_size=1))]
            return []

        house.core.do = answer
        peer = house.peer(Hello(role="client"))
        assert heard(peer, Welcome)
        if moment == "between two turns":
            clock.skipped_ns += minute
        for number in range(3):
            assert peer.send(Renew())
            peer.flush()
            wait_for(lambda number=number: len(house.core.events) == 2 + number)
        assert house.core.times[-1] - house.core.times[0] < minute // 2
        assert not [event for event in house.core.events if isinstance(event, LinkLost)]
        assert house.daemon.status()["stood_still_s"] > 50
        house.close()


def test_a_peer_that_is_given_up_is_told_so_if_it_lives(house: House) -> None:
    """Nobody reads our messages for too long: that link is over, and whoever does live opens the next at once."""
    house.core.do = lambda event: (
        [Send(event.link, Welcome(major=1, minor=0, boot=5, tp_size=1))] if isinstance(event, Received) else []
    )
    peer = house.peer(Hello(role="client"))
    house.hear(Received)
    house.daemon._switchboard.open[peer.link.id].link.lost = True
    wait_for(lambda: peer.receive() or not peer.alive)
    assert peer.refusal is None
    assert house.hear(LinkLost) == [LinkLost(peer.link.id)]
