"""What one engine step carries from the scheduler half to the rank halves, and back: plain values."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvferry.client.types import Directive


@dataclass(frozen=True, slots=True)
class StepWork:
    """One step's orders for the ranks.

    `names` says whose each load of the directive is. `failed` are loads that no ticket stands for, because
    making one went wrong: the ranks report them received and their blocks invalid. `is_idle`: the step computes
    nothing, and no earlier one is under way, so that a rank may wait a moment in it; `is_waiting`: for an answer of
    the sidecar's, or for a load at any of the ranks.
    """

    directive: Directive
    names: dict[int, str] = field(default_factory=dict)  # load ticket -> the engine's request id
    failed: dict[str, tuple[int, ...]] = field(default_factory=dict)  # request id -> blocks
    is_idle: bool = False
    is_waiting: bool = False


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """Where a load's time went at the ranks, the slowest rank for each part. Microseconds."""

    wait_us: int = 0  # begin to first byte
    copy_us: int = 0  # first to last byte
    seen_us: int = 0  # the rank got its orders until it saw the end


@dataclass(frozen=True, slots=True)
class RankWords:
    """What a rank adds to a step's output: how long its ended loads took, and whether it waits for its device.

    A rank that is holding begins sends them in a later step, be it an empty one.
    """

    times: dict[str, LoadTimes] = field(default_factory=dict)
    is_holding: bool = False

    def aggregate(self, other: "RankWords") -> "RankWords":
        """The words of two ranks as one."""
        times = _slowest((*self.times.items(), *other.times.items()))
        return RankWords(times, self.is_holding or other.is_holding)


def _slowest(items: Iterable[tuple[str, LoadTimes]]) -> dict[str, LoadTimes]:
    slowest: dict[str, LoadTimes] = {}
    for name, one in items:
        two = slowest.get(name, LoadTimes())
        slowest[name] = LoadTimes(
            max(one.wait_us, two.wait_us), max(one.copy_us, two.copy_us), max(one.seen_us, two.seen_us)
        )
    return slowest
