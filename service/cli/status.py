"""Ask the sidecar what it holds and does. Exit code 1 if none runs; with --check also if anything is amiss.

With --json there is always one object on stdout, whatever the exit code: its `state` is `serving` only if the daemon
answered; else it is what the sidecar does instead, `absent`, or the code of an error, and `text` says it for people.
"""

import argparse
import json
import sys
from typing import Any

from kvferry.cli.ask import ask_status, stopped_up
from kvferry.cli.flags import add_run_dir, run_dir_of
from kvferry.net.paths import RunDir
from kvferry.proto.errors import ConfigError, KvferryError
from kvferry.supervise import kept
from kvferry.supervise.rundir import SERVING, left_in, read_lock
from kvferry.units import counted

HELP = "show what the sidecar holds and does"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where, and in which form."""
    add_run_dir(parser)
    parser.add_argument("--json", action="store_true", help="the whole answer as JSON, for programs")
    parser.add_argument(
        "--check", action="store_true", help="for alarms: say only what is amiss, exit code 1 if anything is"
    )


def run(arguments: argparse.Namespace) -> int:
    """Ask, print; 1 if nobody answers."""
    held = None
    try:
        run_dir = run_dir_of(arguments)
        held = kept.look(run_dir)
        return _ask(arguments, run_dir, held)
    except KvferryError as error:
        if not arguments.json:
            raise
        code = _absent(True, str(error), error.code, held)
        return 2 if isinstance(error, ConfigError) else code


def _ask(arguments: argparse.Namespace, run_dir: RunDir, held: kept.Kept | None) -> int:
    holder = read_lock(run_dir)
    if holder is None:
        text = f"no kvferry runs at {run_dir.path}"
        if held is not None and not held.unusable:
            text += f"\n  kept for the next `kvferry up`: {held}; `kvferry down` removes it"
        elif held is not None:
            text += f"\n  left behind: {held}, of no use ({held.unusable}); the next `up` or `down` removes it"
        if names := left_in(run_dir):
            text += f"\n  left by one that was killed: {', '.join(names)}; the next `up` or `down` removes them"
        return _absent(arguments.json, text, "absent", held)
    pid, doing = holder
    if doing != SERVING:
        text = stopped_up(run_dir) or f"kvferry (pid {pid}) at {run_dir.path} is {doing}"
        return _absent(arguments.json, text, doing, held)
    status = {"state": doing, "run_dir": str(run_dir.path), "pid": pid, **ask_status(run_dir)}
    if held is not None:
        # What a start after a crash or a SIGTERM would find at this moment.
        status["kept"] = held.as_dict()
    if arguments.check:
        lacking = amiss(status)
        if arguments.json:
            _print({"state": doing, "text": "\n".join(lacking), "amiss": lacking})
        else:
            print("\n".join(lacking or ["nothing is amiss"]))
        return 1 if lacking else 0
    if arguments.json:
        _print(status)
    else:
        print("\n".join(table({**status, "found": found(status["counters"])})))
    return 0


def _absent(as_json: bool, text: str, state: str, held: kept.Kept | None) -> int:
    if as_json:
        kept_there = held.as_dict() if held is not None else None
        _print({"state": state, "text": text, "kept": kept_there})
    else:
        print(text, file=sys.stderr)
    return 1


def _print(answer: dict[str, Any]) -> None:
    print(json.dumps(answer, indent=2))


def amiss(status: dict[str, Any]) -> list[str]:
    """What an operator may want to hear of though all else is served: a line each."""
    lines = [f"rank {one['rank']} has no spare: {one['why']}" for one in status["no_spare"]]
    for engine in status["engines"]:
        if engine["registered"] and engine["attached"] < engine["world_size"]:
            lines.append(
                f"engine {engine['engine_id']!r}: {engine['attached']} of {engine['world_size']} ranks attached,"
                " it runs without a cache"
            )
        for rank in engine["ranks"]:
            if rank["state"] != "attached":
                lines.append(f"engine {engine['engine_id']!r}: rank {rank['rank']} is {rank['state']}")
    for one in status.get("refused", []):  # an older daemon has no such list
        lines.append(f"engine {one['engine_id']!r}: its {one['half']} is refused: {one['code']}: {one['text']}")
    if status["draining"]:
        lines.append("draining: takes nothing new until `kvferry drain --resume`")
    return lines + (["a new daemon waits for workers of the old one"] if status["restarting"] else [])


def found(counters: dict[str, int]) -> str:
    """The share of the keys that engines asked this daemon for and that it held."""
    asked = counters.get("lookup_keys", 0)
    if not asked:
        return "nothing was asked for yet"
    return f"{counters.get('lookup_keys_hit', 0) / asked:.1%} of {counted(asked, 'key')} asked for"


def table(status: dict[str, Any]) -> list[str]:
    """Lines for a person: plain values first, then one block for each map or list of maps."""
    plain = {key: value for key, value in status.items() if not isinstance(value, dict | list)}
    lines = _columns(plain)
    for key, value in status.items():
        if isinstance(value, dict):
            lines += ["", f"{key}: none"] if not value else ["", key, *("  " + line for line in _columns(value))]
        elif isinstance(value, list):
            lines += ["", f"{key}: none"] if not value else ["", key, *("  " + line for line in _rows(value))]
    return lines


def _columns(items: dict[str, Any]) -> list[str]:
    width = max((len(str(key)) for key in items), default=0)
    return [f"{key!s:<{width}}  {_show(str(key), value)}" for key, value in items.items()]


def _rows(items: list[Any]) -> list[str]:
    if not all(isinstance(item, dict) for item in items):
        return [str(item) for item in items]
    heads = list(dict.fromkeys(key for item in items for key in item))
    cells = [heads, *([_show(head, item.get(head, "")) for head in heads] for item in items)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(heads))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _show(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={_show(key, one)}" for key, one in value.items()) or "-"
    if isinstance(value, list):
        return "; ".join(_show(name, one) for one in value) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and "pid" not in name:
        return f"{value:,}"
    text = str(value)
    # A digest is told from another by its first letters; --json has all of it.
    return text[:12] if len(text) == 64 and name in ("name", "namespace") else text
