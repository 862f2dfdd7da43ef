"""What a step costs on the wire: pack and unpack of the columnar form against msgpack's list form, in one process.

    python bench/codec.py [--jobs 64 --keys 32]

Thread CPU time, interleaved rounds, medians; trust the ratios. The goal is decode and check <= 0.15 of
`msgpack.unpackb` of the same step as lists, which has checked nothing yet.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable

import msgpack

from kvferry.proto.codec import pack, unpack
from kvferry.proto.columns import pack_u8, pack_u32, pack_u64, u32, u64
from kvferry.proto.hot import Done, Plan, Step

KEY_BYTES = 32
GOAL = 0.15


def step_of(num_jobs: int, num_keys: int, rnd: random.Random) -> tuple[Step, bytes]:
    """One step of stores, and the list form of the same."""
    keys = [[rnd.randbytes(KEY_BYTES) for _ in range(num_keys)] for _ in range(num_jobs)]
    blocks = [[rnd.randrange(1 << 18) for _ in range(num_keys)] for _ in range(num_jobs)]
    tickets = list(range(1, num_jobs + 1))
    step = Step(
        step=7,
        epoch=0,
        key_bytes=KEY_BYTES,
        store_tickets=pack_u64(tickets),
        store_requests=pack_u64(tickets),
        store_groups=pack_u8([0] * num_jobs),
        store_counts=pack_u32([num_keys] * num_jobs),
        store_keys=b"".join(key for chain in keys for key in chain),
        store_blocks=pack_u32([block for chain in blocks for block in chain]),
    )
    lists = [7, [[ticket, 0, keys[n], blocks[n]] for n, ticket in enumerate(tickets)]]
    return step, msgpack.packb(lists)


def plan_of(step: Step) -> Plan:
    """The plan of such a step."""
    blocks = u32(step.store_blocks)
    jobs = u64(step.store_tickets)
    return Plan(
        planned_to=int(jobs[-1]),
        tickets=step.store_tickets,
        jobs=step.store_tickets,
        kinds=bytes(len(jobs)),
        groups=bytes(len(jobs)),
        counts=step.store_counts,
        slots=step.store_blocks,
        generations=pack_u64(blocks),
        blocks=step.store_blocks,
    )


def cpu_us(tasks: dict[str, Callable[[], object]], rounds: int, calls: int) -> dict[str, float]:
    """Median microseconds of CPU per call, rounds of all tasks interleaved."""
    taken: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(rounds):
        for name, task in tasks.items():
            start = time.thread_time_ns()
            for _ in range(calls):
                task()
            taken[name].append((time.thread_time_ns() - start) / calls / 1000)
    return {name: statistics.median(values) for name, values in taken.items()}


def main() -> int:
    """Print the table; exit code 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=64)
    parser.add_argument("--keys", type=int, default=32, help="keys of a job")
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--calls", type=int, default=200)
    args = parser.parse_args()

    step, lists = step_of(args.jobs, args.keys, random.Random(0))
    raw_step, plan = pack(step), plan_of(step)
    raw_plan = pack(plan)
    done = Done(jobs=step.store_tickets, outcomes=bytes(args.jobs), copy_us=bytes(4 * args.jobs))
    raw_done = pack(done)
    whole = msgpack.unpackb(lists)
    us = cpu_us(
        {
            "unpack, list form (nothing checked)": lambda: msgpack.unpackb(lists),
            "unpack + check, step": lambda: unpack(raw_step),
            "unpack + check, plan": lambda: unpack(raw_plan),
            "unpack + check, done": lambda: unpack(raw_done),
            "pack, list form": lambda: msgpack.packb(whole),
            "check + pack, step": lambda: pack(step),
            "check + pack, plan": lambda: pack(plan),
            "check + pack, done": lambda: pack(done),
        },
        args.rounds,
        args.calls,
    )
    print(f"{args.jobs} jobs x {args.keys} keys of {KEY_BYTES} bytes: {len(raw_step)} bytes, as lists {len(lists)}")
    for name, value in us.items():
        base = us["unpack, list form (nothing checked)"] if "unpack" in name else us["pack, list form"]
        print(f"{name:38} {value:8.2f} us   {value / base:6.3f}")
    ratio = us["unpack + check, step"] / us["unpack, list form (nothing checked)"]
    print(f"decode + check / list form: {ratio:.3f} (goal <= {GOAL})")
    return 0 if ratio <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
