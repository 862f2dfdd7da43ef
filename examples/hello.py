"""kvferry without an inference server: one rank, a numpy array for KV memory; store, wipe, look up, load, compare.

Run `kvferry up --tp-size 1` first, then this. The README shows the same lines; a test holds the two together.
"""

import sys
import time

import numpy as np

from kvferry import Client, Outcome, RankClient, from_arrays, shared_array


def wait(question):  # an engine asks once in each step instead
    end = time.monotonic() + 10
    while not (answer := question()):
        time.sleep(0.001) if time.monotonic() < end else sys.exit("no answer within 10 s")
    return answer


kv, fd = shared_array((16, 4096), np.uint8)  # 16 blocks of 4096 bytes, in memory that others can map
memory = from_arrays({"layer0": kv}, kv, fd, block_tokens=16)
keys = [bytes([n]) * 32 for n in range(4)]  # in an engine: a hash of the whole prefix up to each block

rank = RankClient("hello", 0, world_size=1, memory=memory, on_note=print)
client = Client("hello", world_size=1, key_bytes=32, num_blocks=16, block_tokens=16, on_note=print)
with rank, client:
    client.wait_attached(10) or sys.exit(f"not attached: is `kvferry up --tp-size 1` running? {client.describe()}")
    kv[:4] = before = np.random.default_rng(0).integers(1, 256, (4, 4096))
    client.store("request 1", keys, [0, 1, 2, 3]) or sys.exit("the store was not taken")
    rank.begin_stores(client.end_step())  # once in each engine step
    (stored,) = wait(client.poll)  # the job's end: its keys are loadable
    stored.outcome is Outcome.OK or sys.exit(f"not stored: {stored}")
    kv[:] = 0
    client.lookup("request 2", keys)
    found = wait(lambda: (hits := client.hits("request 2")).ready and hits)
    client.load("request 2", keys[: found.count], [8, 9, 10, 11])
    rank.begin_loads(client.end_step())
    (ended,) = wait(lambda: rank.poll().loads)  # this rank's word: the blocks are safe to read
    is_equal = ended.ok and bool((kv[8:12] == before).all())
    print(f"{found.count} blocks came back, equal: {is_equal}")
    sys.exit(not is_equal)
