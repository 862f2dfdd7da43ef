"""`kvferry COMMAND`: finds the command and turns every known error into one plain answer, never a traceback.

Exit codes: 0 done · 1 it did not work, or there is no sidecar · 2 a setting or a flag cannot be.
Each command is a module beside this one with `HELP`, `add_arguments(parser)` and `run(arguments) -> int`.
"""

import argparse
import errno
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final

from kvferry.logs import let_go, say
from kvferry.proto.errors import ConfigError, KvferryError

COMMANDS: Final = ("up", "status", "reset", "drain", "down", "gpu-check", "demo", "version")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    try:
        code = _run(argv)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except KvferryError as error:
        say(error, sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EIO) or error.filename is not None:
            raise  # it was not our output
        if error.errno != errno.EPIPE:  # else its reader has gone, as `| head` does
            say(f"cannot write the answer to stdout: {error.strerror}", sys.stderr)
        return 1
    finally:
        let_go()


def _run(argv: Sequence[str] | None) -> int:
    # Imported here and not above: most of a short command's time is imports, and a Ctrl-C falls into it.
    modules = {name: import_module(f"kvferry.cli.{name.replace('-', '_')}") for name in COMMANDS}
    parser = argparse.ArgumentParser(
        prog="kvferry",
        description="A sidecar that keeps the KV cache of LLM inference servers beyond GPU memory.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=modules["version"].text(), help="show versions")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    parsers = {}
    for name, module in modules.items():
        one = parsers[name] = commands.add_parser(
            name, help=module.HELP, description=module.__doc__, allow_abbrev=False
        )
        one.formatter_class = argparse.RawDescriptionHelpFormatter
        module.add_arguments(one)
    arguments, rest = parser.parse_known_args(_joined(sys.argv[1:] if argv is None else argv))
    if rest and arguments.command != "demo":
        parsers[arguments.command].error("unknown: " + " ".join(rest))  # with the usage of this command
    arguments.rest = rest
    return int(modules[arguments.command].run(arguments))


def _joined(argv: Sequence[str]) -> list[str]:
    """`--timeout -1s` as `--timeout=-1s`: argparse takes -1s for a flag, and says nothing of what is wrong with it."""
    joined: list[str] = []
    for word in argv:
        if re.match(r"-[0-9.]", word) and joined and re.fullmatch(r"--[a-z-]+", joined[-1]):
            joined[-1] += "=" + word
        else:
            joined.append(word)
    return joined


if __name__ == "__main__":
    sys.exit(main())
