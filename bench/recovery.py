"""How long a restarted daemon takes to have its cache back: reading a slot table, at several sizes, in one process.

    python bench/recovery.py [--slots 1000000] [--namespaces 3] [--torn 0.001]

The table is written as the daemon writes it (32-byte keys, several namespaces), a share of its records is
torn, and a core is built over it: checksums, index, order of eviction. The best of three, on the wall and in
CPU time of the one thread that does it; on a machine with nothing else to do they are the same, and the
goal of 3 s for a million slots is held against the second.
"""

import argparse
import gc
import hashlib
import sys
import time

import numpy as np

from kvferry.proto.ids import BootId
from kvferry.scheduler_daemon.core.api import CoreSettings, Recovered, TableShape
from kvferry.scheduler_daemon.core.core import Core
from kvferry.scheduler_daemon.core.slots import SlotTable, Table, sound, zeroed_table

KEY_BYTES = 32
PAYLOAD = 1 << 20
GOAL_S = 3.0


def table_of(num_slots: int, num_spaces: int, share_torn: float) -> tuple[Table, int]:
    """A table as a busy daemon leaves it, and how many of its records are torn."""
    memory = zeroed_table(num_slots)
    slots = SlotTable(num_slots, lambda _: memory)
    dice = np.random.default_rng(1)
    for start in range(0, num_slots, 4096):
        taken = np.array(slots.take(min(4096, num_slots - start)), dtype=np.uint32)
        raw = dice.bytes(len(taken) * KEY_BYTES)
        keys = [raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)]
        space = hashlib.sha256(bytes([start // 4096 % num_spaces])).digest()[:16]
        slots.write(taken, keys, key_bytes=KEY_BYTES, groups=0, namespace=space, epoch=0, payload_bytes=PAYLOAD)
        slots.commit(taken)
    torn = dice.choice(num_slots, int(num_slots * share_torn), replace=False)
    memory["generation"][torn] += 1
    return memory, len(torn)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slots", type=int, default=1_000_000)
    parser.add_argument("--namespaces", type=int, default=3)
    parser.add_argument("--torn", type=float, default=0.001)
    args = parser.parse_args()
    gc.disable()  # as the daemon does
    for num_slots in sorted({args.slots // 100, args.slots // 10, args.slots}):
        memory, num_torn = table_of(num_slots, args.namespaces, args.torn)
        shape = TableShape(num_slots, (PAYLOAD + 4096,), (num_slots * (PAYLOAD + 4096),))
        best = wall = checks = float("inf")
        for _ in range(3):
            left = memory.copy()
            began = time.thread_time()
            sound(left)
            checks = min(checks, time.thread_time() - began)
            began, began_wall = time.thread_time(), time.perf_counter()
            core = Core(CoreSettings(boot=BootId(1), tp_size=1), recovered=Recovered(shape, left))
            best = min(best, time.thread_time() - began)
            wall = min(wall, time.perf_counter() - began_wall)
            ready = core.status()["slots"]["ready"]
            del core
        whole = num_slots - num_torn
        print(
            f"{num_slots:9} slots: {best:6.3f} s of CPU ({best / num_slots * 1e6:.2f} us a slot),"
            f" {wall:.3f} s on the wall;"
            f" checksums alone {checks:.3f} s;"
            f" {ready} of {whole} whole records are keys again"
        )
        if ready != whole:
            return 1
    print(f"goal: {args.slots} slots within {GOAL_S * args.slots / 1e6:.1f} s")
    return 0 if best <= GOAL_S * args.slots / 1e6 else 1


if __name__ == "__main__":
    sys.exit(main())
