"""A clock that does not count what its loop stood through."""

from kvferry.net.awake import STALL_NS, AwakeClock

MS = 1_000_000


class Hand:
    def __init__(self) -> None:
        self.now_ns = 5_000 * MS

    def __call__(self) -> int:
        return self.now_ns


def test_work_and_planned_sleep_count() -> None:
    hand = Hand()
    clock = AwakeClock(hand)
    began = clock()
    hand.now_ns += 100 * MS
    assert clock() == began + 100 * MS
    hand.now_ns += 10_000 * MS
    assert clock(10_000 * MS) == began + 10_100 * MS
    hand.now_ns += 10 * MS  # woken early
    assert clock(10_000 * MS) == began + 10_110 * MS
    assert clock.stood_ns == 0


def test_what_is_slept_beyond_the_plan_or_spent_in_a_turn_does_not() -> None:
    hand = Hand()
    clock = AwakeClock(hand)
    began = clock()
    hand.now_ns += 3_600_000 * MS
    assert clock() == began + STALL_NS
    hand.now_ns += 3_600_000 * MS
    assert clock(50 * MS) == began + 50 * MS + 2 * STALL_NS
    assert clock.stood_ns == 7_200_000 * MS - 50 * MS - 2 * STALL_NS


def test_time_moves_even_if_every_turn_is_slow() -> None:
    """A daemon that is always crowded out would keep no deadline otherwise."""
    hand = Hand()
    clock = AwakeClock(hand)
    began = clock()
    for _ in range(20):
        hand.now_ns += 2 * STALL_NS
        clock()
    assert clock() == began + 20 * STALL_NS


def test_it_never_goes_back_and_a_little_lateness_is_time_as_any() -> None:
    hand = Hand()
    clock = AwakeClock(hand)
    last = clock()
    for step in (0, 1, STALL_NS, STALL_NS + 1, 5, 10**15, 0):
        hand.now_ns += step
        now = clock()
        assert now >= last
        assert now - last == min(step, STALL_NS)
        last = now
