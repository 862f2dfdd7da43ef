"""`python -m kvferry.scheduler_daemon`: started by the supervisor, never by hand.

It ends with 0 when it is told to stop or when the supervisor is gone.
"""

import argparse
import gc
import logging
import secrets
import signal
import sys
from functools import partial

from kvferry import logs
from kvferry.net.channel import Channel
from kvferry.net.paths import RunDir
from kvferry.proto.errors import KvferryError
from kvferry.proto.ids import BootId
from kvferry.scheduler_daemon.core.api import CoreSettings
from kvferry.scheduler_daemon.core.core import Core
from kvferry.scheduler_daemon.core.slots import RECORD
from kvferry.scheduler_daemon.loop import Daemon
from kvferry.scheduler_daemon.table import TableFile

log = logging.getLogger("kvferry.daemon")


def main(argv: list[str] | None = None) -> int:
    """Serve; the exit code."""
    parser = argparse.ArgumentParser(prog="kvferry-daemon", allow_abbrev=False)
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--tp-size", type=int, required=True)
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--lease-s", type=float, default=10.0)
    parser.add_argument("--lease-share", type=float, default=0.5)
    parser.add_argument("--job-s", type=float, default=30.0)
    parser.add_argument("--grace-s", type=float, default=5.0)
    parser.add_argument("--in-flight-bytes", type=int, default=1 << 30)
    arguments = parser.parse_args(argv)
    logs.set_up()
    # The supervisor stops us over the control channel; a Ctrl-C in its terminal is its business.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    boot = BootId(secrets.randbits(64) or 1)
    settings = CoreSettings(
        boot=boot,
        tp_size=arguments.tp_size,
        lease_ns=_ns(arguments.lease_s),
        lease_share=arguments.lease_share,
        job_ns=_ns(arguments.job_s),
        grace_ns=_ns(arguments.grace_s),
        max_in_flight_bytes=arguments.in_flight_bytes,
    )
    try:
        run_dir = RunDir.at(arguments.run_dir)
        control = Channel.inherited(arguments.control_fd)
        table = TableFile(run_dir.table)
        core = Core(settings, make_table=partial(table.make, dtype=RECORD))
        daemon = Daemon(run_dir, core, control)
        # The index is millions of acyclic entries: one full collection over them costs more than a step may take.
        gc.collect()
        gc.freeze()
        gc.disable()
        daemon.run()
    except (KvferryError, OSError) as error:
        log.error("%s", error)
        return 1
    table.close()
    return 0


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


if __name__ == "__main__":
    sys.exit(main())
