"""What process C measures of copies: bytes a second, time until an end is seen, many large batches, a steady load."""

import ctypes
import functools
import select
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from kvferry.cuda.structs import EVENT_DISABLE_TIMING
from kvferry.gpu_check.copier import Copier
from kvferry.gpu_worker.devices.base import MAX_DESCRIPTORS, CopyPlan
from kvferry.proto.errors import LostError
from kvferry.proto.layout import slot_bytes
from kvferry.proto.outcome import Kind

REPEATS: Final = 3  # the best of: others may use the link
PLAIN_S: Final = 20.0
SEEN_S: Final = 5.0
BLOCK_BYTES: Final = 2 << 20  # payload of a slot in measurements, if a run is not larger


def deeds_of(copier: Copier) -> dict[str, Callable[..., Any]]:
    """What the copier can be asked of this module."""
    measure = Measure(copier)
    deeds: tuple[Callable[..., Any], ...] = (measure.rates, measure.plain, measure.ends, measure.storm, measure.steady)
    return {deed.__name__: deed for deed in deeds}


class Measure:
    """Measurements of one copier. Rates are GB/s, 1e9 bytes."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier

    def rates(self, run: int, nbytes: int) -> dict[str, float]:
        """Both directions, each alone and both at once, in runs of `run` bytes and `nbytes` in all."""
        copier = self._copier
        made = {kind: self._scattered(kind, run, nbytes) for kind in Kind}
        total = {kind: sum(plan.nbytes for plan in plans) for kind, plans in made.items()}
        count = sum(len(plan.size) for plan in made[Kind.STORE])
        found: dict[str, float] = {}
        for kind in Kind:
            one = {kind: made[kind]}
            seconds, spent = min(_timed(functools.partial(copier.run, one)) for _ in range(REPEATS))
            found[kind.name.lower()] = total[kind] / seconds / 1e9
            found[f"{kind.name.lower()}_us_per_descriptor"] = spent / count * 1e6
        # Blocks and slots of the two directions lie apart.
        halves = {kind: plans[: len(plans) // 2] or plans for kind, plans in made.items()}
        halves[Kind.LOAD] = made[Kind.LOAD][len(made[Kind.LOAD]) // 2 :]
        moved = sum(plan.nbytes for plans in halves.values() for plan in plans)
        seconds, _ = min(_timed(lambda: copier.run(halves)) for _ in range(REPEATS))
        return found | {"both": moved / seconds / 1e9}

    def _scattered(self, kind: Kind, run: int, nbytes: int) -> list[CopyPlan]:
        """Runs that no neighbour can be joined to, as a layer-outermost layout has them."""
        layers = max(BLOCK_BYTES // run, 1)
        payload = layers * run
        blocks = nbytes // (payload + BLOCK_BYTES // 4)  # room for the slots' header pages too
        regions = [(layer * blocks * run, run, run, blocks) for layer in range(layers)]
        order = np.random.default_rng(5).permutation(blocks).tolist()
        return self._copier.plans(kind, regions, slot_bytes(payload), order, list(range(blocks)))

    def plain(self, nbytes: int) -> dict[str, float]:
        """One plain copy of these bytes: from memory of the driver's own, and from the registered pool."""
        copier = self._copier
        if copier.driver is None:
            pool, engine = copier.pool.slots_base, copier.mapping.base
            copies = {"store": (pool, engine), "load": (engine, pool)}
            return {
                name: nbytes
                / min(_timed(functools.partial(ctypes.memmove, *ways, nbytes))[0] for _ in range(REPEATS))
                / 1e9
                for name, ways in copies.items()
            }
        driver, own = copier.driver, copier.driver.host_allocate(nbytes)
        stream, event = driver.stream_create(), driver.event_create(EVENT_DISABLE_TIMING)
        found: dict[str, float] = {}
        try:
            ctypes.memset(own, 1, nbytes)
            for name, host in (("", own), ("registered_", copier.pool.slots_base)):
                ways = {"store": (host, copier.mapping.base), "load": (copier.mapping.base, host)}
                for kind, (dst, src) in ways.items():

                    def once(dst: int = dst, src: int = src) -> None:
                        driver.copy(dst, src, nbytes, stream)
                        driver.event_record(event, stream)
                        _until(lambda: driver.event_happened(event), PLAIN_S)

                    found[name + kind] = nbytes / min(_timed(once)[0] for _ in range(REPEATS)) / 1e9
        finally:
            driver.event_destroy(event)
            driver.stream_destroy(stream)
            driver.host_free(own)
        return found

    def ends(self, count: int, nbytes: int) -> dict[str, dict[str, float]]:
        """How long until this process knows that a copy ended, by each way to know it; and what knowing costs."""
        copier = self._copier
        (plan,) = copier.plans(Kind.LOAD, [(0, nbytes, nbytes, 1)], slot_bytes(nbytes), [0], [0])
        device = copier.device

        def by_waiter() -> None:
            device.submit(Kind.LOAD, plan, 1)
            if not select.select([device.fileno()], [], [], SEEN_S)[0] or not device.completions()[0].ok:
                raise LostError("check.copy", "a copy failed or has not ended")

        found = {"waiter": _latencies(by_waiter, count)}
        if copier.driver is None:
            return found
        driver = copier.driver
        stream, event = driver.stream_create(), driver.event_create(EVENT_DISABLE_TIMING)
        word_at = driver.host_allocate(4096)
        word = ctypes.c_uint64.from_address(word_at)
        word.value = turn = 0
        pointer = driver.host_device_pointer(word_at)
        dst, src = int(plan.dst[0]), int(plan.src[0])

        def by_word() -> None:
            nonlocal turn
            turn += 1
            driver.copy(dst, src, nbytes, stream)
            driver.write_value(stream, pointer, turn)
            _until(lambda: word.value == turn, SEEN_S)

        def by_query() -> None:
            driver.copy(dst, src, nbytes, stream)
            driver.event_record(event, stream)
            _until(lambda: driver.event_happened(event), SEEN_S)

        try:
            found |= {"word": _latencies(by_word, count), "query": _latencies(by_query, count)}
        finally:
            driver.stream_destroy(stream)
            driver.event_destroy(event)
            driver.host_free(word_at)
        return found

    def storm(self, calls: int, run: int, seconds: float) -> dict[str, Any]:
        """Full batches in both directions, one call after the other, at most `calls` of them or so long."""
        copier = self._copier
        nbytes = MAX_DESCRIPTORS * run
        plans = {kind: self._scattered(kind, run, 4 * nbytes)[0] for kind in Kind}
        done = 0
        until = time.monotonic() + seconds
        while done < calls and time.monotonic() < until:
            copier.run({kind: [plan] * 4 for kind, plan in plans.items()})
            done += 8
        return {"calls": done, "descriptors": len(plans[Kind.STORE].size), "asked": calls}

    def steady(self, seconds: float, run: int, nbytes: int, kinds: Sequence[int]) -> float:
        """Copy all the time; GB/s."""
        made = {Kind(kind): self._scattered(Kind(kind), run, nbytes) for kind in kinds}
        moved = 0
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            self._copier.run(made)
            moved += sum(plan.nbytes for plans in made.values() for plan in plans)
        return moved / (time.monotonic() - began) / 1e9


def _timed(deed: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    answer = deed()
    return time.perf_counter() - began, answer


def _until(is_so: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > until:
            raise LostError("check.copy", f"a copy has not ended within {seconds:g} s")


def _latencies(once: Callable[[], None], count: int) -> dict[str, float]:
    """Microseconds of each call, and of this process's own time in it."""
    for _ in range(10):
        once()
    times = []
    began = time.process_time()
    for _ in range(count):
        times.append(_timed(once)[0] * 1e6)
    spent = (time.process_time() - began) * 1e6 / count
    p50, p99 = np.percentile(times, [50, 99]).tolist()
    return {"p50_us": round(p50, 1), "p99_us": round(p99, 1), "cpu_us": round(spent, 1)}
