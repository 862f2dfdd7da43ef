"""Process E: one rank of an engine, played with the real client library. Told by `talk.serve`.

    attach ─▶ memory behind an interior address ─▶ exported ─▶ RankClient ─▶ a worker serves it
    play   ─▶ a script of small steps, one after the other without the runner in between: what counts in
              microseconds (fill, spin, mark, begin, revoke, await) happens in here

A block of the lent memory lies in `layers` runs of `run` bytes, each layer's blocks side by side; its payload in a
slot is the runs in the order of the layers.
"""

import argparse
import contextlib
import gc
import mmap
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

from kvferry.client.marks import Mark, Marks
from kvferry.client.memory import KVMemory, Marking
from kvferry.client.rank import RankClient
from kvferry.client.types import Directive, LoadEnd
from kvferry.gpu_check.compute import Compute, MemoryKind, Tensor, open_compute
from kvferry.gpu_check.talk import serve
from kvferry.proto.errors import LostError
from kvferry.proto.limits import PAGE_BYTES
from kvferry.proto.page import PageWriter
from kvferry.proto.tether import MarkMode

POLL_S: Final = 0.0002
ATTACH_S: Final = 10.0


class Blindfold:
    """Marks that can be left out: a begin then waits for nothing, as if the order were forgotten."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self.is_on = False

    @property
    def mode(self) -> MarkMode:
        return self._marks.mode

    @property
    def why(self) -> str:
        return self._marks.why

    def signal(self) -> Mark:
        """A mark, or none where one should be."""
        return Mark(0) if self.is_on else self._marks.signal()

    def passed(self) -> int:
        return self._marks.passed()

    def close(self) -> None:
        self._marks.close()


class Engine:
    """The process's state, and what it can be told."""

    def __init__(self, compute: Compute, run_dir: Path) -> None:
        self._compute = compute
        self._run_dir = run_dir
        self._rank: RankClient | None = None
        self._memory: KVMemory | None = None
        self._blindfold: Blindfold | None = None
        self._marking: Marking | None = None  # without the blindfold
        self._address = 0
        self._layers = self._blocks = self._run = 0
        self._step = 0
        self._ended: dict[int, LoadEnd | None] = {}  # by ticket; None: a store's copy
        self._notes: list[str] = []
        self._kept: list[Any] = []

    # ---- as a whole ------------------------------------------------------------------------------

    def about(self) -> dict[str, Any]:
        """What it computes with."""
        return {**self._compute.about(), "pid": os.getpid()}

    def lend(self, nbytes: int, lead: int, kind: MemoryKind = "plain") -> dict[str, Any]:
        """Memory for a process that opens its handle itself; its address, and the handle as plain values."""
        self._address = self._compute.allocate(lead + nbytes, kind) + lead
        view = Tensor(self._address, (1, nbytes), (nbytes, 1))
        self._memory = self._compute.export({"all": view}, None)
        (handle,) = self._memory.layout.handles
        return {"address": self._address, "handle": handle.model_dump(), "fds": list(self._memory.fds)}

    def attach(
        self,
        name: str,
        layers: int,
        blocks: int,
        run: int,
        lead: int,
        kind: MemoryKind = "plain",
        marks: Literal["word", "host"] | None = None,
        device: str | None = None,
    ) -> dict[str, Any]:
        """Allocate, export, register; `device` forges the GPU's name. What came of it."""
        self._layers, self._blocks, self._run = layers, blocks, run
        self._address = self._compute.allocate(lead + layers * blocks * run, kind) + lead
        views = {f"layer.{n}": Tensor(self._address + n * blocks * run, (blocks, run), (run, 1)) for n in range(layers)}
        memory = self._compute.export(views, marks)
        if device is not None:
            handles = tuple(handle.model_copy(update={"device": device}) for handle in memory.layout.handles)
            memory = replace(memory, layout=memory.layout.model_copy(update={"handles": handles}))
        self._memory = replace(memory, marking=self._blindfolded(memory))
        self._notes.clear()
        self._rank = RankClient(
            name,
            0,
            world_size=1,
            memory=self._memory,
            run_dir=self._run_dir,
            attach_timeout_s=ATTACH_S,
            load_timeout_s=30.0,
            on_note=self._notes.append,
        )
        (handle, *_) = memory.layout.handles
        return {
            **self._rank.describe(),
            "notes": list(self._notes),
            "handle_kind": handle.kind,
            "base_offset": handle.base_offset,
            "allocation": "" if handle.kind == "shm_fd" else handle.device,
        }

    def detach(self) -> dict[str, Any]:
        """End politely, if attached; free all memory."""
        if self._rank is not None:
            self._rank.close()
        if self._memory is not None:
            for fd in self._memory.fds:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self._rank = self._memory = self._blindfold = None
        self._ended.clear()
        self._kept.clear()
        gc.collect()  # whatever still refers to the memory
        self._compute.free()
        return {}

    def state(self) -> dict[str, Any]:
        """Of the rank client."""
        rank = self._ranked()
        rank.poll()
        return {**rank.describe(), "notes": list(self._notes)}

    def put(self, offset: int, data: bytes) -> None:
        """Write into the lent memory."""
        self._compute.put(self._address + offset, data)

    def get(self, offset: int, nbytes: int) -> bytes:
        """Read from the lent memory."""
        return self._compute.get(self._address + offset, nbytes)

    def see(self, block: int) -> bytes:
        """A block's bytes, as its payload in a slot."""
        return b"".join(self._compute.get(at, self._run) for at in self._runs(block))

    def show(self, block: int, data: bytes) -> None:
        """Write a block's bytes."""
        for n, at in enumerate(self._runs(block)):
            self._compute.put(at, data[n * self._run : (n + 1) * self._run])

    # ---- a script --------------------------------------------------------------------------------

    def play(self, script: Sequence[Sequence[Any]]) -> list[Any]:
        """Steps in order, [name, *arguments] each; what each gave."""
        steps: dict[str, Callable[..., Any]] = {
            "fill": self._fill,
            "spin": self._compute.spin,
            "hold": self._compute.hold,
            "release": self._compute.release,
            "finish": self._compute.finish,
            "blind": self._blind,
            "store": self._store,
            "load": self._load,
            "revoke": self._revoke,
            "capture": self._capture,
            "replay": self._replay,
            "sleep": time.sleep,
            "await": self._await,
            "holds": self._holds,
            "now": time.monotonic_ns,
        }
        return [steps[name](*arguments) for name, *arguments in script]

    def _fill(self, block: int, byte: int) -> None:
        for at in self._runs(block):
            self._compute.fill(at, self._run, byte)

    def _blind(self, is_on: bool) -> None:
        if self._blindfold is not None:
            self._blindfold.is_on = is_on

    def _store(self, *tickets: int) -> None:
        self._ranked().begin_stores(self._directive(stores=tickets))

    def _load(self, *tickets_and_blocks: Sequence[Any]) -> None:
        loads = tuple((int(ticket), tuple(blocks)) for ticket, blocks in tickets_and_blocks)
        self._ranked().begin_loads(self._directive(loads=loads))

    def _revoke(self, *tickets: int) -> None:
        self._ranked().revoke(self._directive(revokes=tickets))

    def _capture(self, written: int, read: int, derived: int, spin_ms: float) -> None:
        runs = (self._runs(block) for block in (written, read, derived))
        self._compute.capture(*runs, self._run, spin_ms)  # type: ignore[attr-defined]

    def _replay(self) -> None:
        self._compute.replay()  # type: ignore[attr-defined]

    def _await(self, ticket: int, timeout_s: float) -> dict[str, Any]:
        """The end of a ticket at this rank. LostError if there is none in time."""
        rank = self._ranked()
        until = time.monotonic() + timeout_s
        while ticket not in self._ended:
            report = rank.poll()
            self._ended |= {end.ticket: end for end in report.loads}
            self._ended |= dict.fromkeys(report.stores)
            if ticket in self._ended:
                break
            if time.monotonic() > until:
                raise LostError("check.word", f"no word on ticket {ticket} within {timeout_s:.1f} s: {self._notes}")
            time.sleep(POLL_S)
        end = self._ended.pop(ticket)
        if end is None:
            return {}
        return {
            "ok": end.ok,
            "failed": list(end.failed_blocks),
            "outcome": end.outcome.name,
            "wait_us": end.wait_us,
            "copy_us": end.copy_us,
        }

    def _holds(self, block: int, byte: int) -> bool:
        """Whether all of a block is `byte`."""
        return all(self._compute.get(at, self._run) == bytes([byte]) * self._run for at in self._runs(block))

    # ---- for single items ------------------------------------------------------------------------

    def mark_on_null_stream(self) -> str:
        """Whether the null stream can write marks too: the mode that a rank there would have."""
        on_null_stream = getattr(self._compute, "on_null_stream", None)
        marking = self._marking
        if on_null_stream is None or marking is None:
            return "not asked"
        page = mmap.mmap(-1, PAGE_BYTES)
        self._kept.append(page)
        made = on_null_stream(lambda: marking(PageWriter(memoryview(page)), page))
        made.close()
        return f"{made.mode} ({made.why})"

    def event(self, spin_ms: float) -> dict[str, Any]:
        """An interprocess event behind a busy stream."""
        busy_since_ns = time.monotonic_ns()
        self._compute.spin(spin_ms)
        event, handle, record_us = self._compute.interprocess_event()  # type: ignore[attr-defined]
        self._kept.append(event)
        return {"handle": handle, "record_us": round(record_us, 1), "busy_since_ns": busy_since_ns}

    def matmul(self, seconds: float, side: int) -> list[float]:
        """Milliseconds of each product."""
        return self._compute.matmul(seconds, side)  # type: ignore[attr-defined,no-any-return]

    def kernel_works(self) -> bool:
        """Whether a kernel of this process still runs; True where there are no kernels."""
        works = getattr(self._compute, "kernel_works", None)
        return works is None or bool(works())

    def kernel_after_refusals(self) -> str:
        """Whether errors of the driver stay in their calls: a runtime's would be blamed on the next kernel."""
        refused = getattr(self._compute, "refused_call", None)
        if refused is None:
            return "not asked"
        told = refused()
        return f"works, after {told}" if self.kernel_works() else "fails"

    # ---- inside ----------------------------------------------------------------------------------

    def _blindfolded(self, memory: KVMemory) -> Callable[..., Marks] | None:
        inner = self._marking = memory.marking
        if inner is None:
            return None

        def marking(page: Any, mapped: Any) -> Marks:
            self._blindfold = Blindfold(inner(page, mapped))
            return self._blindfold

        return marking

    def _ranked(self) -> RankClient:
        if self._rank is None:
            raise LostError("check.rank", "this engine has not attached")
        return self._rank

    def _directive(self, **fields: Any) -> Directive:
        self._step += 1
        return Directive(step=self._step, **fields)

    def _runs(self, block: int) -> list[int]:
        return [self._address + (layer * self._blocks + block) * self._run for layer in range(self._layers)]


def main() -> None:
    """Open the device, then do what is asked."""
    parser = argparse.ArgumentParser(prog="python -m kvferry.gpu_check.engine", description=__doc__)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--gpu", default="0")
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--line-fd", required=True, type=int)
    options = parser.parse_args()
    opened: list[Engine] = []

    def start() -> dict[str, Any]:
        # Not before it is asked: what is wrong with the device is an answer then.
        opened.append(Engine(open_compute(options.engine, options.gpu), options.run_dir))
        return opened[0].about()

    names = ("about", "lend", "attach", "detach", "state", "put", "get", "see", "show", "play")
    special = ("mark_on_null_stream", "event", "matmul", "kernel_works", "kernel_after_refusals")
    deeds: dict[str, Callable[..., Any]] = {
        name: lambda _name=name, **fields: getattr(opened[0], _name)(**fields) for name in (*names, *special)
    }
    serve("kvferry-check-e", options.line_fd, {"start": start, **deeds})
    os._exit(0)  # queued work, threads and mappings go with the process


if __name__ == "__main__":
    main()
