"""The GPUs of the ranks, found before anything is made: a sidecar that cannot work says so in its first second.

    settings ─▶ python -m kvferry.gpu_worker.check ─▶ one UUID a rank, or ConfigError with the fix

Workers are told UUIDs, whatever was named here. Asked in a process of its own: see there.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Final

from kvferry.proto.errors import ConfigError
from kvferry.settings import Settings

CHECK_S: Final = 60.0  # the first start of a driver takes seconds; without its daemon, on a large machine, tens


@dataclass(frozen=True, slots=True)
class RankGpu:
    """One rank's GPU."""

    uuid: str
    name: str
    numa_node: int = -1  # of the host memory beside it


def find(settings: Settings) -> tuple[RankGpu, ...]:
    """One GPU for each rank; () without CUDA. ConfigError naming what is missing and the fix."""
    if settings.device != "cuda":
        return ()
    names = [settings.gpu_of(rank) for rank in range(settings.tp_size)]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kvferry.gpu_worker.check", *names],
            capture_output=True,
            text=True,
            timeout=CHECK_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            "device.hangs", f"the CUDA driver gave no answer within {CHECK_S:g} s", "see whether `nvidia-smi` does"
        ) from None
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip() or "it said nothing").splitlines()[-1]
        raise ConfigError(
            "device.check", f"asking for the GPUs ended with code {done.returncode}: {last}", "see `nvidia-smi`"
        ) from None
    if "code" in answer:
        raise ConfigError(answer["code"], answer["text"], answer["fix"])
    return tuple(RankGpu(gpu["uuid"], gpu["name"], gpu["numa_node"]) for gpu in answer["gpus"])
