"""What the worker asks of a device: map the engine's memory, copy descriptors, say when they are done.

    attach(handle) ─▶ Mapping            the engine's bytes in this process
    register_host(pool)                  the pool's bytes, ready for copies
    submit(kind, plan, token) ... completions() ─▶ [Done]     fileno() is readable when there are any

A device does no layout work, writes no slot header and knows no ticket. All methods but `fileno` are
called from the worker's one loop thread; none but `drain` waits. The suite in tests/contracts holds every
device to the same behaviour.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from kvferry.gpu_worker.api import U64
from kvferry.proto.errors import KvferryError
from kvferry.proto.layout import Handle
from kvferry.proto.outcome import Kind
from kvferry.proto.tether import MarkMode

# Of one plan. Drivers have crashed on calls of 50 thousand descriptors, and 32 MiB is 0.65 ms of a PCIe 5
# link: what comes next never waits longer than that for its turn.
MAX_DESCRIPTORS: Final = 4096
MAX_PLAN_BYTES: Final = 32 << 20
# Plans that may be at the device at once, per direction: one that runs and one behind it.
MAX_IN_FLIGHT: Final = 2
U64_TYPE: Final = np.dtype(np.uint64)


class DeviceError(KvferryError):
    """A device call failed; `code` says which sort, the text has the call and its numbers."""


class HandleError(DeviceError):
    """The engine's memory cannot be mapped here: the registration is refused with this code and text."""


class CapacityError(DeviceError):
    """No more host memory can be registered."""


class PlanError(DeviceError):
    """A plan that breaks the device's limits: a bug of the planner, never clamped."""


class WouldBlock(DeviceError):  # noqa: N818  it is an answer, named as Python names its own
    """No room: `room` was not asked."""


class DeviceLost(DeviceError):  # noqa: N818  a state that lasts, not one call's error
    """The device will not work again in this process: the worker exits."""


@dataclass(frozen=True, slots=True)
class Caps:
    """What a device can do; found once at its opening."""

    kind: str
    name: str
    handle_kinds: tuple[str, ...]  # that `attach` takes
    mark_mode: MarkMode = "word"
    uuid: str = ""
    numa_node: int = -1


@dataclass(frozen=True, slots=True)
class Mapping:
    """A handle's bytes in this process."""

    base: int  # address of the handle's byte 0
    nbytes: int


@dataclass(frozen=True, slots=True)
class HostRegion:
    """Host memory that copies may use."""

    base: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class CopyPlan:
    """One batch of copy descriptors: absolute addresses in this process.

    Shapes: src, dst, size (n,) uint64, C-contiguous, 1 <= n <= MAX_DESCRIPTORS.
    Units:  bytes; their sum is at most MAX_PLAN_BYTES, or n is 1.
    """

    src: U64
    dst: U64
    size: U64

    @property
    def nbytes(self) -> int:
        """Bytes that it moves."""
        return int(self.size.sum())


@dataclass(frozen=True, slots=True)
class Done:
    """The end of one submitted plan."""

    token: int
    ok: bool
    error: str
    nbytes: int
    submitted_ns: int  # both on the monotonic clock
    done_ns: int


def check_limits(plan: CopyPlan) -> None:
    """PlanError if a plan is empty, lopsided, or more than a device takes at once."""
    count = len(plan.size)
    if not 1 <= count <= MAX_DESCRIPTORS or not count == len(plan.src) == len(plan.dst):
        raise PlanError("plan.lengths", f"{len(plan.src)}, {len(plan.dst)} and {count} of src, dst and size")
    if not all(column.dtype == U64_TYPE and column.flags.c_contiguous for column in (plan.src, plan.dst, plan.size)):
        # A driver reads them as they lie in memory.
        raise PlanError("plan.lengths", "src, dst or size is no contiguous column of u64")
    if not plan.size.all():
        raise PlanError("plan.size", "a descriptor of no bytes")
    if count > 1 and plan.nbytes > MAX_PLAN_BYTES:
        raise PlanError("plan.size", f"{plan.nbytes} bytes in one plan; the limit is {MAX_PLAN_BYTES}")


def idle() -> None:
    """Nothing to do in between."""


class Device(Protocol):
    """One per worker process."""

    @property
    def caps(self) -> Caps: ...

    def describe(self) -> dict[str, Any]:
        """What `kvferry status` shows of it: plain JSON types, `kind` among them."""

    def attach(self, handle: Handle, fd: int | None) -> Mapping:
        """Map the engine's memory; `fd` stays the caller's. HandleError | DeviceLost."""

    def detach(self, mapping: Mapping) -> None:
        """Unmap, in an orderly end only; idempotent. The caller has drained."""

    def read(self, mapping: Mapping, offset: int, nbytes: int) -> bytes:
        """A few bytes of the engine's memory, for the probes at registration; may wait for the device."""

    def register_host(self, base: int, nbytes: int, between: Callable[[], None] = idle) -> HostRegion:
        """Make host memory usable for copies. CapacityError | DeviceError, and nothing of it is.

        That takes seconds for each 10 GiB on a GPU: `between` is called every second or so meanwhile, and what it
        raises ends the registration as an error does.
        """

    def unregister_host(self, region: HostRegion) -> None:
        """Undo `register_host`; idempotent."""

    def submit(self, kind: Kind, plan: CopyPlan, token: int) -> None:
        """Start a plan; the device keeps it alive. WouldBlock | PlanError | DeviceLost, and nothing changed."""

    def room(self, kind: Kind) -> int:
        """Plans of this direction that may be submitted now."""

    def completions(self) -> list[Done]:
        """Plans that ended since the last call, in the order of submission within a direction. DeviceLost."""

    def fileno(self) -> int:
        """Readable when `completions` would give something."""

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight; False at the timeout."""

    def close(self) -> None:
        """Stop; idempotent. The caller has drained."""
