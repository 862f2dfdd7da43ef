"""The GPUs of the ranks, found before anything is made: a sidecar that cannot work says so in its first second.

    settings ─▶ python -m kvferry.gpu_worker.check ─▶ one UUID a rank, or ConfigError with the fix

Workers are told UUIDs, whatever was named here. Asked in a process of its own: see there.
"""

import contextlib
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Final

from kvferry.proto.errors import ConfigError
from kvferry.settings import Settings

CHECK_S: Final = 60.0  # the first start of a driver takes seconds; without its daemon, on a large machine, tens
KILLED_S: Final = 2.0  # until a killed child is gone, if it goes at all


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
        code, said, complaints = _run([sys.executable, "-m", "kvferry.gpu_worker.check", *names])
    except subprocess.TimeoutExpired:
        raise ConfigError(
            "device.hangs", f"the CUDA driver gave no answer within {CHECK_S:g} s", "see whether `nvidia-smi` does"
        ) from None
    try:
        answer = json.loads(said)
    except ValueError:
        last = (complaints.strip() or "it said nothing").splitlines()[-1]
        raise ConfigError(
            "device.check", f"asking for the GPUs ended with code {code}: {last}", "see `nvidia-smi`"
        ) from None
    if "code" in answer:
        raise ConfigError(answer["code"], answer["text"], answer["fix"])
    return tuple(RankGpu(gpu["uuid"], gpu["name"], gpu["numa_node"]) for gpu in answer["gpus"])


def _run(command: list[str]) -> tuple[int, str, str]:
    """Exit code and output of a child that may hang in the driver; TimeoutExpired after CHECK_S.

    What hangs there in a system call does not even die when it is killed: it is left behind, not waited for.
    """
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        said, complaints = child.communicate(timeout=CHECK_S)
    except subprocess.TimeoutExpired:
        child.kill()
        for pipe in (child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(KILLED_S)
        raise
    return child.returncode, said, complaints
