"""`python -m tests.chaos --minutes 10 [--tp 2] [--seed 7] [--strict] [--json FILE] [--keep DIR]`: 1 if a must fails."""

import argparse
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path

from .drill import Plan, run
from .faults import KINDS
from .report import as_json, passes, table, verdict


def main(argv: list[str] | None = None) -> int:
    """Run a drill and report."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of faults, beside the starts")
    parser.add_argument("--tp", type=int, default=1, help="ranks of the engine")
    parser.add_argument("--seed", type=int, default=0, help="of talks, users and faults")
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--talks", type=int, default=20)
    parser.add_argument("--only", action="append", default=[], help="only kinds of fault with this in their name")
    parser.add_argument("--strict", action="store_true", help="goals are musts: for a machine with nothing else to do")
    parser.add_argument("--json", type=Path, help="write all findings here")
    parser.add_argument("--keep", type=Path, help="keep logs in this folder (a short path: sockets live in it)")
    given = parser.parse_args(argv)
    kinds = tuple(kind for kind in KINDS if not given.only or any(word in kind.name for word in given.only))
    if given.only:
        kinds = tuple(replace(kind, weight=max(kind.weight, 1)) for kind in kinds)
    if not kinds:
        parser.error("no kind of fault has that in its name: " + "; ".join(kind.name for kind in KINDS))
    plan = Plan(given.minutes, given.tp, given.seed, given.users, given.talks, kinds=kinds, folder=given.keep)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that engine and sidecar end with us
    found = run(plan)
    print(table(found))
    if given.json:
        given.json.write_text(json.dumps(as_json(found), indent=1))
    return 0 if passes(verdict(found), strict=given.strict) else 1


if __name__ == "__main__":
    sys.exit(main())
