"""What the CPU worker's copies cost beside one plain memcpy of the same bytes, for pages of several shapes.

    python bench/copies.py [--mib 64] [--rounds 7]

A block is one page in each layer; layers lie one after another, as in an engine's KV cache. Blocks are copied into
slots in random order, so neighbours cannot be joined, and once in order. Planner and device are the worker's own, with
its two threads; the memcpy has one. Both are timed in turns, and the ratio of their medians is what counts: over 1 is
faster than memcpy.
"""

import argparse
import ctypes
import os
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np

from kvferry.gpu_check.copier import Copier
from kvferry.gpu_worker import pool as pools
from kvferry.gpu_worker.devices.base import CopyPlan
from kvferry.proto.layout import Handle, slot_bytes
from kvferry.proto.outcome import Kind

KIB, MIB = 1 << 10, 1 << 20
SHAPES = ((1, MIB), (32, 64 * KIB), (4, 64 * KIB), (32, 16 * KIB), (1, 16 * KIB), (32, 4 * KIB))  # layers, page
GOAL = 0.6  # of memcpy, for small pages too


def plans_of(copier: Copier, kind: Kind, layers: int, page: int, nbytes: int, in_order: bool) -> list[CopyPlan]:
    """The worker's plans for as many blocks as there is room for."""
    payload = layers * page
    blocks = nbytes // slot_bytes(payload)
    regions = [(layer * blocks * page, page, page, blocks) for layer in range(layers)]
    order = np.arange(blocks) if in_order else np.random.default_rng(5).permutation(blocks)
    return copier.plans(kind, regions, slot_bytes(payload), order.tolist(), list(range(blocks)))


def ratio_of(copier: Copier, kind: Kind, plans: list[CopyPlan], rounds: int) -> float:
    """memcpy's median time over the worker's."""
    nbytes = sum(plan.nbytes for plan in plans)
    engine, host = copier.mapping.base, copier.pool.slots_base
    dst, src = (host, engine) if kind is Kind.STORE else (engine, host)
    ours, plain = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        copier.run({kind: plans})
        between = time.perf_counter()
        ctypes.memmove(dst, src, nbytes)
        ours.append(between - began)
        plain.append(time.perf_counter() - between)
    return median(plain) / median(ours)


def main() -> int:
    """Measure and print; 1 if a shape misses the goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    nbytes = args.mib * MIB
    copier = Copier()
    copier.open("cpu", "")
    fd = os.memfd_create("kvferry-bench")
    os.posix_fallocate(fd, 0, nbytes)
    copier.lend(Handle(kind="shm_fd", nbytes=nbytes).model_dump(), os.getpid(), [fd])
    path = Path(f"/dev/shm/kvferry-bench-{os.getpid()}")
    pools.create(path, nbytes, "bench")
    missed = 0
    try:
        copier.use_pool(str(path))
        for in_order in (False, True):
            for layers, page in SHAPES:
                found = {
                    kind: ratio_of(copier, kind, plans_of(copier, kind, layers, page, nbytes, in_order), args.rounds)
                    for kind in Kind
                }
                missed += min(found.values()) < GOAL
                said = ", ".join(f"{kind.name.lower()} {ratio:.2f}" for kind, ratio in found.items())
                order = "in order" if in_order else "scattered"
                print(f"{layers:3} layers of {page // KIB:5} KiB, {order:9}: {said} of memcpy (goal >= {GOAL})")
    finally:
        copier.device.close()
        pools.remove(path)
        os.close(fd)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
