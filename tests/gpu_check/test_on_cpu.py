"""`kvferry gpu-check --device cpu`, whole: the script itself works, its controls fail where they must."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ONLY_ON_A_GPU = {8, 9, 14}


def test_all_that_can_be_asked_without_a_gpu_passes_and_leaves_nothing(tmp_path: Path) -> None:
    """Cases 1, 83 and 98 among others: order, an engine's death, memory lent and mapped, on the real processes."""
    out = tmp_path / "check.json"
    done = subprocess.run(
        [sys.executable, "-m", "kvferry.cli.main", "gpu-check", "--device", "cpu", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={"PATH": "", "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    items = {item["item"]: item for item in report["items"]}
    assert sorted(items) == list(range(15))
    for number, item in items.items():
        assert item["status"] == ("skipped" if number in ONLY_ON_A_GPU else "pass"), item
    assert items[9]["text"] == items[14]["text"] == "only on a GPU"
    wrong = items[4]["facts"]["control_wrong_of"]
    assert wrong["store"] == wrong["load"] == wrong["of"]  # the stream is held, so each control goes wrong
    assert items[13]["facts"]["control"]["ok_and_mixed"] > 0
    assert done.stdout.splitlines()[-1] == "gpu-check passed"
    assert not list(Path("/dev/shm").glob(f"kvferry-{report['instance']}-*"))
    assert not list(tmp_path.glob("kvferry-check-*"))


def test_without_a_driver_it_says_so_once_with_the_fix(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvferry.cli.main", "gpu-check", "--device", "cuda"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": "", "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 2
    assert "device.no_" in done.stderr and "fix:" in done.stderr and "Traceback" not in done.stderr
