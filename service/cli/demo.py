"""Play the demo: a small real engine with two ranks, whose evicted prefixes come back through a sidecar.

It stands in the source tree (examples/demo.py) and needs torch; `make demo` sets up both.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import kvferry

HELP = "play the demo from the source tree"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None of its own: all flags are handed to the demo."""
    parser.epilog = "Flags are handed to the demo: --quick, --host-memory SIZE."


def run(arguments: argparse.Namespace) -> int:
    """Run examples/demo.py of the tree that this kvferry is installed from."""
    script = Path(kvferry.__file__).resolve().parent.parent / "examples" / "demo.py"
    if not script.is_file():
        print("the demo is no part of the installed package: clone the repository and run `make demo`", file=sys.stderr)
        return 1
    return subprocess.run([sys.executable, str(script), *arguments.rest], check=False).returncode
