"""One run: the items one after the other, each within its limit, each result on disk before the next begins.

item ──in time──▶ its ending          its processes stay for the next one
     ──limit──▶ SIGALRM ──▶ fail      ┐
     ──error──▶ fail                  ┴─▶ all processes killed; the next item starts its own
"""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import kvferry
from kvferry.gpu_check.compute_torch import NO_TORCH_FIX
from kvferry.gpu_check.items_look import kernel
from kvferry.gpu_check.plan import Item
from kvferry.gpu_check.results import Ending, Report, Result, Status, table_of
from kvferry.gpu_check.stage import Stage
from kvferry.proto.errors import ConfigError

CHECK_S: Final = 60.0
MAX_LINES: Final = 40  # of what the processes of an item said, told if it failed
Say = Callable[[str], None]


class TimeIsUp(Exception):  # noqa: N818  how a limit ends an item
    """An item passed its limit."""


@dataclass(frozen=True, slots=True)
class Choices:
    """How to run."""

    device: str
    engine: str  # cpu, torch or driver
    gpu: str
    items: Sequence[Item]
    out: Path | None
    is_fast: bool
    is_small: bool
    judges_speed: bool


def run(choices: Choices, say: Say) -> Report:
    """Run all items; what came of them. ConfigError if the device cannot be had at all."""
    gpu = _check_device(choices)
    report = Report(
        {
            "kvferry": kvferry.__version__,
            "device": choices.device,
            "engine": choices.engine,
            "fast": choices.is_fast,
            "small": choices.is_small,
            "judges_speed": choices.judges_speed and choices.device != "cpu",
        }
    )
    stage = Stage(
        choices.device,
        choices.engine,
        gpu,
        is_fast=choices.is_fast,
        is_small=choices.is_small,
        judges_speed=choices.judges_speed,
    )
    report.about["instance"] = stage.run_dir.instance  # in the names of its files in /dev/shm
    finding = ""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that it, too, leaves nothing
    try:
        for item in choices.items:
            say(f"{item.number:>3}  {item.name} (at most {item.limit_s:g} s) ...")
            report.results.append(_skipped(item, finding) if finding else _run_item(item, stage))
            finding = finding or _finding(report.results[-1])
            if choices.out is not None:
                report.write(choices.out)
            last = report.results[-1]
            for line in (*last.facts.get("said", ()), f"{last.status}: {last.text}"):
                say(f"     {line}")
    finally:
        stage.close()
        signal.signal(signal.SIGTERM, before)
    if stage.leaks:
        report.about["leaks"] = stage.leaks
        for leak in stage.leaks:
            say(leak)
        if choices.out is not None:
            report.write(choices.out)
    say("")
    say(table_of(report))
    return report


def _finding(result: Result) -> str:
    """Why no other item is worth its time; "" if they are: without memory that goes between processes none works."""
    is_lost = result.item == 1 and result.status is Status.FAIL and "gVisor" in kernel()
    return "item 1 failed on gVisor, which is the finding: no memory goes between processes here" if is_lost else ""


def _skipped(item: Item, why: str) -> Result:
    return Result(item.number, item.name, item.must, Status.SKIPPED, why, 0.0, item.limit_s)


def _run_item(item: Item, stage: Stage) -> Result:
    facts: dict[str, Any] = {}
    heard = len(stage.said())
    began = time.monotonic()
    try:
        with _limit(item.limit_s):
            status, text = Status.PASS, item.run(stage, facts)
    except Ending as ending:
        status, text = ending.status, str(ending)
    except TimeIsUp:
        status, text = Status.FAIL, f"not over within its {item.limit_s:g} s"
    except Exception as error:  # whatever it was, it costs this item alone
        status, text = Status.FAIL, f"{type(error).__name__}: {error}"
    if status in (Status.FAIL, Status.VOID):
        stage.clear()
        facts["said"] = stage.said(heard).decode(errors="replace").splitlines()[-MAX_LINES:]
    text = " ".join(text.split())
    return Result(
        item.number, item.name, item.must, status, text, round(time.monotonic() - began, 2), item.limit_s, facts
    )


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """TimeIsUp in here after so long. The main thread's alone, as signals are."""

    def ring(*_: object) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _check_device(choices: Choices) -> str:
    """The GPU by its UUID. ConfigError with the fix if driver, GPU or torch are not here: once, not in each item."""
    if choices.device == "cpu":
        return ""
    # In a process of its own: whoever has started the driver holds on to the GPU until it ends.
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kvferry.gpu_worker.check", choices.gpu],
            capture_output=True,
            text=True,
            timeout=CHECK_S,
            check=False,
            env=dict(os.environ),
        )
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            "device.hangs", f"the CUDA driver gave no answer within {CHECK_S:g} s", "see whether `nvidia-smi` does"
        ) from None
    except ValueError:
        last = (done.stderr.strip() or "it said nothing").splitlines()[-1]
        raise ConfigError("device.check", f"asking for the GPU failed: {last}", "see `nvidia-smi`") from None
    if "code" in answer:
        raise ConfigError(answer["code"], answer["text"], answer["fix"])
    if choices.engine == "torch" and importlib.util.find_spec("torch") is None:
        raise ConfigError("check.torch", "the engine is played with torch, which is not installed here", NO_TORCH_FIX)
    return str(answer["gpus"][0]["uuid"])
