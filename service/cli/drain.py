"""Come to rest before maintenance: nothing new is taken, running loads end, running stores get a moment.

Engines go on with misses. The sidecar stays up and keeps all it holds; `--resume` lets it take work again.
"""

import argparse
import sys
from typing import Final

from kvferry.cli.ask import ask
from kvferry.cli.flags import add_run_dir, run_dir_of
from kvferry.proto.control import DrainAnswer, DrainAsk
from kvferry.proto.errors import ConfigError
from kvferry.supervise.rundir import read_lock
from kvferry.units import counted, parse_seconds

HELP = "take nothing new and let what runs end"
# Beyond the stores' budget: a load ends by its own deadline, and whoever then owes a word is killed.
MARGIN_S: Final = 60.0
MAX_S: Final = 3600.0
FIX: Final = "give a time of at most an hour, as 500ms, 10s or 2m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where, and how patient."""
    add_run_dir(parser)
    parser.add_argument("--timeout", metavar="TIME", default="2s", help="what running stores are given (default 2s)")
    parser.add_argument("--resume", action="store_true", help="end the drain: take work again")


def run(arguments: argparse.Namespace) -> int:
    """Ask and wait for the rest; 1 if there is no sidecar or no rest."""
    try:
        budget_s = parse_seconds(arguments.timeout)
    except ValueError as error:
        raise ConfigError("settings.timeout", f"--timeout: {error}", FIX) from None
    if budget_s > MAX_S:
        raise ConfigError("settings.timeout", f"--timeout: {arguments.timeout} is more than {MAX_S:g} s", FIX)
    run_dir = run_dir_of(arguments)
    if read_lock(run_dir) is None:
        print(f"no kvferry runs at {run_dir.path}", file=sys.stderr)
        return 1
    question = DrainAsk(budget_ms=int(budget_s * 1000), resume=arguments.resume)
    answer = ask(run_dir, question, DrainAnswer, budget_s + MARGIN_S)
    if arguments.resume:
        print(f"kvferry at {run_dir.path} takes work again")
    else:
        dropped = counted(answer.dropped, "store was", "stores were") + " dropped"
        print(f"kvferry at {run_dir.path} is at rest after {answer.waited_ms / 1000:.1f} s; {dropped}")
    return 0
