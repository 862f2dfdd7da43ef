"""`kvferry gpu-check` on the stub of the driver: the calls are right. Nothing is said here about a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cuda.stubs import environment, violations

pytestmark = pytest.mark.process


def check(tmp_path: Path, *flags: str, violates: str = "no call") -> tuple[int, dict[int, dict[str, Any]], str]:
    """Exit code, items by number, and all that was said; nothing was misused and nothing is left."""
    out = tmp_path / "check.json"
    journal = tmp_path / "calls"
    done = subprocess.run(
        [sys.executable, "-m", "kvferry.cli.main", "gpu-check", "--out", str(out), *flags],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, **environment(journal), "TMPDIR": str(tmp_path)},
    )
    assert [line for line in violations(journal) if violates not in line] == []
    report = json.loads(out.read_text())
    assert not list(Path("/dev/shm").glob(f"kvferry-{report['instance']}-*"))
    assert not list(tmp_path.glob("kvferry-check-*"))
    return done.returncode, {item["item"]: item for item in report["items"]}, done.stderr + done.stdout


def test_every_item_that_needs_no_kernel_passes_on_the_stub(tmp_path: Path) -> None:
    """Cases 1, 83, 98 and 99 among others, on the CUDA device, the real worker and the real client library."""
    code, items, told = check(tmp_path, "--engine", "driver", "--small", "--no-speed")
    assert code == 0, told
    for number, item in items.items():
        assert item["status"] == ("skipped" if number in (8, 14) else "pass"), item
    assert items[0]["facts"]["gpu"]["name"] == "Stub GPU"
    assert items[1]["facts"]["handle"] == "cuda_ipc" and "handle.other_gpu" in items[1]["facts"]["forged"]
    assert items[3]["facts"]["paths"] == ["batch", "loop"]
    assert min(items[4]["facts"]["control_wrong_of"][kind] for kind in ("store", "load")) > 0
    assert items[9]["facts"]["handle"] == "cuda_vmm_fd" and "sleep mode" in items[9]["facts"]["refusal"]
    assert items[10]["facts"]["stores_running_at_the_kill"] > 0
    assert items[13]["facts"]["rounds"]["ok_and_mixed"] == 0 < items[13]["facts"]["control"]["ok_and_mixed"]


def test_a_driver_that_refuses_a_call_fails_the_items_that_need_it_and_no_other(tmp_path: Path) -> None:
    control = tmp_path / "control"
    control.write_text("cuEventRecord fail 1\n")
    code, items, told = check_with(
        tmp_path, control, "--engine", "driver", "--small", "--no-speed", "--items", "0,1,6,7"
    )
    assert code == 1, told
    assert {number: item["status"] for number, item in items.items()} == {0: "pass", 1: "fail", 6: "fail", 7: "pass"}
    assert all("cuEventRecord" in items[number]["text"] for number in (1, 6))
    assert any("cuEventRecord" in line for line in items[1]["facts"]["said"])  # the worker's own words
    assert told.rstrip().endswith("failed: item 1, 6")


def check_with(tmp_path: Path, control: Path, *flags: str) -> tuple[int, dict[int, dict[str, Any]], str]:
    """The same on a stub that was told to misbehave."""
    os.environ["STUBCUDA_CONTROL"] = str(control)
    try:
        return check(tmp_path, *flags)
    finally:
        del os.environ["STUBCUDA_CONTROL"]


def put_torch_on_stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bug: str = "") -> None:
    """Let the children of a check, which need torch, find `torch_on_stub` in its place; `bug` is planted there too."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import sys\n"
        "if {'kvferry.gpu_check.engine', 'kvferry.gpu_check.copier'} & set(sys.orig_argv):\n"
        "    from tests.gpu_check import torch_on_stub\n"
        "    torch_on_stub.install()\n" + (f"    torch_on_stub.{bug}()\n" if bug else "")
    )
    monkeypatch.setenv("PYTHONPATH", f"{site}:{Path(__file__).parents[2]}")


def test_the_engine_on_torch_makes_no_mistake_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code that plays the engine with torch, its kernels and streams stood in for: what is left is hardware's.

    Order (4, 13) is not asked: nothing overlaps here. The control of 14 needs no more than a replay that takes a while.
    """
    put_torch_on_stub(tmp_path, monkeypatch)
    code, items, told = check(
        tmp_path, "--engine", "torch", "--small", "--no-speed", "--items", "0-3,8-11,14", violates="cuMemHostRegister"
    )
    assert code == 0, told
    assert {number: item["status"] for number, item in items.items()} == dict.fromkeys(items, "pass"), told
    assert items[1]["facts"]["engine"]["torch_cuda"] == "stub"
    assert items[2]["facts"]["event"]["late_ms"] >= 0
    assert items[2]["facts"]["null_stream"].startswith("word")
    assert items[3]["facts"]["reference"] == "torch"
    assert items[8]["facts"]["steps"]["copies of 1 MiB"]["copied_gb_s"] > 0
    assert items[9]["facts"]["kernel_after_refusals"].startswith("works")
    assert items[10]["facts"]["event_of_the_dead"] == "has not happened"
    assert items[14]["facts"]["control_old_of"]["store"] > 0


@pytest.mark.parametrize(
    ("bug", "words"),
    [
        ("set_marks_in_captures", "a mark was captured into the graph"),
        ("look_at_events_in_captures", "not permitted when stream is capturing"),
    ],
)
def test_a_call_of_ours_in_a_capture_is_found(
    bug: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_torch_on_stub(tmp_path, monkeypatch, bug)
    code, items, told = check(
        tmp_path, "--engine", "torch", "--small", "--no-speed", "--items", "14", violates="cuMemHostRegister"
    )
    assert code == 1, told
    assert items[14]["status"] == "fail" and words in items[14]["text"], told
