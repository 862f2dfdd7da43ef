"""Which blocks go to the device next. Holds what waits for its turn; never touches a byte.

    READY ──push──▶ [loads ]──┐                        at most `batches_in_flight` a direction,
                    [stores]──┴─▶ next_batch ─▶ device  each at most `batch_bytes`

Loads go first: somebody waits for them, while a store's only hurry is its slot. Batches are small so that a
load that comes now does not stand behind a long store (one engine, one copy queue made first-token
times jump when stores piled up).
"""

from collections import OrderedDict

from kvferry.gpu_worker.api import U32, SubmitCopy, WorkerSettings
from kvferry.gpu_worker.tickets import Transfer
from kvferry.proto.outcome import Kind


class CopyQueue:
    """Waiting transfers and running batches of both directions."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._waiting: dict[Kind, OrderedDict[int, Transfer]] = {kind: OrderedDict() for kind in Kind}
        self._running: dict[int, tuple[Transfer, U32, int]] = {}  # token -> its transfer, positions, bytes
        self._num_running = dict.fromkeys(Kind, 0)
        self._bytes_running = dict.fromkeys(Kind, 0)
        self._last_token = 0

    def push(self, transfer: Transfer) -> None:
        """Put a ready transfer behind those of its direction."""
        self._waiting[transfer.kind][transfer.ticket] = transfer

    def remove(self, transfer: Transfer) -> None:
        """Hand over nothing more of this transfer; its running batches are left to end."""
        self._waiting[transfer.kind].pop(transfer.ticket, None)

    def head(self, kind: Kind) -> Transfer | None:
        """The transfer whose turn it is, if the device may be given another batch of this direction."""
        if self._num_running[kind] >= self._settings.batches_in_flight or not self._waiting[kind]:
            return None
        return next(iter(self._waiting[kind].values()))

    def next_batch(self, transfer: Transfer) -> SubmitCopy:
        """Cut the next batch off the head; the transfer leaves the queue with its last one."""
        block_bytes = self._settings.payload_bytes[transfer.group]
        num_blocks = max(1, self._settings.batch_bytes // block_bytes)
        start = transfer.num_submitted
        positions = transfer.to_copy[start : start + num_blocks]
        transfer.num_submitted += len(positions)
        transfer.num_running += 1
        if transfer.num_submitted == len(transfer.to_copy):
            self.remove(transfer)
        self._last_token += 1
        nbytes = len(positions) * block_bytes
        self._running[self._last_token] = (transfer, positions, nbytes)
        self._num_running[transfer.kind] += 1
        self._bytes_running[transfer.kind] += nbytes
        return SubmitCopy(
            self._last_token, transfer.kind, transfer.group, transfer.slots[positions], transfer.blocks[positions]
        )

    def copied(self, token: int) -> tuple[Transfer, U32] | None:
        """Take the end of a batch: its transfer and the positions it held. None if no such batch is running."""
        if token not in self._running:
            return None
        transfer, positions, nbytes = self._running.pop(token)
        transfer.num_running -= 1
        self._num_running[transfer.kind] -= 1
        self._bytes_running[transfer.kind] -= nbytes
        return transfer, positions

    def waiting(self, kind: Kind) -> int:
        """Transfers of a direction that have blocks left to submit."""
        return len(self._waiting[kind])

    def running(self, kind: Kind) -> int:
        """Batches of a direction at the device."""
        return self._num_running[kind]

    def bytes_running(self, kind: Kind) -> int:
        """Payload bytes of a direction at the device."""
        return self._bytes_running[kind]
