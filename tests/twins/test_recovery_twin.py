"""Recovery of a table in one sweep over arrays, against the rules read record by record."""

import random
import struct

import numpy as np
import pytest

from kvferry.proto.ids import BootId
from kvferry.scheduler_daemon.core import recovery
from kvferry.scheduler_daemon.core.api import CoreSettings, Recovered, TableShape
from kvferry.scheduler_daemon.core.core import Core
from kvferry.scheduler_daemon.core.slots import RECORD, SlotState, Table, checksums

SLOT_BYTES = 8192
FIELDS = struct.Struct(
    "<HBBB3xQ16sI4xQ64sQ8x"
)  # format state group key_bytes generation namespace epoch payload key sum


def random_table(dice: random.Random, num_slots: int) -> tuple[Table, tuple[tuple[bytes, int], ...]]:
    """Records as any history may have left them, some of which no history could."""
    spaces = [dice.randbytes(16) for _ in range(dice.choice([1, 2, 5]))]
    epochs = tuple((space, dice.randrange(3)) for space in spaces if dice.random() < 0.5)
    if dice.random() < 0.3:
        epochs += ((bytes(16), dice.randrange(3)),)
    table = np.zeros(num_slots, dtype=RECORD)
    for slot in range(num_slots):
        if dice.random() < 0.1:
            continue  # never written
        record = table[slot : slot + 1]
        size = dice.choice([1, 4, 32, 64])
        key = bytes([dice.randrange(6)]) * size
        record["format"] = 1 if dice.random() < 0.98 else 9
        record["state"] = dice.choice([SlotState.READY] * 8 + list(SlotState))
        record["group"] = dice.choice([0] * 20 + [1])
        record["key_bytes"] = size if dice.random() < 0.98 else dice.choice([0, 65])
        record["generation"] = dice.randrange(1, 1 << dice.choice([8, 40]))
        record.view(np.uint8)[16:32] = np.frombuffer(dice.choice(spaces), dtype=np.uint8)
        record["epoch"] = dice.choice([0, 0, 0, 1, 2])
        record["payload_bytes"] = 4096 if dice.random() < 0.98 else dice.choice([0, SLOT_BYTES + 1])
        record.view(np.uint8)[48 : 48 + size] = np.frombuffer(key, dtype=np.uint8)
        record["checksum"] = checksums(record)
        if dice.random() < 0.05:
            record.view(np.uint8)[dice.randrange(RECORD.itemsize)] ^= 1 << dice.randrange(8)
    return table, epochs


def one_by_one(table: Table, epochs: dict[bytes, int]) -> dict[tuple[bytes, bytes], tuple[int, int]]:
    """(namespace, key) -> (generation, slot) of all that may be served."""
    served: dict[tuple[bytes, bytes], tuple[int, int]] = {}
    for slot in range(len(table)):
        raw = table[slot].tobytes()
        form, state, group, size, generation, space, epoch, payload, key, checksum = FIELDS.unpack(raw)
        if form != 1 or checksum != int(checksums(table[slot : slot + 1])[0]):
            continue
        if state != SlotState.READY or group or not 1 <= size <= 64 or not 1 <= payload <= SLOT_BYTES:
            continue
        if epoch != epochs.get(space, epochs.get(bytes(16), 0)):
            continue
        name = space, key[:size]
        served[name] = max(served.get(name, (0, -1)), (generation, slot))
    return served


@pytest.mark.parametrize("seed", range(150))
def test_the_sweep_finds_what_a_reader_of_records_finds(seed, monkeypatch):
    dice = random.Random(seed)
    monkeypatch.setattr(recovery, "MANY", dice.choice([0, 2, recovery.MANY]))
    num_slots = dice.choice([1, 7, 60, 300])
    table, epochs = random_table(dice, num_slots)
    expected = one_by_one(table, dict(epochs))
    shape = TableShape(num_slots, (SLOT_BYTES,), (SLOT_BYTES * num_slots,))
    core = Core(CoreSettings(boot=BootId(1), tp_size=1), recovered=Recovered(shape, table, epochs))
    core.check()
    desk = core._desk
    assert desk.pool is not None
    found = {
        (space.digest, entry.key): entry.slot for space in desk.namespaces for index in space.groups for entry in index
    }
    assert found == {name: slot for name, (_, slot) in expected.items()}
    order = [(int(table["generation"][entry.slot]), entry.slot) for entry in desk.pool.lru]
    assert order == sorted(order), "the oldest generation goes first"
    assert desk.pool.slots.num_free == num_slots - len(found)
    again = Core(CoreSettings(boot=BootId(2), tp_size=1), recovered=Recovered(shape, table, epochs))
    assert again.status()["slots"] == core.status()["slots"], "recovery may itself be cut short and repeated"
    assert desk.pool.slots.generation > max((generation for generation, _ in expected.values()), default=0)
