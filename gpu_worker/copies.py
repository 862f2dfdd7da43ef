"""Between core and device: a core's batch becomes one or more plans, their ends become one `Copied`.

SubmitCopy ─▶ planner ─▶ plans wait for room ─▶ device ─▶ all of a batch's plans done ─▶ Copied
"""

import logging
from collections import deque
from collections.abc import Sequence

from kvferry.gpu_worker.api import ORDER, Copied, SubmitCopy
from kvferry.gpu_worker.devices.base import CopyPlan, Device, PlanError
from kvferry.gpu_worker.layout import Planner
from kvferry.proto.outcome import Kind

log = logging.getLogger("kvferry.worker")


class Copies:
    """The running batches of one worker."""

    def __init__(self, device: Device, planners: Sequence[Planner]) -> None:
        self._device = device
        self._planners = planners
        self._waiting: dict[Kind, deque[tuple[int, CopyPlan]]] = {kind: deque() for kind in Kind}
        self._num_left: dict[int, int] = {}  # token -> plans not over
        self._failed: set[int] = set()
        self._ended: list[int] = []  # tokens over that nobody has been told of

    def submit(self, batch: SubmitCopy) -> None:
        """Plan a batch and give the device what it has room for. DeviceLost passes through."""
        try:
            plans = self._planners[batch.group].plan(batch.blocks, batch.slots, batch.kind)
        except PlanError as error:
            # The core has checked all of this: a bug of ours, told as a failed copy that touched nothing.
            log.error("a batch cannot be planned: %s", error)
            self._failed.add(batch.token)
            plans = []
        self._num_left[batch.token] = len(plans)
        if not plans:
            self._ended.append(batch.token)
        self._waiting[batch.kind].extend((batch.token, plan) for plan in plans)
        self._pump()

    @property
    def has_ended(self) -> bool:
        """Whether a batch is over that the device never had: its descriptor does not tell of it, `ended` does."""
        return bool(self._ended)

    def ended(self) -> list[Copied]:
        """Batches that are over since the last call; the device is given what waited."""
        for done in self._device.completions():
            if not done.ok:
                log.error("copy failed: %s", done.error)
            self._over(done.token, ok=done.ok)
        self._pump()
        tokens, self._ended = self._ended, []
        copied = [Copied(token, token not in self._failed) for token in tokens]
        for token in tokens:
            del self._num_left[token]
            self._failed.discard(token)
        return copied

    def _pump(self) -> None:
        for kind in ORDER:
            waiting = self._waiting[kind]
            while waiting and self._device.room(kind):
                token, plan = waiting.popleft()
                try:
                    self._device.submit(kind, plan, token)
                except PlanError as error:
                    log.error("the device refuses a plan: %s", error)
                    self._over(token, ok=False)

    def _over(self, token: int, *, ok: bool) -> None:
        """One plan of a batch is over."""
        if not ok:
            self._failed.add(token)
        self._num_left[token] -= 1
        if not self._num_left[token]:
            self._ended.append(token)
