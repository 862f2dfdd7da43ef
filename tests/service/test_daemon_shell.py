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

import numpy as np
import pytest

from kvferry.net.channel import Channel
from kvferry.net.paths import RunDir
from kvferry.net.peer import Peer
from kvferry.proto.control import Goodbye, Hello, Refused, StatusAnswer, StatusAsk, Welcome
from kvferry.proto.errors import ConfigError, LostError
from kvferry.proto.hot import Renew
from kvferry.proto.ids import LinkId
from kvferry.scheduler_daemon.core.api import (
    Action,
    CloseLink,
    Event,
    KillWorker,
    LinkLost,
    Note,
    Received,
    Send,
    TimePassed,
    WorkerReaped,
)
from kvferry.scheduler_daemon.loop import Daemon
from kvferry.scheduler_daemon.table import TableFile


class Scribe:
    """A core that keeps its events and does what the test has laid out for them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.do: Callable[[Event], list[Action]] = lambda _event: []
        self.due: int | None = None

    def step(self, event: Event, now_ns: int) -> list[Action]:
        self.events.append(event)
        if isinstance(event, TimePassed):
            self.due = None
        return self.do(event)

    def next_due_ns(self) -> int | None:
        return self.due

    def status(self) -> dict[str, Any]:
        return {"boot": "b"}


class House:
    """A daemon in a thread, and the supervisor's end of its channel."""

    def __init__(self, path: Path) -> None:
        self.run_dir = RunDir.at(path)
        self.core = Scribe()
        self.control, theirs = Channel.pair()
        self.daemon = Daemon(self.run_dir, self.core, Channel(theirs))
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
    assert status["links"] == {"client": 0, "worker": 0, "admin": 1}
    assert status["workers"] in ([], [{"worker": f"{255:016x}", "rank": 0, "pid": 7, "state": "spare", "engine": ""}])


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


RECORD = np.dtype([("state", "u1"), ("pad", "V7"), ("generation", "<u8")])


def test_the_table_is_zeroed_held_by_one_and_survives_being_made_again(tmp_path: Path) -> None:
    file = TableFile(tmp_path / "table")
    first = file.make(100, RECORD)
    first["generation"] = 7
    second = file.make(50, RECORD)
    assert second.shape == (50,)
    assert not second["generation"].any()
    assert first.shape == (100,), "a view that somebody still holds stays readable"
    first["generation"].sum()
    with pytest.raises(ConfigError, match=r"table\.locked"):
        TableFile(tmp_path / "table")
    file.close()
    TableFile(tmp_path / "table").close()
