"""Which engines may share KV: those whose keys, weights and bytes mean the same.

The identity is a digest of what all ranks report (facts and byte layout, rank by rank), the world size,
the key width, the client's own facts and the user's salt. It is known only once every rank has spoken.
Equal key bytes in different namespaces never meet: each has an index of its own.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

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


class Namespace:
    """One identity: its epoch and its entries by KV group."""

    __slots__ = ("digest", "epoch", "groups", "name")

    def __init__(self, name: str, num_groups: int) -> None:
        self.name = name
        self.digest = bytes.fromhex(name)[:16]  # as slot records carry it
        self.epoch = 0
        self.groups = [KeyIndex() for _ in range(num_groups)]

    @property
    def num_entries(self) -> int:
        """Keys held or being written."""
        return sum(index.num for index in self.groups)


class Namespaces:
    """All namespaces that have an engine or an entry."""

    __slots__ = ("_by_name",)

    def __init__(self) -> None:
        self._by_name: dict[str, Namespace] = {}

    def open(self, name: str, num_groups: int) -> Namespace:
        """The namespace of this identity, made if need be."""
        found = self._by_name.get(name)
        if found is None:
            found = self._by_name[name] = Namespace(name, num_groups)
        return found

    def sweep(self, in_use: Iterable[Namespace]) -> None:
        """Forget those without an entry that no engine is in."""
        kept = {space.name for space in in_use}
        for name in [n for n, space in self._by_name.items() if n not in kept and not space.num_entries]:
            del self._by_name[name]

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Namespace]:
        return iter(self._by_name.values())
