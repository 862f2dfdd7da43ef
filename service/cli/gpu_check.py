"""Try on a GPU what kvferry builds on: memory lent between processes, marks, copies bit for bit, order, deaths, speed.

Some fifteen items in about six minutes, each with a limit; a table at the end, with --out a JSON file that grows with
each item. Exit code 1 if an item that must pass did not, or if a control that must fail did not (void). Run it
where the sidecar will run, with no other load on the GPU. `--device cpu` plays the same on shared memory.
"""

import argparse
from pathlib import Path

HELP = "try on a GPU all that kvferry builds on"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to run on, and how much of it."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="what to try (default cuda)")
    parser.add_argument("--gpu", default="0", metavar="GPU", help="UUID or number of the GPU (default 0)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="results as JSON, after each item; `-`: printed at the end"
    )
    parser.add_argument("--items", metavar="LIST", help="only these, as 0-4,13")
    parser.add_argument("--fast", action="store_true", help="smaller sizes in the items 5, 7 and 8")
    parser.add_argument("--small", action="store_true", help="sizes as on CPU wherever that can be; implies --fast")
    parser.add_argument(
        "--no-speed", action="store_true", help="measure, and judge no speed: for a GPU with other load"
    )
    parser.add_argument(
        "--engine",
        choices=("torch", "driver"),
        default="torch",
        help="what plays the engine: torch (default), or the driver alone, without kernels and the items 8 and 14",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the items; 1 if one that must pass did not."""
    from kvferry.gpu_check.plan import chosen
    from kvferry.gpu_check.runner import Choices, run

    is_cpu = arguments.device == "cpu"
    report = run(
        Choices(
            device=arguments.device,
            engine="cpu" if is_cpu else arguments.engine,
            gpu=arguments.gpu,
            items=chosen(arguments.items),
            out=None if str(arguments.out) == "-" else arguments.out,
            is_fast=arguments.fast or arguments.small,
            is_small=arguments.small,
            judges_speed=not arguments.no_speed,
        ),
        lambda text: print(text, flush=True),
    )
    if str(arguments.out) == "-":
        print(report.as_json())
    return 0 if report.passed else 1
