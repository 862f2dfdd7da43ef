"""The README's program: the lines shown are the lines that run, and they run against a real sidecar."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.sidecar import Sidecar, environment

ROOT = Path(__file__).parents[2]
HELLO = ROOT / "examples" / "hello.py"


def run(run_dir: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", str(HELLO)],
        env={**environment(), "KVFERRY_RUN_DIR": str(run_dir)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.process
@pytest.mark.slow
def test_hello_gets_its_bytes_back() -> None:
    with Sidecar(tp_size=1) as sidecar:
        done = run(sidecar.run_dir)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines()[-1] == "4 blocks came back, equal: True"


@pytest.mark.process
@pytest.mark.slow
def test_hello_says_why_it_is_not_attached(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 1 and "not within 10 s: attached" in done.stderr
    assert f"no sidecar at {tmp_path}" in done.stdout


@pytest.mark.process
@pytest.mark.slow
def test_hello_against_ranks_of_another_number_says_so() -> None:
    with Sidecar(tp_size=2) as sidecar:
        done = run(sidecar.run_dir)
        assert done.returncode == 1 and "register.world_size" in done.stdout


def test_the_readme_shows_the_program_that_runs() -> None:
    code = HELLO.read_text().split('"""', 2)[2].strip()
    assert f"```python\n{code}\n```" in (ROOT / "README.md").read_text()
