"""The slot table against a list of words, and its records against what they must say of themselves."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry.scheduler_daemon.core.slots import RECORD, SlotState, SlotTable, checksums, zeroed_table

SLOTS = 8
MOVES = st.lists(
    st.tuples(
        st.sampled_from(["take", "commit", "quarantine", "free", "retake"]), st.integers(0, 7), st.integers(1, 4)
    ),
    max_size=50,
)


def write(table: SlotTable, slots: list[int]) -> list[int]:
    keys = [bytes([slot + 1] * 32) for slot in slots]
    return table.write(slots, keys, key_bytes=32, groups=1, namespace=b"n" * 16, epoch=3, payload_bytes=4096).tolist()


@given(MOVES)
def test_the_slot_table_is_a_list_of_states(moves):
    table = SlotTable(SLOTS)
    twin = [SlotState.FREE] * SLOTS
    generations: set[int] = set()
    for move, n, many in moves:
        slot = np.array([n], dtype=np.uint32)
        if move == "take":
            taken = table.take(many)
            assert len(taken) == min(many, twin.count(SlotState.FREE))
            assert all(twin[s] is SlotState.FREE for s in taken)
            if taken:
                fresh = write(table, taken)
                assert not generations & set(fresh)
                generations.update(fresh)
            for s in taken:
                twin[s] = SlotState.WRITING
        elif move == "commit" and twin[n] is SlotState.WRITING:
            table.commit(slot)
            twin[n] = SlotState.READY
        elif move == "retake" and twin[n] is SlotState.READY:
            table.retake(1)
            write(table, [n])
            twin[n] = SlotState.WRITING
        elif move == "quarantine" and twin[n] in (SlotState.WRITING, SlotState.READY):
            table.quarantine(slot, twin[n])
            twin[n] = SlotState.QUARANTINED
        elif move == "free" and twin[n] is not SlotState.FREE:
            table.free(slot, twin[n])
            twin[n] = SlotState.FREE
        table.check()
        assert [table.state_of(s) for s in range(SLOTS)] == twin


def test_a_record_says_all_that_a_later_daemon_must_know():
    assert RECORD.itemsize == 128
    memory = zeroed_table(4)
    table = SlotTable(4, lambda _: memory)
    slots = table.take(2)
    generations = write(table, slots)
    for slot, generation in zip(slots, generations, strict=True):
        record = memory[slot]
        assert record["format"] == 1 and record["state"] == SlotState.WRITING
        assert record["group"] == 1 and record["epoch"] == 3 and record["payload_bytes"] == 4096
        assert record["generation"] == generation and record["key_bytes"] == 32
        assert record["key"].tobytes() == bytes([slot + 1] * 32) + bytes(32)
        assert record["namespace"].tobytes() == b"n" * 16
    table.commit(np.array(slots, dtype=np.uint32))
    assert memory["state"].tolist() == [SlotState.READY, SlotState.READY, 0, 0]


@given(st.integers(0, 127), st.integers(1, 255))
def test_a_changed_byte_shows_in_the_checksum(at, flip):
    memory = zeroed_table(1)
    table = SlotTable(1, lambda _: memory)
    write(table, table.take(1))
    memory.view(np.uint8)[at] ^= flip
    assert checksums(memory)[0] != memory["checksum"][0]


def test_what_was_freed_together_is_taken_together():
    table = SlotTable(16)
    first, second = table.take(4), table.take(4)
    assert first == [0, 1, 2, 3] and second == [4, 5, 6, 7]
    write(table, first + second)
    table.free(np.array(first, dtype=np.uint32), SlotState.WRITING)
    assert table.take(4) == first
