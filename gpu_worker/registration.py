"""What a rank shows of its memory, taken up or refused. Everything is checked before anything is served.

    RankRegister + descriptors ─▶ rank, version ─▶ page ─▶ layout fits its memory ─▶ mapped ─▶ probes read back

Each check raises a KvferryError whose code travels to the rank in `Refused`.
"""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.gpu_worker.devices.base import Device, Mapping
from kvferry.gpu_worker.layout import Planner
from kvferry.gpu_worker.pool import Pool
from kvferry.proto import version
from kvferry.proto.control import Attach
from kvferry.proto.errors import RefusedError, RemoteProtocolError
from kvferry.proto.limits import PAGE_BYTES
from kvferry.proto.page import PageReader
from kvferry.proto.tether import RankRegister


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One rank's memory as this process sees it."""

    register: RankRegister
    page: PageReader
    mappings: tuple[Mapping, ...]

    def attach_message(self, worker: int, pool: Pool) -> Attach:
        """What the daemon is told of it."""
        register, layout = self.register, self.register.layout
        return Attach(
            worker=worker,
            engine_id=register.engine_id,
            rank=register.rank,
            world_size=register.world_size,
            layout_digest=layout.digest,
            payload_bytes=tuple(group.payload_bytes for group in layout.groups),
            block_tokens=tuple(group.block_tokens for group in layout.groups),
            num_blocks=min(group.num_blocks for group in layout.groups),
            pool_bytes=pool.pool_bytes,
            facts=register.facts,
        )

    def planners(self, pool: Pool, num_slots: int) -> list[Planner]:
        """One planner a group. RefusedError if the file holds fewer slots than the daemon counts on."""
        group = self.register.layout.groups[0]
        fit = pool.num_slots(group.slot_bytes)
        if fit < num_slots:
            raise RefusedError(
                "layout.pool_too_small",
                f"the daemon counts on {num_slots} slots of {group.slot_bytes} bytes; this rank's pool holds {fit}",
                "give all ranks pool files of one size",
            )
        bases = [mapping.base for mapping in self.mappings]
        return [
            Planner(group, bases, pool.slots_base, group.slot_bytes, num_slots) for group in self.register.layout.groups
        ]


def take_up(register: RankRegister, fds: Sequence[int], rank: int, device: Device) -> RankMemory:
    """Check and map everything that the rank shows; the descriptors stay the caller's.

    RemoteProtocolError, RefusedError or HandleError with the code to refuse with; nothing is served then.
    """
    if not version.speaks(register.major):
        low, high = version.SUPPORTED_MAJORS
        raise RemoteProtocolError(
            "frame.version",
            f"the rank speaks protocol {register.major}; this worker {low}..{high}",
            "install the same kvferry beside engine and sidecar",
        )
    if register.rank != rank:
        raise RefusedError("register.rank", f"rank {register.rank} knocked at the door of rank {rank}")
    layout = register.layout
    if len(layout.groups) > 1:
        raise RefusedError(
            "layout.groups",
            f"the engine has {len(layout.groups)} KV groups; this version serves one",
            "run this model without kvferry",
        )
    with_fd = [handle.kind.endswith("_fd") for handle in layout.handles]
    if len(fds) != sum(with_fd) + 1:
        raise RemoteProtocolError(
            "message.fields",
            f"{len(fds)} descriptors came; the layout's handles and the shared page are {sum(with_fd) + 1}",
        )
    layout.check()
    page = _open_page(fds[-1])
    rest = iter(fds)
    mappings = tuple(
        device.attach(handle, next(rest) if has_fd else None)
        for handle, has_fd in zip(layout.handles, with_fd, strict=True)
    )
    _check_probes(register, mappings, device)
    return RankMemory(register, page, mappings)


def _open_page(fd: int) -> PageReader:
    try:
        if os.fstat(fd).st_size < PAGE_BYTES:
            raise RefusedError("handle.stale", f"the shared page has {os.fstat(fd).st_size} of {PAGE_BYTES} bytes")
        page = PageReader(memoryview(mmap.mmap(fd, PAGE_BYTES)))
    except (OSError, ValueError) as error:
        raise RefusedError("handle.stale", f"the shared page cannot be mapped: {error}") from None
    if not page.is_sound():
        raise RefusedError("handle.stale", "the last descriptor is no shared page of kvferry")
    return page


def _check_probes(register: RankRegister, mappings: Sequence[Mapping], device: Device) -> None:
    for index, probe in enumerate(register.probes):
        if probe.handle >= len(mappings) or probe.offset + len(probe.expect) > mappings[probe.handle].nbytes:
            raise RemoteProtocolError("layout.geometry", f"probe {index} lies outside the memory that was shown")
        seen = device.read(mappings[probe.handle], probe.offset, len(probe.expect))
        if seen != probe.expect:
            raise RefusedError(
                "layout.probe",
                f"probe {index} at byte {probe.offset} of handle {probe.handle} reads {seen[:16].hex()}...;"
                f" the engine wrote {probe.expect[:16].hex()}...",
                "the exported memory is not the one that the engine uses",
            )
