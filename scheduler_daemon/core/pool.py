"""The host pool as the daemon sees it: entries, their slots, and who holds them. Sums are kept, not counted.

    survey ──▶ reserve ──▶ publish                   a store: what is missing, places for it, loadable
                   └─────▶ drop ──▶ let_go           ... or not, and the slots once no copy touches them
    pin ──▶ unpin                                    loads and leases

An entry is in the Lru exactly while it is READY, in its index and unpinned. Placing never evicts an
entry of the chain that is being stored: its leading keys are worth more than its later ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.scheduler_daemon.core.index import Entry, KeyIndex, Lru
from kvferry.scheduler_daemon.core.slots import MakeTable, SlotState, SlotTable, zeroed_table

U32: TypeAlias = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Survey:
    """What storing one chain would take."""

    accepted: int  # leading keys that are held, on their way, or can be placed
    missing: list[int]  # positions of those that must be copied, each key once
    held: list[Entry]  # READY entries among the accepted ones, in prefix order
    full: bool  # the pool, and not `max_missing`, was what stopped it


class HostPool:
    """All slots of one pool geometry."""

    __slots__ = ("lru", "num_leased", "num_pinned", "slots")

    def __init__(self, num_slots: int, make_table: MakeTable = zeroed_table, generation: int = 0) -> None:
        self.slots = SlotTable(num_slots, make_table, generation)
        self.lru = Lru()
        self.num_pinned = 0  # READY slots with a pin
        self.num_leased = 0  # READY slots with a lease

    @property
    def num_slots(self) -> int:
        """All slots."""
        return self.slots.num_slots

    @property
    def is_empty(self) -> bool:
        """Whether no slot is in use."""
        return self.slots.num_free == self.slots.num_slots

    def adopt(self, kept: npt.NDArray[np.bool_], entries: list[Entry]) -> None:
        """Begin with a table that an earlier daemon wrote: READY entries, oldest first, of the slots `kept`."""
        self.slots.adopt(kept)
        self.lru.fill(entries)

    # ---- stores --------------------------------------------------------------------------------------

    def survey(self, index: KeyIndex, keys: Sequence[bytes], max_missing: int) -> Survey:
        """Walk a chain up to the first key that has no place; nothing changes.

        Costs the keys up to there: with nothing free and nothing to evict, up to the first missing one.
        """
        room = self.slots.num_free + self.lru.num
        missing: dict[bytes, int] = {}
        held: list[Entry] = []
        needed = 0  # places that the chain so far takes or keeps from eviction
        accepted = len(keys)
        full = False
        for at, (key, entry) in enumerate(zip(keys, index.walk(keys), strict=True)):
            if entry is None:
                if key in missing:
                    continue
                if needed >= room or len(missing) >= max_missing:
                    accepted, full = at, needed >= room
                    break
                missing[key] = at
                needed += 1
            elif not entry.job:
                if not entry.pins:
                    # Only when something must be evicted for this chain does keeping this one take a place.
                    if missing and needed >= room:
                        accepted, full = at, True
                        break
                    needed += 1
                held.append(entry)
        return Survey(accepted, list(missing.values()), held, full)

    def reserve(self, index: KeyIndex, keys: Sequence[bytes], held: Sequence[Entry], job: int) -> list[Entry]:
        """Places for the missing keys of a survey, made by evicting where none is free; `held` is touched first."""
        self.lru.touch(held)
        slots = self.slots.take(len(keys))
        num_evicted = len(keys) - len(slots)
        for entry in self.lru.pop(num_evicted):
            slots.append(entry.slot)
            home = entry.home
            assert home is not None
            home.remove(entry)
        if num_evicted:
            self.slots.retake(num_evicted)
            slots.sort()
        return index.add(keys, slots, job)

    def publish(self, entries: Sequence[Entry], slots: U32, parent: Entry | None = None) -> None:
        """These have been written on every rank: loadable from now on, and to be evicted before `parent`."""
        self.slots.commit(slots)
        for entry in entries:
            entry.job = 0
        self.lru.push_chain(entries, parent)

    def abandon(self, entries: Sequence[Entry], slots: U32) -> None:
        """These, being written, will not be published: misses from now on, slots in quarantine."""
        for entry in entries:
            if entry.home is not None:
                entry.home.remove(entry)
        self.slots.quarantine(slots, SlotState.WRITING)

    def let_go(self, slots: U32) -> None:
        """No copy touches these quarantined slots any more."""
        self.slots.free(slots, SlotState.QUARANTINED)

    def forget(self, entries: Sequence[Entry]) -> None:
        """READY entries whose keys are misses already: slots free, in quarantine while somebody reads them."""
        free, held = [], []
        for entry in entries:
            if entry.pins:
                held.append(entry.slot)
                self.num_pinned -= 1
                self.num_leased -= bool(entry.leases)
            else:
                self.lru.unlink(entry)
                free.append(entry.slot)
        if free:
            self.slots.free(np.array(free, dtype=np.uint32), SlotState.READY)
        if held:
            self.slots.quarantine(np.array(held, dtype=np.uint32), SlotState.READY)

    # ---- reads ---------------------------------------------------------------------------------------

    def pin(self, entries: Sequence[Entry]) -> None:
        """Hold READY entries against eviction."""
        for entry in entries:
            if not entry.pins:
                self.lru.unlink(entry)
                self.num_pinned += 1
            entry.pins += 1

    def unpin(self, entries: Sequence[Entry]) -> None:
        """Let go of pinned entries; those that nobody else holds are now the newest, the head last."""
        for entry in reversed(entries):
            entry.pins -= 1
            if entry.pins:
                continue
            if entry.home is None:
                self.let_go(np.array([entry.slot], dtype=np.uint32))
            else:
                self.num_pinned -= 1
                self.lru.push(entry)

    def num_new_leases(self, entries: Sequence[Entry]) -> int:
        """Slots that leasing these would lease and no other lease holds."""
        return sum(1 for entry in entries if not entry.leases)

    def lease(self, entries: Sequence[Entry]) -> None:
        """Pin on behalf of a lease."""
        self.pin(entries)
        for entry in entries:
            if not entry.leases:
                self.num_leased += 1
            entry.leases += 1

    def unlease(self, entries: Sequence[Entry]) -> None:
        """Undo `lease`."""
        for entry in entries:
            entry.leases -= 1
            if not entry.leases and entry.home is not None:
                self.num_leased -= 1
        self.unpin(entries)

    def spoil(self, entries: Sequence[Entry]) -> int:
        """Forget READY, pinned entries whose slots hold the wrong bytes; how many there were.

        Their slots stay in quarantine until the last pin is gone.
        """
        num = 0
        for entry in entries:
            if entry.home is None:
                continue
            entry.home.remove(entry)
            self.slots.quarantine(np.array([entry.slot], dtype=np.uint32), SlotState.READY)
            self.num_pinned -= 1
            self.num_leased -= bool(entry.leases)
            num += 1
        return num
