"""The control channel: packets whole and in order, never a wait, and an end that is seen."""

import os
import re
from pathlib import Path

from kvferry.net.channel import Channel


def linked() -> tuple[Channel, Channel]:
    ours, theirs = Channel.pair()
    return ours, Channel(theirs)


def test_events_come_whole_and_in_order_both_ways() -> None:
    one, two = linked()
    for number in range(3):
        one.send({"event": "reaped", "worker": (1 << 64) - 1 - number})
    two.send({"event": "ready"})
    assert [event["worker"] for event in two.receive()] == [(1 << 64) - 1 - number for number in range(3)]
    assert one.receive() == [{"event": "ready"}]
    assert one.receive() == []
    one.close()
    two.close()


def test_the_other_sides_end_is_seen_after_its_last_words() -> None:
    one, two = linked()
    two.send({"event": "taken", "engine": "e"})
    two.close()
    assert one.receive() == [{"event": "taken", "engine": "e"}]
    assert one.ended
    one.send({"event": "stop"})
    assert not one.pending
    one.close()


def test_the_last_words_of_a_side_that_ended_without_reading_ours_are_received() -> None:
    one, two = linked()
    one.send({"event": "ping"})
    two.send({"event": "pong"})
    two.send({"event": "failed", "why": "no room"})
    two.close()
    assert one.receive() == [{"event": "pong"}, {"event": "failed", "why": "no room"}]
    assert one.ended
    one.close()


def test_the_last_words_of_a_side_that_takes_nothing_more_are_received() -> None:
    one, two = linked()
    two.send({"event": "failed", "why": "no room"})
    two.close()
    one.send({"event": "ping"})
    assert not one.pending and not one.ended
    assert one.receive() == [{"event": "failed", "why": "no room"}]
    assert one.ended
    one.close()


def test_what_a_slow_reader_leaves_waits_and_nothing_is_lost_or_blocks() -> None:
    one, two = linked()
    sent = 0
    while not one.pending:
        one.send({"event": "reaped", "worker": sent})
        sent += 1
    for _ in range(5):
        one.send({"event": "reaped", "worker": sent})
        sent += 1
    got: list[int] = []
    while len(got) < sent:
        got += [event["worker"] for event in two.receive()]
        one.flush()
    assert got == list(range(sent))
    assert not one.pending
    one.close()
    two.close()


def test_a_childs_end_is_not_handed_on_to_its_own_children() -> None:
    ours, theirs = Channel.pair()
    fd = theirs.detach()
    os.set_inheritable(fd, True)
    child = Channel.inherited(fd)
    assert not os.get_inheritable(fd)
    child.close()
    ours.close()


def test_the_page_lists_every_event_of_the_channel() -> None:
    """Each word that any side says or takes, and no other."""
    root = Path(__file__).parents[2]
    rooms = [root / "service" / "supervise", root / "scheduler_daemon", root / "gpu_worker"]
    said = {
        word
        for room in rooms
        for path in room.glob("*.py")
        for word in re.findall(r'"event": "(\w+)"', path.read_text())
    }
    page = (root / "docs" / "architecture.md").read_text()
    table = page[page.index("### The control channel") : page.index("### Words")]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == said
