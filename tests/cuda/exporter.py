"""An engine's process on the stub driver: allocates GPU memory and exports it. Told and heard in JSON lines.

in   {"kind": "cuda_ipc" | "cuda_vmm_fd", "nbytes": n, "lead": l, "device": 0}
out  {"handle": {...}, "memory": descriptor in this process, "size": bytes of the allocation}

The engine's memory begins `lead` bytes into its allocation. It is freed when this process ends.
"""

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.cuda.driver import Driver, pid_namespace
from kvferry.proto.layout import Handle


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
            blob = driver.ipc_export(driver.allocate(size))
            memory = int.from_bytes(blob[12:16], "little")  # the stub's own: the memfd behind it
        else:
            grain = driver.granularity(device)
            size = -(-needed // grain) * grain
            memory = driver.export_fd(driver.create(size, device))
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
