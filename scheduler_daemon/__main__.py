"""`python -m kvferry.scheduler_daemon`: started by the supervisor, never by hand.

It ends with 0 when it is told to stop or when the supervisor is gone.
"""

import argparse
import gc
import logging
import secrets
import signal
import sys

from kvferry import logs, process
from kvferry.net.channel import Channel
from kvferry.net.paths import RunDir
from kvferry.proto.errors import KvferryError
from kvferry.proto.ids import BootId
from kvferry.proto.limits import PAGE_BYTES
from kvferry.scheduler_daemon.core.api import CoreSettings
from kvferry.scheduler_daemon.core.core import Core
from kvferry.scheduler_daemon.loop import Daemon
from kvferry.scheduler_daemon.table import TableFile, machine_boot

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
    parser.add_argument("--load-s", type=float, default=5.0)
    parser.add_argument("--grace-s", type=float, default=2.0)
    parser.add_argument("--in-flight-bytes", type=int, default=1 << 30)
    arguments = parser.parse_args(argv)
    logs.set_up()
    process.name_process("kvferry-daemon")
    # The supervisor stops us over the control channel; a Ctrl-C in its terminal is its business.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    boot = BootId(secrets.randbits(64) or 1)
    settings = CoreSettings(
        boot=boot,
        tp_size=arguments.tp_size,
        lease_ns=_ns(arguments.lease_s),
        lease_share=arguments.lease_share,
        job_ns=_ns(arguments.job_s),
        load_ns=_ns(arguments.load_s),
        grace_ns=_ns(arguments.grace_s),
        max_in_flight_bytes=arguments.in_flight_bytes,
    )
    try:
        run_dir = RunDir.at(arguments.run_dir)
        control = Channel.inherited(arguments.control_fd)
        table = TableFile(run_dir.table, machine_boot())
        # A table of millions of records becomes as many acyclic entries: one collection over them costs more
        # than a step may take, and reading them must not wait for any.
        gc.disable()
        recovered = table.recover(_pool_bytes(run_dir, arguments.tp_size))
        if table.discarded:
            log.warning("what an earlier daemon left in %s is dropped: %s", table.path, table.discarded)
        core = Core(settings, make_table=table.make, recovered=recovered)
        daemon = Daemon(run_dir, core, control, table)
        gc.freeze()  # nothing of this is garbage: whoever collects ever again passes it by
        daemon.run()
    except (KvferryError, OSError) as error:
        log.error("%s", error)
        return 1
    table.close()
    return 0


def _pool_bytes(run_dir: RunDir, tp_size: int) -> tuple[int, ...]:
    """Bytes for slots in each rank's pool file; empty if one is missing."""
    try:
        return tuple(run_dir.pool(rank).stat().st_size - PAGE_BYTES for rank in range(tp_size))
    except OSError:
        return ()


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


if __name__ == "__main__":
    code = main()
    logs.let_go()
    sys.exit(code)
