"""The items: number, name, limit, whether it must pass. In the order of their value: a run cut short has the best."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kvferry.gpu_check import (
    items_attach,
    items_bytes,
    items_deaths,
    items_graph,
    items_look,
    items_order,
    items_speed,
)
from kvferry.gpu_check.stage import Stage
from kvferry.proto.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Item:
    """One item. `run` gives one line for people, fills in facts, and raises an `Ending` otherwise."""

    number: int
    name: str
    limit_s: float
    run: Callable[[Stage, dict[str, Any]], str]
    must: bool = True


ITEMS: Final = (
    Item(0, "where this runs", 45, items_look.look, must=False),
    Item(1, "attach", 60, items_attach.attach),
    Item(2, "marks", 30, items_attach.marks),
    Item(3, "bit for bit", 45, items_bytes.correctness),
    Item(4, "order", 30, items_order.order),
    Item(13, "revokes, generations", 40, items_order.revokes),
    Item(14, "CUDA graphs", 25, items_graph.graphs),
    Item(10, "engine killed", 60, items_deaths.engine_killed),
    Item(5, "bandwidth", 60, items_speed.bandwidth),
    Item(6, "ends seen", 20, items_speed.ends),
    Item(9, "memory by descriptor", 25, items_attach.vmm),
    Item(7, "pool", 60, items_speed.pools),
    Item(11, "worker killed", 45, items_deaths.worker_killed),
    Item(8, "interference", 45, items_speed.interference),
    Item(12, "large batches", 30, items_speed.storm),
)


def chosen(text: str | None) -> tuple[Item, ...]:
    """The items of a list like `0-4,13`; all for None. ConfigError naming what there is not."""
    if text is None:
        return ITEMS
    numbers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError("check.items", f"--items: {part!r} is no item", "give numbers, as 0-4,13")
        numbers |= set(range(int(first), int(last if dash else first) + 1))
    known = {item.number for item in ITEMS}
    if numbers - known:
        unknown = ", ".join(map(str, sorted(numbers - known)))
        raise ConfigError("check.items", f"--items: there is no item {unknown}", f"choose from 0-{max(known)}")
    return tuple(item for item in ITEMS if item.number in numbers)
