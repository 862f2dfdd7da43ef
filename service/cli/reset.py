"""Forget what is stored: of one namespace (one model with its weights and salt), or everything.

At once and for every engine: what was held is a miss, what is being stored is never found, and the order stands
before it is answered, so that no restart brings anything back.
"""

import argparse
import re
import sys

from kvferry.cli.ask import ask
from kvferry.cli.flags import add_run_dir, run_dir_of
from kvferry.proto.control import ResetAnswer, ResetAsk
from kvferry.proto.errors import ConfigError
from kvferry.supervise.rundir import read_lock
from kvferry.units import counted

HELP = "forget what is stored, at once"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where, and what."""
    add_run_dir(parser)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--namespace", metavar="HEX", help="of this namespace: the first digits that `status` shows")
    which.add_argument("--all", action="store_true", help="everything")


def run(arguments: argparse.Namespace) -> int:
    """Ask, and say what was forgotten; 1 if there is no sidecar."""
    if arguments.namespace is not None and not re.fullmatch(r"[0-9a-fA-F]{1,64}", arguments.namespace):
        raise ConfigError(
            "settings.namespace",
            f"--namespace: {arguments.namespace!r} is no namespace",
            "give the hex digits that `kvferry status` shows under namespaces, or --all",
        )
    run_dir = run_dir_of(arguments)
    if read_lock(run_dir) is None:
        print(f"no kvferry runs at {run_dir.path}", file=sys.stderr)
        return 1
    answer = ask(run_dir, ResetAsk(namespace="*" if arguments.all else arguments.namespace), ResetAnswer)
    for name, epoch in sorted(answer.epochs.items()):
        print(f"namespace {name[:12]}: epoch {epoch}")
    print(f"forgot {counted(answer.keys, 'block')} of {counted(len(answer.epochs), 'namespace')}")
    return 0
