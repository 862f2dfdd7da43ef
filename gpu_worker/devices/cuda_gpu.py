"""Which GPU a rank uses, and what it can do. Opens no context and no memory, so that the launcher may ask too.

    kvferry up --devices GPU-8f…,GPU-21…     rank r has the r-th, by UUID (or by number, as this process counts)
    kvferry up                               rank r has the r-th GPU that is visible here

Numbers mean something in one process only: what travels and what is compared is the UUID.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvferry.cuda.driver import CudaError, Driver, same_gpu
from kvferry.cuda.structs import COMPUTE_MODES, DeviceAttribute
from kvferry.proto.errors import ConfigError
from kvferry.proto.tether import MarkMode

COMPUTE_MODE_DEFAULT: Final = 0
PCI_DEVICES: Final = Path("/sys/bus/pci/devices")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU and the answers that decide how it is used."""

    device: int
    uuid: str
    name: str
    numa_node: int  # of the host memory next to it; -1: not known
    same_address: bool  # it takes this process's addresses of registered memory
    takes_fds: bool  # memory can be mapped from a descriptor
    mark_mode: MarkMode  # what an engine's stream on it can write
    compute_mode: int


def find(driver: Driver, name: str) -> Gpu:
    """The GPU of that UUID or number. ConfigError naming those that are there."""
    try:
        devices = [driver.device(ordinal) for ordinal in range(driver.device_count())]
        uuids = [driver.device_uuid(device) for device in devices]
        if name.isdecimal():
            chosen = devices[int(name)] if int(name) < len(devices) else None
        else:
            chosen = next((d for d, u in zip(devices, uuids, strict=True) if same_gpu(u, name)), None)
        if chosen is None:
            raise ConfigError(
                "device.not_visible",
                f"GPU {name} is not visible here; there are {len(uuids)}: {', '.join(uuids) or 'none'}",
                "name GPUs of this list with --devices, or make the GPU visible (CUDA_VISIBLE_DEVICES; in a"
                " container --gpus or NVIDIA_VISIBLE_DEVICES)",
            )
        return _look_at(driver, chosen)
    except CudaError as error:
        raise ConfigError(
            "device.open", f"GPU {name} cannot be asked about: {error.text}", "see `nvidia-smi`"
        ) from None


def check_usable(gpu: Gpu) -> None:
    """ConfigError if the engine's process is the only one that may use this GPU."""
    if gpu.compute_mode != COMPUTE_MODE_DEFAULT:
        mode = COMPUTE_MODES.get(gpu.compute_mode, str(gpu.compute_mode))
        raise ConfigError(
            "device.exclusive",
            f"GPU {gpu.uuid} is in compute mode {mode!r}: a worker beside the engine is not let in",
            "nvidia-smi -c DEFAULT (as root, on the host)",
        )


def _look_at(driver: Driver, device: int) -> Gpu:
    def ask(attribute: DeviceAttribute) -> int:
        return driver.device_attribute(attribute, device)

    return Gpu(
        device,
        driver.device_uuid(device),
        driver.device_name(device),
        numa_node=_numa_node(driver, device),
        same_address=bool(ask(DeviceAttribute.CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM)),
        takes_fds=bool(ask(DeviceAttribute.HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)),
        mark_mode="word" if ask(DeviceAttribute.CAN_USE_64_BIT_STREAM_MEM_OPS) else "host",
        compute_mode=ask(DeviceAttribute.COMPUTE_MODE),
    )


def _numa_node(driver: Driver, device: int) -> int:
    """As the driver says it, else as the kernel says of its place on the bus; -1: neither knows."""
    try:
        node = driver.device_attribute(DeviceAttribute.HOST_NUMA_ID, device)
    except CudaError:  # drivers before 12.2 do not know the question
        node = -1
    if node >= 0:
        return node
    try:
        return int((PCI_DEVICES / driver.pci_bus_id(device) / "numa_node").read_text())
    except (CudaError, OSError, ValueError):
        return -1
