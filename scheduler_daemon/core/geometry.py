"""How the pool is cut into slots: fixed by the first attachments, refused to all others while in use.

Every rank's file holds the same slots, by number; their sizes may differ from rank to rank (pipeline
stages do), so the pool has as many slots as the rank that fits fewest.
"""

from collections.abc import Sequence

from kvferry.proto.errors import RefusedError
from kvferry.proto.layout import slot_bytes
from kvferry.scheduler_daemon.core.api import TableShape


class Geometry:
    """Bytes of a slot and of the pool file, by rank; known for all ranks once each has been attached."""

    __slots__ = ("_pool_bytes", "_slot_bytes", "_world_size")

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._slot_bytes: dict[int, int] = {}
        self._pool_bytes: dict[int, int] = {}

    def disagrees(self, rank: int, payload_bytes: int, pool_bytes: int, num_slots: int) -> bool:
        """Whether this rank's slots were fixed at another size, or `num_slots` of them do not fit its file."""
        size = slot_bytes(payload_bytes)
        return self._slot_bytes.get(rank, size) != size or pool_bytes < num_slots * size

    def refusal(self, rank: int, payload_bytes: int) -> RefusedError:
        """What to tell a rank that disagrees."""
        return RefusedError(
            "layout.slot_bytes",
            f"rank {rank} needs slots of {slot_bytes(payload_bytes)} bytes;"
            f" the pool is cut into slots of {self._slot_bytes[rank]} bytes",
            "if no engine of that size runs any more, `kvferry reset --all` forgets the keys it left, and this one"
            " attaches by itself; else use the same block size and KV dtype in all engines of one sidecar,"
            " or start another sidecar with another --run-dir",
        )

    def fix(self, rank: int, payload_bytes: int, pool_bytes: int) -> None:
        """Take a rank's sizes; RefusedError if its file holds no slot."""
        size = slot_bytes(payload_bytes)
        if pool_bytes < size:
            raise RefusedError(
                "layout.pool_too_small",
                f"rank {rank} needs {size} bytes a slot; its share of the host pool is {pool_bytes} bytes",
                f"give at least {size * self._world_size} bytes of --host-memory, and much more to be of use",
            )
        self._slot_bytes[rank] = size
        self._pool_bytes[rank] = pool_bytes

    def restore(self, slot_bytes: Sequence[int], pool_bytes: Sequence[int]) -> None:
        """Take over what an earlier daemon had fixed, by rank."""
        self._slot_bytes = dict(enumerate(slot_bytes))
        self._pool_bytes = dict(enumerate(pool_bytes))

    def shape(self) -> TableShape:
        """What a slot table is made for, once every rank has been seen."""
        ranks = range(self._world_size)
        return TableShape(
            self.num_slots,
            tuple(self._slot_bytes[rank] for rank in ranks),
            tuple(self._pool_bytes[rank] for rank in ranks),
        )

    def fits(self, rank: int) -> int:
        """Slots that this rank's file holds."""
        return self._pool_bytes[rank] // self._slot_bytes[rank]

    @property
    def num_slots(self) -> int:
        """Slots of the pool; 0 while a rank has not been seen."""
        if len(self._slot_bytes) < self._world_size:
            return 0
        return min(self.fits(rank) for rank in self._slot_bytes)

    def as_dict(self) -> dict[str, int]:
        """Slot bytes by rank, for status."""
        return {str(rank): size for rank, size in sorted(self._slot_bytes.items())}
