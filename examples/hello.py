"""kvferry without an inference server: one rank, a numpy array for KV memory; store, wipe, look up, load, compare.

Run `kvferry up --tp-size 1` first, then this. The README shows the same lines; a test holds the two together.
"""

import numpy as np

from kvferry import Client, RankClient, from_arrays, shared_array, wait_for

kv, fd = shared_array((16, 4096), np.uint8)  # 16 blocks of 4096 bytes, in memory that others can map
memory = from_arrays({"layer0": kv}, kv, fd, block_tokens=16)
keys = [bytes([n]) * 32 for n in range(4)]  # in an engine: a hash of the whole prefix up to each block
rank = RankClient("hello", 0, world_size=1, memory=memory, on_note=print)
client = Client("hello", world_size=1, key_bytes=32, num_blocks=16, block_tokens=16, on_note=print)
with rank, client:
    wait_for(lambda: client.attached, "attached to a sidecar; the lines before this say why")
    kv[:4] = before = np.random.default_rng(0).integers(1, 256, (4, 4096))
    client.store("request 1", keys, [0, 1, 2, 3])
    rank.begin_stores(client.end_step())  # once in each engine step
    wait_for(client.poll, "the store's end")  # its keys are loadable from here on
    kv[:] = 0
    client.lookup("request 2", keys)
    found = wait_for(lambda: (hits := client.hits("request 2")).ready and hits, "the lookup's answer")
    client.load("request 2", keys[: found.count], [8, 9, 10, 11])
    rank.begin_loads(client.end_step())
    (loaded,) = wait_for(lambda: rank.poll().loads, "the load's end")  # this rank's word: its blocks may be read
    print(f"{found.count} blocks came back, equal: {loaded.ok and bool((kv[8:12] == before).all())}")
