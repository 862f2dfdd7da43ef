"""An engine's process on the stub driver: allocates GPU memory and exports it. Told and heard in JSON lines.

in   {"kind": "cuda_ipc" | "cuda_vmm_fd", "nbytes": n, "lead": l, "device": 0}
out  {"handle": {...}, "memory": descriptor in this process, "size": bytes of the allocation}

The engine's memory begins `lead` bytes into its allocation. It is freed after KEPT others, or when this process ends.
"""

import json
import mmap
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvferry.cuda.driver import Driver, pid_namespace
from kvferry.proto.layout import Handle

KEPT: Final = 64  # more than any test uses at once


class Exporter:
    """The process, as a test talks to it."""

    def __init__(self, library: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cuda.exporter", library],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        self.pid = self._process.pid

    def export(self, kind: str, nbytes: int, lead: int = 0, device: int = 0) -> "Exported":
        """Allocate and export; what came of it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"kind": kind, "nbytes": nbytes, "lead": lead, "device": device}) + "\n")
        self._process.stdin.flush()
        return Exported(self.pid, json.loads(self._process.stdout.readline()))

    def kill(self) -> None:
        """End it without a word, as SIGKILL does."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        if self._process.poll() is None:
            self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class Exported:
    """A handle, its descriptor in this process, and the engine's own view of the bytes."""

    def __init__(self, pid: int, answer: dict[str, Any]) -> None:
        fields = answer["handle"] | {"blob": bytes.fromhex(answer["handle"]["blob"])}
        self.handle = Handle(**fields)
        self.size = answer["size"]
        memory = f"/proc/{pid}/fd/{answer['memory']}"
        mapping_fd = os.open(memory, os.O_RDWR)
        whole = np.frombuffer(mmap.mmap(mapping_fd, self.size), dtype=np.uint8)
        self.view = whole[self.handle.base_offset :][: self.handle.nbytes]
        self.fd = mapping_fd if self.handle.kind == "cuda_vmm_fd" else -1
        if self.fd < 0:
            os.close(mapping_fd)


def main() -> None:
    driver = Driver.load(sys.argv[1])
    device = -1
    kept: deque[Callable[[], None]] = deque()  # how each is freed
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["device"] != device:
            device = asked["device"]
            driver.use(driver.retain_context(driver.device(device)))
        kind, lead = asked["kind"], asked["lead"]
        needed = lead + asked["nbytes"]
        blob, memory = b"", -1
        if kind == "cuda_ipc":
            size = needed
            address = driver.allocate(size)
            kept.append(partial(driver.free, address))
            blob = driver.ipc_export(address)
            memory = int.from_bytes(blob[12:16], "little")  # the stub's own: the memfd behind it
        else:
            grain = driver.granularity(device)
            size = -(-needed // grain) * grain
            made = driver.create(size, device)
            memory = driver.export_fd(made)
            driver.release(made)  # the descriptor keeps it
            kept.append(partial(os.close, memory))
        if len(kept) > KEPT:
            kept.popleft()()
        handle = {
            "kind": kind,
            "nbytes": asked["nbytes"],
            "base_offset": lead,
            "device": driver.device_uuid(device),
            "blob": blob.hex(),
            "pid": os.getpid(),
            "pid_ns": pid_namespace(),
        }
        print(json.dumps({"handle": handle, "memory": memory, "size": size}), flush=True)


if __name__ == "__main__":
    main()
