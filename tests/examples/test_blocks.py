"""The block pool: prefix keys, sharing, eviction from the tail of the longest unused chain."""

from hypothesis import given, settings
from hypothesis import strategies as st
from reference_engine.blocks import BlockPool, block_keys


def test_a_key_names_its_whole_prefix() -> None:
    one, two = block_keys([1, 2, 3, 4, 5, 6], 2), block_keys([9, 2, 3, 4, 5, 6], 2)
    assert len(one) == 3
    assert not set(one) & set(two)
    assert block_keys([1, 2, 3, 4, 7], 2) == one[:2]


def test_keys_go_on_from_known_ones() -> None:
    tokens = list(range(11))
    assert block_keys(tokens, 2, block_keys(tokens[:5], 2)) == block_keys(tokens, 2)


def test_a_released_chain_is_found_again_until_its_blocks_are_taken_from_its_tail() -> None:
    pool, keys = BlockPool(4), block_keys(range(6), 2)
    blocks = pool.take(3)
    assert blocks is not None
    for block, key in zip(blocks, keys, strict=True):
        pool.commit(block, key)
    pool.release(blocks)
    assert pool.match(keys) == blocks
    assert pool.take(2) == [3, blocks[2]]
    assert pool.match(keys) == blocks[:2]
    assert pool.evictions == 1


def test_held_blocks_are_not_taken() -> None:
    pool, keys = BlockPool(2), block_keys(range(2), 2)
    (block,) = pool.take(1) or []
    pool.commit(block, keys[0])
    pool.release([block])
    pool.hold([block])
    assert pool.take(2) is None
    assert pool.take(1) == [1]


@settings(deadline=None)  # a busy machine is no failure
@given(st.lists(st.tuples(st.sampled_from(["take", "hold", "release"]), st.integers(0, 5)), max_size=60))
def test_every_block_is_free_or_held_and_never_given_twice(moves: list[tuple[str, int]]) -> None:
    pool, owners, counter = BlockPool(5), [], 0
    names: dict[int, bytes] = {}
    for move, number in moves:
        if move == "take":
            blocks = pool.take(number)
            assert (blocks is None) == (number > 5 - len({b for owner in owners for b in owner}))
            if blocks:
                assert not set(blocks) & {b for owner in owners for b in owner}
                owners.append(blocks)
                for block in blocks:
                    counter += 1
                    names[block] = counter.to_bytes(32, "big")
                    pool.commit(block, names[block])
        elif move == "hold" and number in names and pool.match([names[number]]):
            pool.hold([number])
            owners.append([number])
        elif move == "release" and owners:
            pool.release(owners.pop(number % len(owners)))
        assert pool.num_free == 5 - len({b for owner in owners for b in owner})
