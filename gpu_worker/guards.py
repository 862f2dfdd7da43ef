"""The two looks that make a copy trustworthy: before its first byte and after its last.

              before the first byte            after the last byte
    store     gen_open = generation            copy_ended, then revokes; gen_close = generation if all is well
    load      both words == generation         both words == generation still

A slot whose words differ is torn: whoever stores there now, or died there, has not closed it.
"""

from typing import Final

import numpy as np

from kvferry.gpu_worker.api import U32, SharedPage, SlotHeaders
from kvferry.gpu_worker.tickets import Transfer
from kvferry.proto.outcome import Kind, Outcome

# No store has this ticket: the page names it as revoked when its ring was overrun.
OVERRUN: Final = 0


class Guards:
    """Reads and writes the shared page's revokes and the slots' headers; decides how a copy ended."""

    def __init__(self, page: SharedPage, headers: SlotHeaders) -> None:
        self._page = page
        self._headers = headers
        self.overruns = 0  # of the revoke ring

    def before_the_first_byte(self, transfer: Transfer) -> None:
        """Open a store's slots, or take the torn ones out of what a load will copy."""
        if transfer.kind is Kind.STORE:
            self._headers.open(transfer.slots, transfer.generations)
            return
        torn = self._headers.torn(transfer.slots, transfer.generations)
        if len(torn):
            # The blocks whose slots still stand are loaded all the same: the engine keeps them.
            transfer.bad = torn
            transfer.to_copy = np.delete(transfer.to_copy, torn)

    def after_the_last_byte(self, transfer: Transfer) -> None:
        """Set the outcome of a copy that is over; what failed already stays so."""
        if transfer.kind is Kind.LOAD:
            self._judge_load(transfer)
            return
        self._page.copy_ended(transfer.ticket)
        # Only now, after the last byte: an earlier look proves nothing.
        is_revoked = self.is_revoked(transfer)
        if transfer.outcome is Outcome.OK and is_revoked:
            transfer.outcome = Outcome.REVOKED
        elif transfer.outcome is Outcome.OK:
            self._headers.close(transfer.slots, transfer.generations)

    def is_revoked(self, transfer: Transfer) -> bool:
        """Whether the engine has gone on without this store."""
        revoked = self._page.revoked([OVERRUN, transfer.ticket])
        self.overruns += OVERRUN in revoked
        return transfer.ticket in revoked

    def _judge_load(self, transfer: Transfer) -> None:
        if transfer.outcome not in (Outcome.OK, Outcome.COPY_FAILED):
            return
        # Good is what arrived from a slot that stands still: one that was torn before has not been copied, and
        # stays failed even if it looks whole by now.
        is_bad = np.ones(len(transfer.blocks), dtype=bool)
        for positions in transfer.arrived:
            is_bad[positions] = False
        is_bad[self._headers.torn(transfer.slots, transfer.generations)] = True
        transfer.bad = np.flatnonzero(is_bad).astype(np.uint32)
        if len(transfer.bad) and transfer.outcome is Outcome.OK:
            transfer.outcome = Outcome.TORN


def failed_blocks(transfer: Transfer) -> U32:
    """The blocks of an ended load that do not hold what its keys name."""
    if transfer.outcome is Outcome.OK or transfer.kind is Kind.STORE:
        return transfer.blocks[:0]
    is_judged = transfer.outcome in (Outcome.TORN, Outcome.COPY_FAILED)
    return transfer.blocks[transfer.bad] if is_judged else transfer.blocks
