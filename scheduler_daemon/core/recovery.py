"""Going on where an earlier daemon ended: its slot table, and its workers, which may still be copying (rule 10).

    table ──▶ READY and whole: an entry again, the oldest generation to be evicted first
         └──▶ WRITING, QUARANTINED, torn, of an ended epoch, or twice: FREE
    workers listed ──▶ awaited ── drained, or reaped ──▶ none left: stores are accepted

What READY slots hold is served at once. A slot that was being written may be written still, by a worker
that knows nothing of this daemon; so no slot at all is given away until every such worker has said that
it is done or is dead.
"""

from collections.abc import Iterable

import numpy as np

from kvferry.proto.control import Drained
from kvferry.proto.ids import LinkId
from kvferry.proto.limits import MAX_KEY_BYTES
from kvferry.proto.outcome import Outcome
from kvferry.scheduler_daemon.core import people
from kvferry.scheduler_daemon.core.api import Note, Recovered
from kvferry.scheduler_daemon.core.desk import Desk
from kvferry.scheduler_daemon.core.index import Entry, KeyIndex
from kvferry.scheduler_daemon.core.pool import HostPool
from kvferry.scheduler_daemon.core.slots import RECORD, SlotState, Table, sound

# Each boot gives generations of its own, beyond any that an earlier one gave: the records cannot tell which those
# were, as the highest may have stood in a record that is torn now, or was dropped by a daemon that died since.
BOOT_SHIFT = 40


# ---- the table -------------------------------------------------------------------------------------


def recover(desk: Desk, left: Recovered) -> None:
    """Take an earlier daemon's table over; before the first event. Changes the records of what is dropped."""
    table = left.table
    desk.geometry.restore(left.shape.slot_bytes, left.shape.pool_bytes)
    desk.namespaces.keep_epochs(left.epochs)
    whole = sound(table)
    state = table["state"]
    ready = whole & (state == SlotState.READY)
    ready &= (table["key_bytes"] > 0) & (table["key_bytes"] <= MAX_KEY_BYTES) & (table["group"] < people.NUM_GROUPS)
    ready &= (table["payload_bytes"] > 0) & (table["payload_bytes"] <= sum(left.shape.slot_bytes))
    highest = int(table["generation"][whole].max(initial=0))
    slots = np.flatnonzero(ready)
    slots = slots[np.argsort(table["generation"][slots], kind="stable")]
    homes = _homes(desk, table, slots)
    entries = _entries(table, slots.tolist(), homes)
    kept = np.zeros(len(table), dtype=np.bool_)
    kept[[entry.slot for entry in entries]] = True
    num_lost = int(np.count_nonzero(~kept & ~(whole & (state == SlotState.FREE)) & (table["format"] != 0)))
    desk.pool = HostPool(len(table), lambda _: table, max(highest, left.boots << BOOT_SHIFT))
    desk.pool.adopt(kept, entries)
    desk.counters.add("keys_recovered", len(entries))
    desk.counters.add("records_dropped", num_lost)
    desk.recovered_only = desk.list_awaited = True
    desk.out.append(
        Note(f"recovered {len(entries)} keys in {len(table)} slots; {num_lost} were being written or are not whole")
    )


def _homes(desk: Desk, table: Table, slots: np.typing.NDArray[np.int64]) -> list[KeyIndex | None]:
    """The index of each READY slot's key; None if its epoch has ended."""
    chosen = table[slots]
    words = chosen.view(np.uint64).reshape(len(chosen), RECORD.itemsize // 8)
    names = np.ascontiguousarray(words[:, 2:4])
    # One number a (namespace, epoch, group): few, so that the loop over all keys asks no dictionary.
    mixed = names[:, 0] ^ (names[:, 1] * np.uint64(0x9E37_79B9_7F4A_7C15))
    mixed ^= (chosen["epoch"].astype(np.uint64) << np.uint64(8)) ^ chosen["group"]
    _, firsts, which = np.unique(mixed, return_index=True, return_inverse=True)
    indexes: list[KeyIndex | None] = []
    for first in firsts.tolist():
        digest, epoch, group = names[first].tobytes(), int(chosen["epoch"][first]), int(chosen["group"][first])
        current = desk.namespaces.epoch_of(digest) == epoch
        indexes.append(desk.namespaces.recover(digest, people.NUM_GROUPS).groups[group] if current else None)
    same = (names == names[firsts][which]).all(axis=1) & (chosen["epoch"] == chosen["epoch"][firsts][which])
    homes = [indexes[number] for number in which.tolist()]
    for at in np.flatnonzero(~same).tolist():
        homes[at] = None  # two names that mix to one number: rarer than a disk that lies
    return homes


def _entries(table: Table, slots: list[int], homes: list[KeyIndex | None]) -> list[Entry]:
    """Entries of slots, oldest first, one a key: of two the newer; entered in their indexes."""
    raw = np.ascontiguousarray(table["key"][slots]).tobytes()
    sizes = table["key_bytes"][slots].tolist()
    starts = range(0, len(raw), MAX_KEY_BYTES)
    entries = [
        home.put(raw[at : at + size], slot)
        for slot, home, size, at in zip(slots, homes, sizes, starts, strict=True)
        if home is not None
    ]
    doubled = {id(home): home for home in homes if home is not None}
    if sum(home.recount() for home in doubled.values()) < len(entries):
        entries = [entry for entry in entries if entry.home is not None and entry.home.find([entry.key])[0] is entry]
    return entries


# ---- the workers -----------------------------------------------------------------------------------


def await_workers(desk: Desk, workers: Iterable[int]) -> None:
    """The supervisor's list of those that outlived the last daemon."""
    was = desk.is_restarting
    desk.list_awaited = False
    desk.awaited |= set(workers) - desk.reaped - desk.drained
    if desk.awaited:
        desk.awaited_due_ns = desk.now_ns + desk.settings.awaited_ns
        desk.out.append(Note(f"stores wait until {len(desk.awaited)} workers have drained"))
    elif was:
        desk.out.append(Note("no worker of an earlier daemon is left: stores are accepted"))


def take_drained(desk: Desk, link: LinkId, word: Drained) -> None:
    """A worker has nothing in flight but what this link tells it."""
    if word.boot != desk.settings.boot:
        desk.counters.add("drained_of_another_boot")
        return
    if word.worker in desk.reaped:
        desk.counters.add("drained_of_the_dead")
        return
    desk.drained.add(word.worker)
    people.has_drained(desk, word.worker)
    worker = desk.workers.get(word.worker)
    if worker is not None and worker.link != link:
        # It lost its link to this very boot, and with it all that it was told there.
        people.part(desk, worker, Outcome.CANCELLED)
