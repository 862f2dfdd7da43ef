"""Stop the sidecar of a run dir, and wait until everything of it is gone."""

import argparse
import os
import signal
import sys
import time
from typing import Final

from kvferry.cli.flags import add_settings, settings_of
from kvferry.supervise.rundir import read_lock

HELP = "stop the sidecar"
WAIT_S: Final = 20.0  # the supervisor's own bounds for its children end after 9 s


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where."""
    add_settings(parser, ["run_dir"])


def run(arguments: argparse.Namespace) -> int:
    """SIGTERM to the holder of the lock; 1 if there is none or it does not end."""
    run_dir = settings_of(arguments).directory()
    holder = read_lock(run_dir)
    if holder is None:
        print(f"no kvferry runs at {run_dir.path}", file=sys.stderr)
        return 1
    pid = holder[0]
    try:
        pidfd = os.pidfd_open(pid)
        # Asked again with the process held: if the lock is still taken by this pid, it is no stranger's number.
        if read_lock(run_dir) == holder or (read_lock(run_dir) or (0,))[0] == pid:
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        os.close(pidfd)
    except (OSError, ValueError) as error:
        print(f"cannot signal kvferry (pid {pid}) at {run_dir.path}: {error}", file=sys.stderr)
        print("  fix: run this as the same user and in the same container as `kvferry up`", file=sys.stderr)
        return 1
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        if read_lock(run_dir) is None:
            print(f"kvferry (pid {pid}) at {run_dir.path} is down")
            return 0
        time.sleep(0.05)
    print(f"kvferry (pid {pid}) at {run_dir.path} was told to stop but still runs after {WAIT_S:g} s", file=sys.stderr)
    return 1
