"""What the worker knows of the engine's revokes, over-runs of the ring included.

The page's ring holds the last 256 revokes. If more came since the last look, those that fell out can no
longer be told from those that never were: then every store whose begin may have been written before the
look counts as revoked. That costs stores and never bytes. Three sorts of them exist:

    live tickets                       told by the page itself, since all of them are asked for at once
    begins not read from the tether    known by their mark, which the page had already reached,
                                       or by coming within `grace_ns` of the look (a mark that a GPU
                                       stream writes comes later than the begin that names it)
"""

from typing import Final

from kvferry.gpu_worker.api import SharedPage
from kvferry.gpu_worker.tickets import Tickets

# No ticket has this number: it comes back as revoked only when the ring was over-run.
SENTINEL: Final = 0


class Revokes:
    """Asks the page, and marks the tickets that it names."""

    def __init__(self, page: SharedPage, grace_ns: int) -> None:
        self._page = page
        self._grace_ns = grace_ns
        self._mark_at_overrun = -1
        self._suspect_until_ns = -1
        self.overruns = 0

    def look(self, tickets: Tickets, now_ns: int) -> None:
        """Mark every live ticket that is revoked by now, whatever its state."""
        revoked = self._page.revoked([SENTINEL, *(transfer.ticket for transfer in tickets)])
        if SENTINEL in revoked:
            self.overruns += 1
            self._mark_at_overrun = self._page.mark()
            self._suspect_until_ns = now_ns + self._grace_ns
        if revoked:
            for transfer in tickets:
                transfer.is_revoked = transfer.is_revoked or transfer.ticket in revoked

    def may_have_missed(self, mark: int, now_ns: int) -> bool:
        """Whether a revoke of a ticket that begins now may have been lost in an over-run."""
        return mark <= self._mark_at_overrun or now_ns < self._suspect_until_ns

    def forget(self, ticket: int) -> None:
        """Drop the memory of a ticket that is reported."""
        self._page.forget([ticket])
