"""Item 0: where this runs. Nothing is judged; what is not known here is told as such."""

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from kvferry.cuda.driver import CudaError, Driver
from kvferry.cuda.structs import COMPUTE_MODES, CTX_SCHED_BLOCKING_SYNC
from kvferry.gpu_check.stage import Stage
from kvferry.gpu_worker.devices.cuda_gpu import find
from kvferry.supervise.memory import read_machine

# compute mode, copy engines, host pointers, host registration, fds, 64-bit stream writes, IPC events, NUMA node
ATTRIBUTES: Final = (20, 40, 91, 99, 103, 122, 125, 134)
GVISOR: Final = "Sun Jan 10 15:06:54 PST 2016"
SMI_FIELDS: Final = "mig.mode.current,pcie.link.gen.current,pcie.link.width.current,driver_version,compute_mode"


def look(stage: Stage, facts: dict[str, Any]) -> str:
    """Item 0: kernel, driver, GPU, shared memory; and on a GPU what a worker's context takes of it."""
    machine = read_machine()
    facts |= {
        "kernel": kernel(),
        "python": sys.version.split()[0],
        "cpus": os.cpu_count(),
        "shm_free": machine.shm_free,
        "memory_available": machine.available,
        "cgroup_free": machine.cgroup_free,
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "pid_namespace": str(Path("/proc/self/ns/pid").readlink()) if hasattr(os, "readlink") else "",
    }
    if stage.is_cpu:
        return f"{facts['kernel']}; {machine.shm_free >> 20} MiB of shared memory free"
    watcher = stage.copier()
    facts |= {"gpu": watcher.ask("look", 20, gpu=stage.gpu), "nvidia_smi": _smi()}
    before = watcher.ask("memory_free", 5)
    stage.make_pool(1 << 20)
    worker = stage.worker()
    facts["worker_context_bytes"] = before - watcher.ask("memory_free", 5)
    facts["worker"] = worker.device
    stage.end_copiers()
    stage.clear()
    gpu = facts["gpu"]
    return (
        f"{gpu['name']}, driver of CUDA {gpu['cuda']}; {facts['kernel']}; a worker's context takes"
        f" {facts['worker_context_bytes'] >> 20} MiB; {machine.shm_free >> 20} MiB of shared memory free"
    )


def ask_driver(gpu: str) -> dict[str, Any]:
    """What the driver says of a GPU; in a process that may hold a context."""
    driver = Driver.load()
    found = find(driver, gpu)
    attributes: dict[str, Any] = {}
    for number in ATTRIBUTES:
        try:
            attributes[str(number)] = driver.device_attribute(number, found.device)
        except CudaError as error:
            attributes[str(number)] = error.text
    version = driver.version()
    return {
        "name": found.name,
        "uuid": found.uuid,
        "pci": driver.pci_bus_id(found.device),
        "cuda": f"{version // 1000}.{version % 1000 // 10}",
        "compute_mode": COMPUTE_MODES.get(found.compute_mode, str(found.compute_mode)),
        "has_batch": driver.has_batch,
        "num_gpus": driver.device_count(),
        "context_flags": CTX_SCHED_BLOCKING_SYNC,
        "attributes": attributes,
    }


def kernel() -> str:
    """The kernel's name, with gVisor named where it plays one."""
    text = " ".join(os.uname()[i] for i in (0, 2, 3))
    # What gVisor gives as its version to every process, whenever it was built.
    return f"{text} (gVisor)" if GVISOR in text or "gvisor" in text.lower() else text


def _smi() -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not to be had: {error}"
    return (done.stdout or done.stderr).strip()
