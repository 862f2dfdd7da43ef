"""Which engines may share KV: those whose keys, weights and bytes mean the same.

The identity is a digest of what all ranks report (facts and byte layout, rank by rank), the world size,
the key width, the client's own facts and the user's salt. It is known only once every rank has spoken.
Equal key bytes in different namespaces never meet: each has an index of its own.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvferry.scheduler_daemon.core.header import MAX_EPOCHS
from kvferry.scheduler_daemon.core.index import KeyIndex


def identity(
    *,
    world_size: int,
    key_bytes: int,
    rank_facts: Mapping[str, str],
    rank_layouts: Sequence[str],
    client_facts: Mapping[str, str],
    salt: bytes,
) -> str:
    """The hex digest of everything that equal keys depend on; `rank_layouts` by rank."""
    digest = hashlib.sha256()

    def put(*fields: str | bytes | int) -> None:
        # Each field with its length, so that no two lists of fields run together to the same bytes.
        for field in fields:
            raw = field if isinstance(field, bytes) else str(field).encode()
            digest.update(len(raw).to_bytes(8, "little"))
            digest.update(raw)

    put("kvferry namespace 1", world_size, key_bytes, len(rank_layouts), *rank_layouts)
    for facts in (rank_facts, client_facts):
        put(len(facts))
        for name in sorted(facts):
            put(name, facts[name])
    put(salt)
    return digest.hexdigest()


ALL = bytes(16)  # stands for every namespace whose epoch is not noted


class Namespace:
    """One identity: its epoch and its entries by KV group."""

    __slots__ = ("digest", "epoch", "groups", "name")

    def __init__(self, name: str, num_groups: int) -> None:
        self.name = name
        self.digest = bytes.fromhex(name)[:16]  # as slot records carry it
        self.epoch = 0
        self.groups = [KeyIndex() for _ in range(num_groups)]

    def begin_epoch(self, epoch: int) -> None:
        """Leave all entries behind: the caller has the indexes that held them."""
        self.epoch = epoch
        self.groups = [KeyIndex() for _ in self.groups]

    @property
    def num_entries(self) -> int:
        """Keys held or being written."""
        return sum(index.num for index in self.groups)


class Namespaces:
    """All namespaces that have an engine or an entry, and the epochs of those that were ever reset."""

    __slots__ = ("_by_digest", "_epochs", "_least")

    def __init__(self) -> None:
        self._by_digest: dict[bytes, Namespace] = {}
        self._epochs: dict[bytes, int] = {}  # the newest last
        self._least = 0  # the epoch of all that are not there

    def open(self, name: str, num_groups: int) -> Namespace:
        """The namespace of this identity, made if need be."""
        found = self.recover(bytes.fromhex(name)[:16], num_groups)
        found.name = name  # a recovered one is known by the half of it that slot records carry
        return found

    def recover(self, digest: bytes, num_groups: int) -> Namespace:
        """The namespace of this digest, made if need be."""
        found = self._by_digest.get(digest)
        if found is None:
            found = self._by_digest[digest] = Namespace(digest.hex(), num_groups)
            found.epoch = self.epoch_of(digest)
        return found

    def epoch_of(self, digest: bytes) -> int:
        """The present epoch, of one that is not open too."""
        return self._epochs.get(digest, self._least)

    def begin_epoch_of_all(self) -> int:
        """A new epoch for every namespace, known or not; one note stands for all."""
        self._least = max([self._least, *self._epochs.values()]) + 1
        self._epochs.clear()
        return self._least

    @property
    def record_is_full(self) -> bool:
        """Whether noting one more puts another one off the record."""
        return len(self._epochs) >= MAX_EPOCHS - 1

    def keep_epochs(self, epochs: Iterable[tuple[bytes, int]]) -> None:
        """Note epochs, the newest last. Beyond the record's room those of closed namespaces are forgotten."""
        for digest, epoch in epochs:
            if digest == ALL:
                self._least = epoch
            else:
                self._epochs.pop(digest, None)
                self._epochs[digest] = epoch
        excess = len(self._epochs) - (MAX_EPOCHS - 1)
        for digest in [d for d in self._epochs if d not in self._by_digest][: max(0, excess)]:
            del self._epochs[digest]

    def epochs(self) -> tuple[tuple[bytes, int], ...]:
        """All that is noted, the newest last; that of all others as the very last."""
        return (*self._epochs.items(), (ALL, self._least)) if self._least else tuple(self._epochs.items())

    def empty(self) -> None:
        """Forget every entry; no job and no lease holds one."""
        for space in self:
            space.groups = [KeyIndex() for _ in space.groups]

    def sweep(self, in_use: Iterable[Namespace]) -> None:
        """Forget those without an entry that no engine is in."""
        kept = {space.digest for space in in_use}
        for digest in [d for d, space in self._by_digest.items() if d not in kept and not space.num_entries]:
            del self._by_digest[digest]

    def __len__(self) -> int:
        return len(self._by_digest)

    def __iter__(self) -> Iterator[Namespace]:
        return iter(self._by_digest.values())
