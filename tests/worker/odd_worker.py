"""A worker whose device can be held up from outside: SIGUSR1 stalls every copy, SIGUSR2 lets them go on."""

import signal

from kvferry.gpu_worker import __main__ as worker
from kvferry.gpu_worker.devices.cpu import CpuDevice, Knobs


def main() -> None:
    knobs = Knobs()
    signal.signal(signal.SIGUSR1, lambda *_: knobs.going.clear())
    signal.signal(signal.SIGUSR2, lambda *_: knobs.going.set())
    worker.open_device = lambda kind: CpuDevice(knobs)
    worker.main()


if __name__ == "__main__":
    main()
