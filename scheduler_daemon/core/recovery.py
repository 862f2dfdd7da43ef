"""Going on where an earlier daemon ended: its slot table, and its workers, which may still be copying (rule 10).

    table ──▶ READY and whole: an entry again, the oldest generation to be evicted first
         └──▶ WRITING, QUARANTINED, torn, of an ended epoch, or twice: FREE
    workers listed ──▶ awaited ── drained, or reaped ──▶ none left: stores are accepted

What READY slots hold is served at once. A slot that was being written may be written still, by a worker
that knows nothing of this daemon; so no slot at all is given away until every such worker has said that
it is done or is dead.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

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
from kvferry.units import counted

I64: TypeAlias = npt.NDArray[np.int64]
Column: TypeAlias = npt.NDArray[Any]

MANY = 16  # namespaces; beyond that a sort is quicker
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
    entries = _entries(desk, table, slots)
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


def _entries(desk: Desk, table: Table, slots: I64) -> list[Entry]:
    """Entries of READY slots, oldest first, in their indexes: none of an ended epoch, of two of one key the newer."""
    words = table.view(np.uint64).reshape(len(table), RECORD.itemsize // 8)
    columns = [words[slots, 2], words[slots, 3], table["epoch"][slots], table["group"][slots]]
    raw = np.ascontiguousarray(table["key"][slots]).tobytes()
    sizes = table["key_bytes"][slots]
    found = np.full(len(slots), None, dtype=object)
    homes: list[KeyIndex] = []
    for same in _alike(columns):
        low, high, epoch, group = (column[same[0]] for column in columns)
        digest = low.tobytes() + high.tobytes()
        if desk.namespaces.epoch_of(digest) == epoch:
            home = desk.namespaces.recover(digest, people.NUM_GROUPS).groups[group]
            homes.append(home)
            starts = (same * MAX_KEY_BYTES).tolist()
            found[same] = home.put(raw, starts, sizes[same].tolist(), slots[same].tolist())
    entries = [entry for entry in found.tolist() if entry is not None]
    if sum(home.num for home in homes) < len(entries):
        entries = [entry for entry in entries if entry.home.find([entry.key])[0] is entry]
    return entries


def _alike(columns: Sequence[Column]) -> Iterator[I64]:
    """Positions at which all columns are equal, ascending, group after group. Few large groups cost no sort."""
    left = np.arange(len(columns[0]))
    for _ in range(MANY):
        if not len(left):
            return
        same = np.ones(len(left), dtype=np.bool_)
        for column in columns:
            same &= column[left] == column[left[0]]
        yield left[same]
        left = left[~same]
    order = left[np.lexsort([column[left] for column in columns])]
    changes = np.zeros(max(0, len(order) - 1), dtype=np.bool_)
    for column in columns:
        changes |= column[order[1:]] != column[order[:-1]]
    if len(order):
        yield from np.split(order, np.flatnonzero(changes) + 1)


# ---- the workers -----------------------------------------------------------------------------------


def await_workers(desk: Desk, workers: Iterable[int]) -> None:
    """The supervisor's list of those that outlived the last daemon."""
    was = desk.is_restarting
    desk.list_awaited = False
    desk.awaited |= set(workers) - desk.reaped - desk.drained
    if desk.awaited:
        desk.awaited_due_ns = desk.now_ns + desk.settings.awaited_ns
        desk.out.append(Note(f"stores wait until {counted(len(desk.awaited), 'worker has', 'workers have')} drained"))
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
