"""`python -m kvferry.gpu_worker`: one worker process, started by the supervisor. Imports no torch."""

import argparse
import logging
import os
import signal
import socket
import sys
from typing import NoReturn

from kvferry import process
from kvferry.gpu_worker.devices import open_device
from kvferry.gpu_worker.spare import Options, Worker
from kvferry.logs import let_go, set_up
from kvferry.net.channel import Channel
from kvferry.net.paths import RunDir
from kvferry.proto.errors import KvferryError

log = logging.getLogger("kvferry.worker")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m kvferry.gpu_worker", description=__doc__)
    parser.add_argument("--run-dir", required=True, help="where the daemon listens")
    parser.add_argument("--rank", type=int, required=True, help="the rank and pool file this worker is for")
    parser.add_argument("--worker", type=int, required=True, help="this process's incarnation")
    parser.add_argument("--listen-fd", type=int, required=True, help="inherited listener of the rank's socket")
    parser.add_argument("--control-fd", type=int, required=True, help="inherited channel to the supervisor")
    parser.add_argument("--device", default="cpu", help="what copies: cpu or cuda")
    parser.add_argument("--gpu", default="0", help="for cuda: UUID or number of the rank's GPU")
    parser.add_argument("--pin", default="required", choices=["required", "wanted"], help="for cuda: the pool")
    parser.add_argument("--retry", action="store_true", help="why those before it failed is in the log already")
    return parser.parse_args(arguments)


def main() -> NoReturn:
    """Run one worker and leave by os._exit: mappings and copy threads go with the process, not with cleanup code."""
    options = parse()
    set_up()
    process.name_process(f"kvferry-rank-{options.rank}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the supervisor, who stops us in order
    # A copy thread that comes back from a copy waits for the interpreter's lock at most this long (default 5 ms).
    sys.setswitchinterval(0.0005)
    # To say why it fails, whatever has become of the worker's own end by then.
    supervisor = Channel(socket.socket(fileno=os.dup(options.control_fd)))
    worker: Worker | None = None
    try:
        run_dir = RunDir.at(options.run_dir)
        device = open_device(options.device, options.gpu, must_pin=options.pin == "required")
        worker = Worker(Options(run_dir, options.rank, options.worker, options.listen_fd, options.control_fd), device)
        code = worker.run()
    except KvferryError as error:
        log.log(_level(options, worker), "rank %d: %s", options.rank, error)
        supervisor.send({"event": "failed", "why": str(error)})
        code = 2
    except Exception as error:
        log.log(_level(options, worker), "rank %d: the worker failed", options.rank, exc_info=True)
        supervisor.send({"event": "failed", "why": f"{type(error).__name__}: {error}"})
        code = 1
    logging.shutdown()
    let_go()
    os._exit(code)


def _level(options: argparse.Namespace, worker: Worker | None) -> int:
    """How loud a failure is: one at the start that the supervisor has logged of those before us is not said again."""
    is_start = worker is None or not worker.was_ready
    return logging.DEBUG if options.retry and is_start else logging.ERROR


if __name__ == "__main__":
    main()
