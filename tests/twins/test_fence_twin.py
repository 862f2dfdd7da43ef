"""The fence index against a dict of sets."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry.scheduler_daemon.core.fence import FenceIndex

BLOCKS = st.lists(st.integers(0, 15), min_size=1, max_size=6)


def column(blocks):
    return np.array(blocks, dtype=np.uint32)


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "hit"]), BLOCKS), max_size=50))
def test_the_fence_index_is_a_dict_of_sets(moves):
    fence = FenceIndex(16)
    twin: dict[int, set[int]] = {}
    jobs: dict[int, list[int]] = {}
    for number, (move, blocks) in enumerate(moves, start=1):
        if move == "add":
            jobs[number] = blocks
            fence.add(number, column(blocks))
            for block in blocks:
                twin.setdefault(block, set()).add(number)
        elif move == "remove" and jobs:
            job = sorted(jobs)[blocks[0] % len(jobs)]
            mine = jobs.pop(job)
            fence.remove(job, column(mine))
            for block in set(mine):
                twin[block].discard(job)
                if not twin[block]:
                    del twin[block]
        assert fence.hit(column(blocks)) == sorted({job for block in blocks for job in twin.get(block, ())})
        assert fence.pairs() == {(block, job) for block, readers in twin.items() for job in readers}
        assert fence.num_entries == len(fence.pairs())
