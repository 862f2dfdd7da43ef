"""The devices a worker can copy with. Each is imported only when it is opened."""

from kvferry.gpu_worker.devices.base import Device
from kvferry.proto.errors import ConfigError


def open_device(kind: str, gpu: str = "0", *, must_pin: bool = True) -> Device:
    """The device named `kind`, for CUDA on that GPU (UUID or number); ConfigError if it cannot be had."""
    if kind == "cpu":
        from kvferry.gpu_worker.devices.cpu import CpuDevice

        return CpuDevice()
    if kind == "cuda":
        from kvferry.gpu_worker.devices.cuda import CudaDevice

        return CudaDevice(gpu, must_pin=must_pin)
    raise ConfigError("device.kind", f"there is no device {kind!r}", "choose one of: cpu, cuda")
