"""The README's program against a real sidecar."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.sidecar import Sidecar, environment

HELLO = Path(__file__).parents[2] / "examples" / "hello.py"


@pytest.mark.process
@pytest.mark.slow
def test_hello_gets_its_bytes_back() -> None:
    with Sidecar(tp_size=1) as sidecar:
        done = subprocess.run(
            [sys.executable, "-W", "error", str(HELLO)],
            env={**environment(), "KVFERRY_RUN_DIR": str(sidecar.run_dir)},
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert (done.stdout, done.stderr) == ("the bytes came back\n", "")
