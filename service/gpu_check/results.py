"""How an item ends, what is told of it, and whether the run as a whole passed. Pure but for `write`.

    pass     it did what the item says
    fail     it did not; or it did not end in time, or a process of it died where none should
    void     a control that must fail did not: the item has proven nothing, which is no pass
    skipped  it cannot be asked here, or was not asked for

An item that must pass fails the run unless it passes, or is skipped because the device cannot be asked it.
"""

import json
import os
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

FORMAT: Final = 1


class Status(StrEnum):
    """How an item ended."""

    PASS = "pass"
    FAIL = "fail"
    VOID = "void"
    SKIPPED = "skipped"


class Ending(Exception):  # noqa: N818  the way out of an item, not always an error
    """An item's early end; `status` says which."""

    status = Status.FAIL


class Failed(Ending):
    """The device, or kvferry on it, did something that it may not do."""


class Void(Ending):
    """A control that must fail did not."""

    status = Status.VOID


class Skipped(Ending):
    """It cannot be asked here."""

    status = Status.SKIPPED


@dataclass(slots=True)
class Result:
    """One item's end. `facts` are plain JSON values, kept also when it failed."""

    item: int
    name: str
    must: bool
    status: Status
    text: str  # one line for people
    seconds: float
    limit_s: float
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def fails_the_run(self) -> bool:
        """Whether the run as a whole cannot pass any more."""
        return self.must and self.status in (Status.FAIL, Status.VOID)


@dataclass(slots=True)
class Report:
    """A run: what it ran on, and its items so far."""

    about: dict[str, Any]
    results: list[Result] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether nothing that must pass did anything else."""
        return not any(result.fails_the_run for result in self.results)

    def as_json(self) -> str:
        """All of it."""
        items = [asdict(result) for result in self.results]
        return json.dumps({"format": FORMAT, **self.about, "passed": self.passed, "items": items}, indent=1)

    def write(self, path: Path) -> None:
        """As JSON, whole or not at all: a crash in the next item loses nothing of this one."""
        text = self.as_json()
        new = path.with_name(f"{path.name}.new")
        new.write_text(text + "\n")
        os.replace(new, path)  # noqa: PTH105  the name stays a plain one


def line_of(result: Result) -> str:
    """One row of the table."""
    must = "must" if result.must else "    "
    return f"{result.item:>3}  {result.name:<22} {must}  {result.status:<8}{result.seconds:6.1f} s  {result.text}"


def table_of(report: Report) -> str:
    """All rows, in the order of the numbers, and the verdict."""
    rows = [line_of(result) for result in sorted(report.results, key=lambda result: result.item)]
    bad = [str(result.item) for result in report.results if result.fails_the_run]
    verdict = f"failed: item {', '.join(bad)}" if bad else "passed"
    return "\n".join([*rows, f"gpu-check {verdict}"])
