"""The slot table: one self-describing record a slot, and the list of free ones. Never a byte of KV.

          take                commit
    FREE ─────▶ WRITING ───────────────▶ READY
      ▲            │ free                 │ free (evicted, dropped)   retake: READY ─▶ WRITING at once
      ├────────────┴──────────────────────┤
      │            quarantine             │ quarantine (dropped while it is read)
      └──────────── QUARANTINED ◀─────────┘

A record says WRITING, with a generation never used before, before any plan names its slot; READY only once every rank's
bytes are there; QUARANTINED while a copy that nobody wants any more may still touch it. The shell may
give a table that lies in a file: a later daemon can then read what this one knew.

Free slots are a stack: what was freed together is taken together, so jobs get neighbouring slots and the
worker gets long runs. A heap of intervals would find longer ones and cost every job for it.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

U32: TypeAlias = npt.NDArray[np.uint32]
U64: TypeAlias = npt.NDArray[np.uint64]
Table: TypeAlias = npt.NDArray[Any]
MakeTable: TypeAlias = Callable[[int], Table]

FORMAT: Final = 1
RECORD: Final = np.dtype(
    [
        ("format", "<u2"),
        ("state", "u1"),
        ("group", "u1"),
        ("key_bytes", "u1"),
        ("_pad0", "V3"),
        ("generation", "<u8"),
        ("namespace", "V16"),
        ("epoch", "<u4"),
        ("_pad1", "V4"),
        ("payload_bytes", "<u8"),  # all ranks together
        ("key", "V64"),
        ("checksum", "<u8"),
        ("_pad2", "V8"),
    ]
)
WORDS: Final = RECORD.itemsize // 8
CHECKSUM_WORD: Final = 14
# Odd multipliers: a change of any one word changes the sum. Linear, so that a change of state alone
# moves the checksum by a known step and commit need not read the record.
_WEIGHTS: Final = np.array([pow(0x9E37_79B9_7F4A_7C15, i + 1, 1 << 64) | 1 for i in range(WORDS)], dtype=np.uint64)
_WEIGHTS[CHECKSUM_WORD] = 0
_SEED: Final = np.uint64(0x6B76_6665_7272_7931)
_STATE_SHIFT: Final = 16  # the state is the third byte of word 0
_MASK: Final = (1 << 64) - 1
_CHUNK: Final = 8192


class SlotState(IntEnum):
    """What a record says of its slot."""

    FREE = 0
    WRITING = 1
    READY = 2
    QUARANTINED = 3


def zeroed_table(num_slots: int) -> Table:
    """A table in plain memory."""
    return np.zeros(num_slots, dtype=RECORD)


def checksums(records: Table) -> U64:
    """What the checksum of each record must be; shape (n,)."""
    words = np.ascontiguousarray(records).view(np.uint64).reshape(len(records), WORDS)
    sums: U64 = (words * _WEIGHTS).sum(axis=1, dtype=np.uint64) ^ _SEED
    return sums


def sound(table: Table) -> npt.NDArray[np.bool_]:
    """Whether each record is whole: of this format, with the checksum of its words. One never written is not."""
    whole = table["format"] == FORMAT
    for start in range(0, len(table), _CHUNK):  # in pieces that fit the processor's cache
        part = table[start : start + _CHUNK]
        whole[start : start + _CHUNK] &= checksums(part) == part["checksum"]
    return np.asarray(whole)


class SlotTable:
    """All slots of the pool. Counts are kept, so that asking for one costs nothing."""

    __slots__ = (
        "_checksum",
        "_free",
        "_generation",
        "_state",
        "_table",
        "num_quarantined",
        "num_ready",
        "num_slots",
        "num_writing",
    )

    def __init__(self, num_slots: int, make_table: MakeTable = zeroed_table, generation: int = 0) -> None:
        """`generation` is the highest one ever given: another table over the same pool goes on from it."""
        self.num_slots = num_slots
        self._table = make_table(num_slots)
        self._state = self._table["state"]
        self._checksum = self._table["checksum"]
        self._free = list(range(num_slots - 1, -1, -1))
        self._generation = generation
        self.num_writing = self.num_ready = self.num_quarantined = 0

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    @property
    def generation(self) -> int:
        """The highest generation given."""
        return self._generation

    def adopt(self, kept: npt.NDArray[np.bool_]) -> None:
        """Go on with records that an earlier daemon wrote: READY where `kept`, all others FREE."""
        rest = np.flatnonzero(~kept)
        drop = rest[(self._table["format"][rest] != 0) | (self._state[rest] != 0)]  # a torn one may lack either
        self._table[drop] = np.zeros((), dtype=RECORD)
        self._free = rest[::-1].tolist()
        self.num_ready = int(np.count_nonzero(kept))

    def take(self, num: int) -> list[int]:
        """Up to `num` free slots, neighbours where possible. The caller calls `write` before a plan names them."""
        if num <= 0:
            return []
        taken = self._free[-num:]
        del self._free[-num:]
        taken.reverse()
        self.num_writing += len(taken)
        return taken

    def retake(self, num: int) -> None:
        """Count `num` READY slots, just evicted, as taken for writing."""
        self.num_ready -= num
        self.num_writing += num

    def write(
        self,
        slots: Sequence[int] | U32,
        keys: Sequence[bytes],
        *,
        key_bytes: int,
        groups: Sequence[int] | npt.NDArray[Any] | int,
        namespace: bytes,
        epoch: int,
        payload_bytes: int,
    ) -> U64:
        """Write WRITING records of taken slots, all of one namespace; their new generations, shape (n,)."""
        n = len(slots)
        records = np.zeros(n, dtype=RECORD)
        generations = np.arange(self._generation + 1, self._generation + 1 + n, dtype=np.uint64)
        self._generation += n
        records["format"] = FORMAT
        records["state"] = SlotState.WRITING
        records["group"] = groups
        records["key_bytes"] = key_bytes
        records["generation"] = generations
        records["epoch"] = epoch
        records["payload_bytes"] = payload_bytes
        raw = records.view(np.uint8).reshape(n, RECORD.itemsize)
        raw[:, 16:32] = np.frombuffer(namespace[:16].ljust(16, b"\0"), dtype=np.uint8)
        raw[:, 48 : 48 + key_bytes] = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(n, key_bytes)
        records["checksum"] = checksums(records)
        self._table[np.asarray(slots, dtype=np.int64)] = records
        return generations

    def generations(self, slots: U32) -> U64:
        """The generation of each slot's present filling; (n,) in, (n,) out."""
        found: U64 = self._table["generation"][slots]
        return found

    def commit(self, slots: U32) -> None:
        """WRITING -> READY: all ranks' bytes are there."""
        self._move(slots, SlotState.WRITING, SlotState.READY)
        self.num_writing -= len(slots)
        self.num_ready += len(slots)

    def quarantine(self, slots: U32, was: SlotState) -> None:
        """Take slots out of use while a copy may still touch them."""
        self._move(slots, was, SlotState.QUARANTINED)
        self._leave(was, len(slots))
        self.num_quarantined += len(slots)

    def free(self, slots: U32, was: SlotState) -> None:
        """Give slots back: nothing touches them any more."""
        self._move(slots, was, SlotState.FREE)
        self._leave(was, len(slots))
        self._free.extend(slots[::-1].tolist())

    def state_of(self, slot: int) -> SlotState:
        """What the record of `slot` says."""
        return SlotState(int(self._state[slot]))

    def check(self) -> None:
        """AssertionError naming the sums that disagree, or a record whose checksum is not its own."""
        counts = np.bincount(self._state, minlength=4).tolist()
        kept = [self.num_free, self.num_writing, self.num_ready, self.num_quarantined]
        assert counts == kept, f"free, writing, ready, quarantined: records say {counts}, counts say {kept}"
        assert sum(kept) == self.num_slots, f"{kept} do not add up to {self.num_slots} slots"
        assert len(set(self._free)) == len(self._free), "a slot is free twice"
        written = self._table["format"] == FORMAT
        bad = np.flatnonzero(written & (checksums(self._table) != self._checksum))
        assert not len(bad), f"records of slots {bad[:8].tolist()} do not match their checksum"

    def _leave(self, was: SlotState, num: int) -> None:
        if was is SlotState.WRITING:
            self.num_writing -= num
        elif was is SlotState.READY:
            self.num_ready -= num
        else:
            self.num_quarantined -= num

    def _move(self, slots: U32, was: SlotState, to: SlotState) -> None:
        # The checksum is (sum of word * weight) ^ seed: undo the seed, move the sum, put the seed back.
        step = ((to - was) << _STATE_SHIFT) * int(_WEIGHTS[0]) & _MASK
        self._state[slots] = to
        self._checksum[slots] = ((self._checksum[slots] ^ _SEED) + np.uint64(step)) ^ _SEED
