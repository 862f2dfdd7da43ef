"""The door of a rank's socket: who registers is let in, whoever is silent keeps nobody waiting for long."""

import os
import select
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvferry.gpu_worker.door import MOST_WAITING, REGISTER_S, SILENT_S, Door
from kvferry.gpu_worker.rank_link import RankTether
from kvferry.proto.codec import unpack
from kvferry.proto.control import Goodbye, Refused
from kvferry.proto.layout import Group, Handle, Layout, Region
from kvferry.proto.tether import Deframer, RankRegister, frame

LAYOUT = Layout(
    handles=(Handle(kind="shm_fd", nbytes=4096),),
    groups=(Group(regions=(Region(handle=0, offset=0, stride=4096, run=4096, blocks=1),), block_tokens=16),),
)
REGISTER = RankRegister(engine_id="e", rank=0, world_size=1, layout=LAYOUT, pid=os.getpid())


class House:
    """A door, its clock, and those who knock."""

    def __init__(self, path: Path) -> None:
        self.now_s = 100.0
        self.path = str(path / "rank.sock")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.path)
        listener.listen(512)
        self.door = Door(listener, 0, lambda: self.now_s)
        self.knocked: list[socket.socket] = []

    def knock(self, said: bytes = b"") -> socket.socket:
        one = socket.socket(socket.AF_UNIX)
        one.connect(self.path)
        one.sendall(said)
        self.knocked.append(one)
        return one

    def live(self, until: Callable[[tuple[RankTether, RankRegister] | None], bool], accepts: bool = True) -> None:
        """Look as its owner does: when something came, else when it is due. The clock goes by what is due."""
        for _ in range(10_000):
            if until(self.door.look(accepts=accepts)):
                return
            ready = select.select(self.door.filenos(accepts=accepts), [], [], 0)[0]
            if not ready:
                due = self.door.next_due_s()
                assert due is not None and due > self.now_s, "asleep for ever, or awake for nothing"
                self.now_s = due
        raise AssertionError("it looks again and again")


@pytest.fixture
def house() -> Iterator[House]:
    with tempfile.TemporaryDirectory(prefix="kvf-", dir="/tmp") as path:
        one = House(Path(path))
        yield one
        one.door.close()
        for sock in one.knocked:
            sock.close()


def is_let_in(found: tuple[RankTether, RankRegister] | None) -> bool:
    if found is not None:
        found[0].close()
        assert found[1] == REGISTER
    return found is not None


def test_a_rank_that_registers_is_let_in_at_once(house: House) -> None:
    house.knock(frame(REGISTER))
    house.live(is_let_in)
    assert house.now_s == 100.0


def test_a_hundred_that_say_nothing_keep_a_rank_out_for_two_seconds_together_and_not_each(house: House) -> None:
    for _ in range(100):
        house.knock()
    house.knock(frame(REGISTER))
    house.live(is_let_in)
    assert house.now_s - 100.0 <= 101 * SILENT_S


def test_a_rank_that_is_a_little_late_is_let_in_though_others_were_asked_in_beside_it(house: House) -> None:
    late = house.knock()
    house.knock()
    house.live(lambda _: len(house.door.filenos(accepts=False)) == 2)
    late.sendall(frame(REGISTER))
    house.live(is_let_in)


def test_nobody_is_asked_in_beside_one_who_speaks_at_once(house: House) -> None:
    """Who was asked in is lost to the other spare."""
    house.knock(frame(REGISTER)[:10])
    second = house.knock(frame(REGISTER))
    assert house.door.look(accepts=True) is None
    assert house.door.look(accepts=True) is None
    house.knocked[0].sendall(frame(REGISTER)[10:])
    house.live(is_let_in)
    house.door.close()
    with pytest.raises(ConnectionError):  # it was never accepted: the listener that is shared in earnest has it still
        second.sendall(b"x")


def test_silence_and_garbage_are_refused_by_name(house: House) -> None:
    silent, rude = house.knock(), house.knock(frame(Goodbye()))
    house.live(lambda _: house.now_s >= 100.0 + REGISTER_S)
    for sock, word in ((silent, "no rank.register within"), (rude, "begins with rank.register")):
        house.door.look(accepts=True)
        [body] = Deframer().feed(sock.recv(65536))
        refused = unpack(body)
        assert isinstance(refused, Refused) and word in refused.text


def test_without_a_daemon_nobody_is_asked_in(house: House) -> None:
    house.knock(frame(REGISTER))
    assert house.door.look(accepts=False) is None
    assert house.door.filenos(accepts=False) == [] and house.door.next_due_s() is None
    house.live(is_let_in)


def test_the_waiting_room_is_bounded_and_empties_by_time(house: House) -> None:
    for _ in range(MOST_WAITING * 2):
        house.knock()
    house.knock(frame(REGISTER))
    most = 0

    def look(found: tuple[RankTether, RankRegister] | None) -> bool:
        nonlocal most
        most = max(most, len(house.door.filenos(accepts=False)))
        return is_let_in(found)

    house.live(look)
    assert most <= MOST_WAITING
    assert house.now_s - 100.0 < 3 * REGISTER_S + 2 * MOST_WAITING * SILENT_S


def test_a_closed_door_turns_those_away_who_wait(house: House) -> None:
    waits = house.knock()
    house.door.look(accepts=True)
    house.door.close()
    house.door.close()
    assert waits.recv(100) == b""
    assert house.door.filenos(accepts=True) == [] and house.door.next_due_s() is None


def test_who_knocks_badly_in_a_loop_costs_a_line_a_second(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the daemon folds bad messages: a log is no place to fill a disk from."""
    lines: list[str] = []
    monkeypatch.setattr("kvferry.gpu_worker.door.log.warning", lambda text, *values: lines.append(text % values))
    for _ in range(50):
        house.knock(frame(Goodbye()))
        house.live(lambda _: not house.door.filenos(accepts=False) and house.door.look(accepts=True) is None)
    assert len(lines) == 1 and "begins with rank.register" in lines[0]
    due = house.door.next_due_s()
    assert due is not None and due <= house.now_s + 1
    house.now_s = due
    house.door.look(accepts=True)
    assert lines[1:] == ["49 bad connections to rank 0, the last: " + lines[0]]
    assert house.door.next_due_s() is None
    house.knock(frame(Goodbye()))
    house.door.look(accepts=True)
    house.door.look(accepts=True)
    house.door.close()
    assert len(lines) == 3, "none is lost with the door"
