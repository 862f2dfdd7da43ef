"""kvferry without an inference server: one rank, a numpy array for KV memory; store, wipe, look up, load, compare.

Run `kvferry up` first, then this.
"""

import time

import numpy as np

from kvferry import Client, RankClient, from_arrays, shared_array


def main(run_dir: str | None = None) -> bool:
    """Whether the bytes came back."""
    kv, fd = shared_array((16, 4096), np.uint8)  # 16 blocks of 4096 bytes, in memory that can be shared
    memory = from_arrays({"layer0": kv}, kv, fd, block_tokens=16)
    keys = [bytes([n]) * 32 for n in range(4)]  # in an engine: hashes of the prefix up to each block
    with (
        RankClient("hello", 0, world_size=1, memory=memory, run_dir=run_dir) as rank,
        Client("hello", world_size=1, key_bytes=32, num_blocks=16, block_tokens=16, run_dir=run_dir) as client,
    ):
        if not client.wait_attached(10):
            return False
        kv[0:4] = np.random.default_rng(0).integers(1, 256, (4, 4096), dtype=np.uint8)
        before = kv[0:4].copy()
        client.store("first request", keys, [0, 1, 2, 3])
        rank.begin_stores(client.end_step())  # the ranks' part of this step
        until(lambda: client.poll())  # the job has ended: its keys are loadable
        kv[:] = 0
        client.lookup("second request", keys)
        until(lambda: client.hits("second request").ready)
        client.load("second request", keys[: client.hits("second request").count], [8, 9, 10, 11])
        rank.begin_loads(client.end_step())
        until(lambda: rank.poll().loads)
        return bool((kv[8:12] == before).all())


def until(happened):  # type: ignore[no-untyped-def]
    """Ask again and again, as an engine does once in each step."""
    while not happened():
        time.sleep(0.001)


if __name__ == "__main__":
    print("the bytes came back" if main() else "no bytes: is `kvferry up` running?")
