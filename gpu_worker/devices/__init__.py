"""The devices a worker can copy with. Each is imported only when it is opened."""

from kvferry.gpu_worker.devices.base import Device
from kvferry.proto.errors import ConfigError


def open_device(kind: str) -> Device:
    """The device named `kind`; ConfigError if this build has none of that name."""
    if kind == "cpu":
        from kvferry.gpu_worker.devices.cpu import CpuDevice

        return CpuDevice()
    if kind == "cuda":
        raise ConfigError(
            "device.kind",
            "device 'cuda' was asked for, but this build of kvferry has no CUDA device yet",
            "start with --device cpu and let the engine keep its KV cache in shared memory",
        )
    raise ConfigError("device.kind", f"there is no device {kind!r}", "choose one of: cpu")
