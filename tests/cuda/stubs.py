"""The stub driver: built once a session by the C compiler of this machine, spoken to through ctypes.

A test process loads it by its path; processes that a test starts find it as `libcuda.so.1` by LD_LIBRARY_PATH, as
they would find the real one. `stub/stub.h` says what it checks and how it is told to fail.
"""

import atexit
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

SOURCES = Path(__file__).parent / "stub"
UUIDS = [f"GPU-5b5b5b5b-5b5b-5b5b-5b5b-5b5b5b5b5b{device:02x}" for device in range(4)]
NO_COMPILER = "needs a C compiler (cc, gcc or clang): the stub of the CUDA driver is built by the tests"


@functools.cache
def compiler() -> str | None:
    """The C compiler of this machine."""
    named = os.environ.get("CC")
    return next((found for name in (named, "cc", "gcc", "clang") if name and (found := shutil.which(name))), None)


@functools.cache
def build() -> Path:
    """The folder that holds the stub's libcuda.so.1; skips the test where there is no compiler."""
    cc = compiler()
    if cc is None:
        pytest.skip(NO_COMPILER)
    folder = Path(tempfile.mkdtemp(prefix="stubcuda-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    sources = [str(path) for path in sorted(SOURCES.glob("*.c"))]
    flags = ["-shared", "-fPIC", "-O1", "-g", "-Wall", "-Wextra", "-pthread"]
    done = subprocess.run(
        [cc, *flags, "-o", str(folder / "libcuda.so.1"), *sources], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


def environment(journal: Path | None = None, control: Path | None = None) -> dict[str, str]:
    """What a process that shall run on the stub finds in its environment."""
    env = {"LD_LIBRARY_PATH": str(build())}
    if journal is not None:
        env["STUBCUDA_JOURNAL"] = str(journal)
    if control is not None:
        env["STUBCUDA_CONTROL"] = str(control)
    return env


def violations(journal: Path) -> list[str]:
    """What processes with this journal did that a driver would not bear."""
    files = journal.parent.glob(f"{journal.name}.*")
    return [line for file in files for line in file.read_text().splitlines() if " VIOLATION " in f" {line}"]


class Stub:
    """The stub as this process has it."""

    def __init__(self, journal: Path) -> None:
        self.path = str(build() / "libcuda.so.1")
        self.journal = journal
        self._library = ctypes.CDLL(self.path)
        self._library.stub_leaks.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        self._library.stub_leaks.restype = ctypes.c_size_t
        self._library.stub_sizeof.restype = ctypes.c_long
        self._library.stub_reset()
        self._library.stub_journal(str(journal).encode())

    def control(self, *lines: str) -> None:
        """How it behaves from now on; see stub.h. None: as a driver should."""
        self._library.stub_control("\n".join(lines).encode())

    def sizeof(self, name: str) -> int:
        """Of a structure, as a C compiler lays it out."""
        return int(self._library.stub_sizeof(name.encode()))

    def calls(self) -> list[str]:
        """All calls so far, with the thread that made them."""
        return self.journal.read_text().splitlines()

    def leaks(self) -> str:
        """What is still there, one a line."""
        text = ctypes.create_string_buffer(8192)
        self._library.stub_leaks(text, len(text))
        return text.value.decode()

    def end_process(self) -> None:
        """What the kernel and the driver do when a process ends: all of it is gone, in whatever state it was."""
        self._library.stub_reset()
        self._library.stub_end_process()

    def check(self) -> None:
        """Fail if it was used in a way that a driver would not bear."""
        bad = [line for line in self.calls() if "VIOLATION" in line]
        assert not bad, bad

    def finish(self) -> None:
        """Close it, and fail if it was misused or anything is left."""
        self.check()
        left = self.leaks()
        assert not left, left
        self.close()

    def close(self) -> None:
        self._library.stub_reset()
        self._library.stub_journal(b"")
