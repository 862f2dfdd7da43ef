"""Process W: the real worker, and two ways to bend it for a control. `kvferry.gpu_worker` is what runs.

    --pace N          a CPU device moves N bytes a second: what a GPU's copy leaves time for happens here too
    --early-revokes   the planted fault: revokes are read before a store's first byte, not after its last one

All other flags are the worker's own.
"""

import argparse
import sys

from kvferry.gpu_worker import __main__ as worker
from kvferry.gpu_worker import core, devices
from kvferry.gpu_worker.devices.base import Device
from kvferry.gpu_worker.devices.cpu import CpuDevice, Knobs
from kvferry.gpu_worker.guards import Guards
from kvferry.gpu_worker.tickets import Transfer
from kvferry.proto.outcome import Kind


class EarlyGuards(Guards):
    """Looks for revokes at the wrong end of the copy."""

    _asked: dict[int, bool] | None = None

    def before_the_first_byte(self, transfer: Transfer) -> None:
        if transfer.kind is Kind.STORE:
            self._asked = (self._asked or {}) | {transfer.ticket: super().is_revoked(transfer)}
        super().before_the_first_byte(transfer)

    def is_revoked(self, transfer: Transfer) -> bool:
        asked = self._asked or {}
        return asked.pop(transfer.ticket) if transfer.ticket in asked else super().is_revoked(transfer)


def main() -> None:
    """Take our own flags, and leave the rest to the worker."""
    parser = argparse.ArgumentParser(prog="python -m kvferry.gpu_check.worker", description=__doc__)
    parser.add_argument("--pace", type=float, default=0)
    parser.add_argument("--early-revokes", action="store_true")
    own, rest = parser.parse_known_args()
    if own.early_revokes:
        vars(core)["Guards"] = EarlyGuards

    def open_device(kind: str, gpu: str = "0", *, must_pin: bool = True) -> Device:
        return CpuDevice(Knobs(bytes_per_s=own.pace)) if own.pace else devices.open_device(kind, gpu, must_pin=must_pin)

    vars(worker)["open_device"] = open_device
    sys.argv[1:] = rest
    worker.main()


if __name__ == "__main__":
    main()
