"""`python -m tests.voyage --seed N [--verbose]` replays one seed; `--seeds A-B` runs many."""

import argparse
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from .voyage import Outcome, sail, story_of


def main(argv: list[str] | None = None) -> int:
    """0 if every promise held on every seed."""
    parser = argparse.ArgumentParser(prog="python -m tests.voyage", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this seed")
    parser.add_argument("--seeds", help="run seeds A-B, both included")
    parser.add_argument("--verbose", action="store_true", help="print the whole log of the one seed")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first seed that fails")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the seeds")
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
    failed = ran = with_faults = 0
    for outcome in outcomes(first, last, args.jobs, keep_log=args.verbose):
        ran += 1
        if args.verbose:
            for line in outcome.lines:
                print(line)
            print(f"log {outcome.digest}")
        with_faults += bool(outcome.faults)
        tally["events"] += outcome.num_events
        for name, count in outcome.tally.items():
            tally[name] = tally.get(name, 0) + count
        if outcome.failure:
            failed += 1
            print(f"make voyage SEED={outcome.seed}", flush=True)
            print(f"  {outcome.failure}", file=sys.stderr)
            print("\n".join(outcome.story or story_of(outcome.seed)), file=sys.stderr)
            if not args.keep_going:
                break
    spent = time.perf_counter() - started
    print(f"{ran - failed} of {ran} seeds held, {with_faults} of them with faults", file=sys.stderr)
    print(" ".join(f"{k}={v}" for k, v in tally.items()) + f"  {spent / ran * 1000:.0f} ms a seed", file=sys.stderr)
    return 1 if failed else 0


def outcomes(first: int, last: int, num_jobs: int, *, keep_log: bool) -> Iterator[Outcome]:
    """What came of each seed, in order."""
    seeds = range(first, last + 1)
    if num_jobs <= 1:
        yield from (sail(seed, keep_log=keep_log) for seed in seeds)
        return
    with ProcessPoolExecutor(num_jobs) as processes:
        try:
            yield from processes.map(sail, seeds, chunksize=20)
        finally:
            processes.shutdown(cancel_futures=True)


if __name__ == "__main__":
    sys.exit(main())
