"""Counts by plain names: every refusal, drop and late message has one, so that nothing goes missing in silence."""

from kvferry.proto.outcome import Outcome, Reason


class Counters:
    """Named counts that only rise."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def add(self, name: str, count: int = 1) -> None:
        """Raise a count; zero leaves no name behind."""
        if count:
            self._counts[name] = self._counts.get(name, 0) + count

    def refused(self, what: str, reason: Reason, count: int) -> None:
        """Count `count` things of kind `what` refused for `reason`."""
        self.add(f"{what}_refused.{reason.name}", count)

    def failed(self, what: str, outcome: Outcome, count: int) -> None:
        """Count `count` things of kind `what` that failed with `outcome`."""
        self.add(f"{what}_failed.{outcome.name}", count)

    def __getitem__(self, name: str) -> int:
        return self._counts.get(name, 0)

    def total(self, prefix: str) -> int:
        """The sum of all counts whose name begins with `prefix`."""
        return sum(count for name, count in self._counts.items() if name.startswith(prefix))

    def as_dict(self) -> dict[str, int]:
        """All counts by name, sorted."""
        return dict(sorted(self._counts.items()))
