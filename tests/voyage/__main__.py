"""`python -m tests.voyage --seed N [--verbose]` replays one seed; `--seeds A-B` runs many."""

import argparse
import sys
import time

from .voyage import sail, story_of


def main(argv: list[str] | None = None) -> int:
    """0 if every promise held on every seed."""
    parser = argparse.ArgumentParser(prog="python -m tests.voyage", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this seed")
    parser.add_argument("--seeds", help="run seeds A-B, both included")
    parser.add_argument("--verbose", action="store_true", help="print the whole log of the one seed")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first seed that fails")
    args = parser.parse_args(argv)
    if (args.seed is None) == (args.seeds is None):
        parser.error("give --seed N or --seeds A-B")
    if args.seed is not None:
        first = last = args.seed
    else:
        first, _, last = args.seeds.partition("-")
        first, last = int(first), int(last or first)
    started = time.perf_counter()
    tally: dict[str, int] = {"events": 0}
    failed = 0
    for seed in range(first, last + 1):
        outcome = sail(seed, keep_log=args.verbose)
        if args.verbose:
            for line in outcome.lines:
                print(line)
            print(f"log {outcome.digest}")
        tally["events"] += outcome.num_events
        for name, count in outcome.tally.items():
            tally[name] = tally.get(name, 0) + count
        if outcome.failure:
            failed += 1
            print(f"make voyage SEED={seed}")
            print(f"  {outcome.failure}", file=sys.stderr)
            print("\n".join(outcome.story or story_of(seed)), file=sys.stderr)
            if not args.keep_going:
                break
    spent = time.perf_counter() - started
    ran = seed - first + 1
    print(f"{ran - failed} of {ran} seeds held", file=sys.stderr)
    print(" ".join(f"{k}={v}" for k, v in tally.items()) + f"  {spent / ran * 1000:.0f} ms a seed", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
