"""A worker whose device can be held up from outside: SIGUSR1 stalls every copy, SIGUSR2 lets them go on.

A file `stalled` in the run dir says that it has heard the first.
"""

import signal
import sys
from pathlib import Path

from kvferry.gpu_worker import __main__ as worker
from kvferry.gpu_worker.devices.cpu import CpuDevice, Knobs


def main() -> None:
    knobs = Knobs()
    run_dir = Path(sys.argv[sys.argv.index("--run-dir") + 1])

    def stall(*_: object) -> None:
        knobs.going.clear()
        (run_dir / "stalled").touch()

    signal.signal(signal.SIGUSR1, stall)
    signal.signal(signal.SIGUSR2, lambda *_: knobs.going.set())
    worker.open_device = lambda *_, **__: CpuDevice(knobs)
    worker.main()


if __name__ == "__main__":
    main()
