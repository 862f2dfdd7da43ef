"""What a pool far smaller than the working set costs the daemon: time of a lookup and of a store, and what is counted.

    python bench/pressure.py [--keys 200000] [--chain 32] [--requests 3000]

One engine, chains drawn at random, each looked up, its hits loaded and the rest stored, all in one process
and with the daemon's core alone. Thread CPU time of the core, medians and 99th percentiles; trust the ratios.
The goal: a lookup takes as long with a pool of 5 % as with one that holds everything, per key that it answers.
"""

import argparse
import gc
import random
import sys
import time

from kvferry.proto.columns import pack_u8, pack_u32, pack_u64, u64
from kvferry.proto.control import Attach, Hello, Register
from kvferry.proto.hot import Done, JobsEnded, Lookup, LookupAnswer, Step, StepAnswer
from kvferry.proto.ids import BootId, LinkId
from kvferry.proto.layout import slot_bytes
from kvferry.proto.outcome import Outcome
from kvferry.scheduler_daemon.core.api import Action, CoreSettings, Received, Send
from kvferry.scheduler_daemon.core.core import Core

KEY_BYTES = 32
PAYLOAD = 1 << 16
CLIENT, WORKER = LinkId(1), LinkId(2)
GOAL = 1.2


class Lab:
    """A core with one engine of one rank."""

    def __init__(self, num_slots: int) -> None:
        self.core = Core(CoreSettings(boot=BootId(1), tp_size=1, lease_ns=10**9))
        self.now = 0
        self.spent: dict[str, list[float]] = {"lookup": [], "step": []}
        self.errors = self.step_number = self.ticket = 0
        engine = {"engine_id": "e", "world_size": 1, "num_blocks": 1 << 20}
        self.say(CLIENT, Hello(role="client"))
        self.say(CLIENT, Register(**engine, key_bytes=KEY_BYTES, block_tokens=16))
        self.say(WORKER, Hello(role="worker"))
        sizes = {"payload_bytes": (PAYLOAD,), "block_tokens": (16,), "pool_bytes": num_slots * slot_bytes(PAYLOAD)}
        self.say(WORKER, Attach(**engine, **sizes, worker=7, rank=0, layout_digest="x"))

    def say(self, link: LinkId, message: object, name: str = "") -> list[Action]:
        self.now += 1_000_000
        began = time.thread_time()
        actions = self.core.step(Received(link, message), self.now)
        if name:
            self.spent[name].append((time.thread_time() - began) * 1e6)
        return actions

    def request(self, number: int, keys: list[bytes]) -> int:
        """One request's life: lookup, load of the hits, store of the rest, end; the number of hits."""
        ask = Lookup(lookup=number, request=number, epoch=0, group=0, key_bytes=KEY_BYTES, keys=b"".join(keys))
        [answer] = [a.message for a in self.say(CLIENT, ask, "lookup") if isinstance(a, Send)]
        assert isinstance(answer, LookupAnswer)
        if answer.hits:
            self.step(load=(number, answer.lease, keys[: answer.hits]))
        if answer.hits < len(keys):
            self.step(store=(number, keys))
        self.step(end=number)
        return answer.hits

    def step(
        self,
        load: tuple[int, int, list[bytes]] | None = None,
        store: tuple[int, list[bytes]] | None = None,
        end: int = 0,
    ) -> None:
        self.step_number += 1
        fields: dict[str, bytes] = {}
        if load is not None or store is not None:
            self.ticket += 1
            kind, request, keys = ("load", load[0], load[2]) if load else ("store", *store)  # type: ignore[misc]
            fields = {
                f"{kind}_tickets": pack_u64([self.ticket]),
                f"{kind}_requests": pack_u64([request]),
                f"{kind}_groups": pack_u8([0]),
                f"{kind}_counts": pack_u32([len(keys)]),
                f"{kind}_keys": b"".join(keys),
                f"{kind}_blocks": pack_u32(list(range(len(keys)))),
            }
            if load is not None:
                fields["load_leases"] = pack_u64([load[1]])
        if end:
            fields |= {"end_requests": pack_u64([end]), "end_reasons": pack_u8([0])}
        actions = self.say(CLIENT, Step(step=self.step_number, epoch=0, key_bytes=KEY_BYTES, **fields), "step")
        [answer] = [a.message for a in actions if isinstance(a, Send) and isinstance(a.message, StepAnswer)]
        jobs = [job for job in u64(answer.jobs).tolist() if job]
        if jobs:
            done = Done(jobs=pack_u64(jobs), outcomes=pack_u8([0] * len(jobs)), copy_us=pack_u32([9] * len(jobs)))
            ends = [a.message for a in self.say(WORKER, done) if isinstance(a, Send)]
            self.errors += sum(o != Outcome.OK for m in ends if isinstance(m, JobsEnded) for o in m.outcomes)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keys", type=int, default=200_000, help="keys of the working set")
    parser.add_argument("--chain", type=int, default=32)
    parser.add_argument("--requests", type=int, default=3_000)
    args = parser.parse_args()
    gc.disable()
    dice = random.Random(1)
    chains = [[dice.randbytes(KEY_BYTES) for _ in range(args.chain)] for _ in range(args.keys // args.chain)]
    print(f"{args.keys} keys in chains of {args.chain}; {args.requests} requests after the pool has filled")
    medians = {}
    for share in (1.1, 0.5, 0.2, 0.05):
        lab = Lab(int(args.keys * share))
        for number, keys in enumerate(chains, 1):  # fill
            lab.request(number, keys)
        lab.spent = {name: [] for name in lab.spent}
        before = dict(lab.core.status()["counters"])
        hits = sum(lab.request(len(chains) + n + 1, dice.choice(chains)) for n in range(args.requests))
        counters = lab.core.status()["counters"]
        told = []
        for name, spent in lab.spent.items():
            spent.sort()
            told.append(f"{name} {spent[len(spent) // 2]:6.1f} us, p99 {spent[len(spent) * 99 // 100]:6.1f}")
        medians[share] = lab.spent["lookup"][len(lab.spent["lookup"]) // 2]
        refused = sum(n - before.get(c, 0) for c, n in counters.items() if c.startswith("store_keys_refused"))
        evicted = counters.get("keys_evicted", 0) - before.get("keys_evicted", 0)
        print(
            f"pool {share:4.0%} of them: hit share {hits / args.requests / args.chain:5.1%}; {'; '.join(told)};"
            f" {evicted} evicted, {refused} refused, {lab.errors} errors"
        )
        if lab.errors:
            return 1
    ratio = medians[0.05] / medians[1.1]
    print(f"median lookup, 5 % / all: {ratio:.2f} (goal <= {GOAL})")
    return 0 if ratio <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
