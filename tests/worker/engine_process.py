"""A played engine rank in a process of its own, so that it can be killed. Told and heard in JSON lines.

in   {"connect": name}                        register; answered by {"pid": worker's pid}
in   {"stamp": seed}                          every block gets bytes of its own
in   {"begin": {ticket: [blocks]}}            answered by {"ended": {ticket: [outcome, crc of the blocks]}}, one
                                              line for each message of words
"""

import json
import os
import select
import sys
import zlib

import numpy as np

from kvferry.net.paths import RunDir
from kvferry.proto.tether import RankRegistered
from tests.worker.sidecar import FakeRank, rows_of

NUM_BLOCKS, NUM_LAYERS, RUN = 16, 2, 256 << 10
SLOT_BYTES = NUM_LAYERS * RUN + 4096


def crc_of(kv: np.ndarray, blocks: list[int]) -> int:
    """Of these blocks' bytes, in this order."""
    crc = 0
    for block in blocks:
        crc = zlib.crc32(np.ascontiguousarray(kv[:, block]), crc)
    return crc


def stamped(seed: int) -> np.ndarray:
    """What `stamp` writes: shape (layers, blocks, run)."""
    tile = np.random.default_rng(seed).integers(0, 256, (NUM_LAYERS, NUM_BLOCKS, 4096), dtype=np.uint8)
    return np.tile(tile, RUN // 4096)


def main() -> None:
    rank: FakeRank | None = None
    blocks_of: dict[int, list[int]] = {}
    unread = b""
    while True:
        ready, _, _ = select.select([0] if rank is None else [0, rank.socket], [], [])
        if 0 in ready:
            data = os.read(0, 1 << 16)
            if not data:
                return
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                match json.loads(line):
                    case {"connect": name}:
                        rank = FakeRank(RunDir.at(sys.argv[1]), NUM_BLOCKS, NUM_LAYERS, RUN, name=name)
                        rank.register()
                        print(json.dumps({"pid": rank.take(RankRegistered).pid}), flush=True)
                    case {"stamp": seed}:
                        rank.kv[:] = stamped(seed)
                    case {"begin": tickets}:
                        blocks_of |= {int(ticket): blocks for ticket, blocks in tickets.items()}
                        rank.begin(*map(int, tickets))
        elif rank is not None:
            for words in rank.hear():
                ended = {t: [outcome, crc_of(rank.kv, blocks_of[t])] for t, outcome in rows_of(words)}
                print(json.dumps({"ended": ended}), flush=True)


if __name__ == "__main__":
    main()
