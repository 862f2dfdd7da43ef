"""Keys to entries, and the order in which entries may be evicted. Knows no slot states and no jobs.

    KeyIndex (one a namespace and KV group)          Lru (one for the whole pool)
      256 dicts by first key byte ──▶ Entry ◀──prev/next──▶ Entry ◀──▶ ... oldest first

One big dict would stop the daemon for tenths of a second each time it grows past a million entries; 256
small ones grow one at a time, in under a millisecond. Links inside the entries make the LRU exact at the
cost of four stores a touch, and no second table. Whole keys are compared, never digests of them.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

NUM_SHARDS: Final = 256


class Entry:
    """One key's place. In the Lru exactly while READY, held by the index and pinned by nobody."""

    __slots__ = ("home", "job", "key", "leases", "next", "pins", "prev", "slot")

    def __init__(self, home: "KeyIndex", key: bytes, slot: int, job: int) -> None:
        self.home: KeyIndex | None = home  # None: dropped, loadable no more
        self.key = key
        self.slot = slot
        self.job = job  # the store that writes it; 0: READY
        self.pins = 0  # loads and leases that hold it
        self.leases = 0  # leases among them
        self.prev: Entry | None = None
        self.next: Entry | None = None


class Lru:
    """Entries that may be evicted, oldest first. Counted, so that "nothing to evict" costs nothing."""

    __slots__ = ("_ring", "num")

    def __init__(self) -> None:
        self._ring = Entry(None, b"", -1, 0)  # type: ignore[arg-type]  # the ring's own link, never handed out
        self._ring.prev = self._ring.next = self._ring
        self.num = 0

    def push(self, entry: Entry) -> None:
        """Add as the newest."""
        ring = self._ring
        last = ring.prev
        assert last is not None
        entry.prev = last
        entry.next = ring
        last.next = ring.prev = entry
        self.num += 1

    def fill(self, entries: Sequence[Entry]) -> None:
        """Add to an empty list, oldest first."""
        ring = last = self._ring
        for entry in entries:
            entry.prev = last
            last.next = entry
            last = entry
        last.next = ring
        ring.prev = last
        self.num = len(entries)

    def unlink(self, entry: Entry) -> None:
        """Take out an entry that is in the list."""
        before, after = entry.prev, entry.next
        assert before is not None and after is not None
        before.next = after
        after.prev = before
        entry.prev = entry.next = None
        self.num -= 1

    def touch(self, chain: Sequence[Entry]) -> None:
        """Make these the newest, in prefix order: the tail first, so that the head is evicted last.

        Entries that are not in the list (pinned, or being written) stay out of it.
        """
        ring = self._ring
        for entry in reversed(chain):
            before, after = entry.prev, entry.next
            if before is None or after is None:
                continue
            before.next = after
            after.prev = before
            last = ring.prev
            assert last is not None
            entry.prev = last
            entry.next = ring
            last.next = ring.prev = entry

    def push_chain(self, chain: Sequence[Entry], parent: Entry | None = None) -> None:
        """Add entries in prefix order, none of which is in the list: the head becomes the newest.

        With a `parent` that is in the list they go right behind it: to be evicted just before it is.
        """
        after = self._ring
        if parent is not None and parent.prev is not None:
            after = parent
        last = after.prev
        assert last is not None
        for entry in reversed(chain):
            entry.prev = last
            last.next = entry
            last = entry
        last.next = after
        after.prev = last
        self.num += len(chain)

    def pop(self, num: int) -> list[Entry]:
        """Take out the `num` oldest, oldest first; the list must have as many."""
        assert num <= self.num, f"{num} of {self.num} entries"
        popped = []
        ring = self._ring
        entry = ring.next
        for _ in range(num):
            assert entry is not None
            popped.append(entry)
            after = entry.next
            entry.prev = entry.next = None
            entry = after
        assert entry is not None
        ring.next = entry
        entry.prev = ring
        self.num -= num
        return popped

    def __iter__(self) -> Iterator[Entry]:
        entry = self._ring.next
        while entry is not None and entry is not self._ring:
            yield entry
            entry = entry.next


class KeyIndex:
    """All entries of one namespace and group, asked a chain at a time."""

    __slots__ = ("_shards", "num")

    def __init__(self) -> None:
        self._shards: list[dict[bytes, Entry]] = [{} for _ in range(NUM_SHARDS)]
        self.num = 0

    def find(self, keys: Iterable[bytes]) -> list[Entry | None]:
        """The entry of each key, None where there is none; (n,) in, (n,) out."""
        shards = self._shards
        return [shards[key[0]].get(key) for key in keys]

    def walk(self, keys: Iterable[bytes]) -> Iterator[Entry | None]:
        """Like `find`, but costs only the keys that the caller walks."""
        shards = self._shards
        for key in keys:
            yield shards[key[0]].get(key)

    def leading(self, keys: Iterable[bytes]) -> tuple[list[Entry], Entry | None]:
        """The entries of the leading READY keys, and the entry that stopped the walk, if there is one."""
        shards = self._shards
        hits: list[Entry] = []
        for key in keys:
            entry = shards[key[0]].get(key)
            if entry is None or entry.job:
                return hits, entry
            hits.append(entry)
        return hits, None

    def add(self, keys: Sequence[bytes], slots: Sequence[int], job: int) -> list[Entry]:
        """New entries, being written by `job`, of keys that have none."""
        shards = self._shards
        added = []
        for key, slot in zip(keys, slots, strict=True):
            entry = shards[key[0]][key] = Entry(self, key, slot, job)
            added.append(entry)
        self.num += len(added)
        return added

    def remove(self, entry: Entry) -> None:
        """Forget an entry of this index: its key is a miss from now on."""
        del self._shards[entry.key[0]][entry.key]
        entry.home = None
        self.num -= 1

    def put(self, raw: bytes, starts: Sequence[int], sizes: Sequence[int], slots: Sequence[int]) -> list[Entry]:
        """READY entries of recovered slots; their keys are raw[start : start + size], of equal ones the last stays."""
        shards = self._shards
        added: list[Entry] = []
        append = added.append
        for start, size, slot in zip(starts, sizes, slots, strict=True):
            key = raw[start : start + size]
            entry = shards[key[0]][key] = Entry(self, key, slot, 0)
            append(entry)
        self.num = sum(map(len, shards))
        return added

    def take_some(self, num: int) -> list[Entry]:
        """Forget up to `num` entries, any, and give them to the caller."""
        taken: list[Entry] = []
        for shard in self._shards:
            while shard and len(taken) < num:
                entry = shard.popitem()[1]
                entry.home = None
                taken.append(entry)
            if len(taken) == num:
                break
        self.num -= len(taken)
        return taken

    def __iter__(self) -> Iterator[Entry]:
        for shard in self._shards if self.num else ():
            if shard:
                yield from shard.values()
