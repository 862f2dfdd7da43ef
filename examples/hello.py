"""kvferry without an inference server: one rank, a numpy array for KV memory; store, wipe, look up, load, compare.

Run `kvferry up` first, then this. The README shows the same lines; a test holds the two together.
"""

import sys
import time

import numpy as np

from kvferry import Client, RankClient, from_arrays, shared_array

kv, fd = shared_array((16, 4096), np.uint8)  # 16 blocks of 4096 bytes, in memory that others can map
memory = from_arrays({"layer0": kv}, kv, fd, block_tokens=16)
keys = [bytes([n]) * 32 for n in range(4)]  # in an engine: a hash of the whole prefix up to each block

rank = RankClient("hello", 0, world_size=1, memory=memory)
client = Client("hello", world_size=1, key_bytes=32, num_blocks=16, block_tokens=16)
with rank, client:
    if not client.wait_attached(10):
        sys.exit("no sidecar: is `kvferry up` running?")
    kv[:4] = before = np.random.default_rng(0).integers(1, 256, (4, 4096))
    client.store("request 1", keys, [0, 1, 2, 3])
    rank.begin_stores(client.end_step())  # once in each engine step
    while not client.poll():  # the job's end: its keys are loadable
        time.sleep(0.001)
    kv[:] = 0
    client.lookup("request 2", keys)
    while not (found := client.hits("request 2")).ready:
        time.sleep(0.001)
    client.load("request 2", keys[: found.count], [8, 9, 10, 11])
    rank.begin_loads(client.end_step())
    while not (ended := rank.poll().loads):  # this rank's word: the blocks are safe to read
        time.sleep(0.001)
    print(f"{found.count} blocks came back, equal: {ended[0].ok and bool((kv[8:12] == before).all())}")
