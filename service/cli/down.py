"""Stop the sidecar of a run dir, and wait until everything of it is gone; also what an ended one has kept.

With --keep the pool stays in /dev/shm, and the next `kvferry up` with the same settings finds it warm.
"""

import argparse
import os
import signal
import sys
import time
from typing import Final

from kvferry.cli.ask import STOPPED_S, stopped_up
from kvferry.cli.flags import add_run_dir, run_dir_of
from kvferry.net.paths import RunDir
from kvferry.supervise import kept, rundir, sweep
from kvferry.supervise.rundir import read_lock

HELP = "stop the sidecar, and remove what one has kept"
WAIT_S: Final = 20.0  # the supervisor's own bounds end after 3 s for copies and 9 s for its children


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where, and whether to keep."""
    add_run_dir(parser)
    parser.add_argument("--keep", action="store_true", help="keep the pool for the next `kvferry up`")


def run(arguments: argparse.Namespace) -> int:
    """Tell the holder of the lock to stop; 1 if there is nothing to stop or remove, or it does not end."""
    run_dir = run_dir_of(arguments)
    holder = read_lock(run_dir)
    if holder is None:
        return _remove_kept(run_dir, arguments.keep)
    pid = holder[0]
    try:
        pidfd = os.pidfd_open(pid)
        # Asked again with the process held: if the lock is still taken by this pid, it is no stranger's number.
        if read_lock(run_dir) == holder or (read_lock(run_dir) or (0,))[0] == pid:
            signal.pidfd_send_signal(pidfd, signal.SIGTERM if arguments.keep else signal.SIGUSR1)
        os.close(pidfd)
    except (OSError, ValueError) as error:
        print(f"cannot signal kvferry (pid {pid}) at {run_dir.path}: {error}", file=sys.stderr)
        print("  fix: run this as the same user and in the same container as `kvferry up`", file=sys.stderr)
        return 1
    now = ran_at = time.monotonic()
    end = now + WAIT_S
    while now < end:
        if read_lock(run_dir) is None:
            left = kept.look(run_dir) if arguments.keep else None
            print(f"kvferry (pid {pid}) at {run_dir.path} is down" + (f"; kept: {left}" if left else ""))
            return 0
        stopped = stopped_up(run_dir)
        if not stopped:
            ran_at = now
        elif now - ran_at > STOPPED_S:
            print(f"{stopped}; it was told to stop, and does when it goes on", file=sys.stderr)
            return 1
        time.sleep(0.05)
        now = time.monotonic()
    print(f"kvferry (pid {pid}) at {run_dir.path} was told to stop but still runs after {WAIT_S:g} s", file=sys.stderr)
    return 1


def _remove_kept(run_dir: RunDir, keep: bool) -> int:
    found = kept.look(run_dir)
    left = rundir.left_in(run_dir)
    if keep or (found is None and not left):
        said = f"; kept: {found}" if found else ""
        print(f"no kvferry runs at {run_dir.path}{said}", file=sys.stderr)
        return 1
    created = rundir.make_private(run_dir)
    lock = rundir.Lock(run_dir)  # nobody starts on it meanwhile
    try:
        for line in sweep.free_files(run_dir):
            print(line, file=sys.stderr)
        rundir.remove_files(run_dir)
        rundir.clean_up(run_dir)
    finally:
        lock.release()
        if created or run_dir.is_default:
            rundir.remove_if_empty(run_dir)
    removed = [f"what was kept: {found}"] if found else []
    removed += ["what a killed one left: " + ", ".join(left)] if left else []
    print(f"no kvferry runs at {run_dir.path}; removed {' and '.join(removed)}")
    return 0
