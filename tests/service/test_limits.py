"""A start that the system gives no descriptor or memory ends with the limit's name and numbers, and leaves nothing."""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.cli.main import main
from kvferry.net.paths import RunDir
from kvferry.supervise import kept, rundir
from kvferry.supervise.limits import lacking

GIB = 1 << 30


def test_each_lack_is_named_with_both_numbers_and_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (12, 12))
    files = lacking(OSError(errno.EMFILE, "Too many open files"), 2, GIB)
    assert files is not None and files.code == "limit.files"
    assert "may open 12 files" in files.text and "2 ranks needs about 96" in files.text
    assert "ulimit -n" in files.fix and "LimitNOFILE=" in files.fix
    for error in (OSError(errno.ENOMEM, "Cannot allocate memory"), MemoryError()):
        memory = lacking(error, 1, GIB)
        assert memory is not None and memory.code == "limit.memory"
        assert "12 B of addresses" in memory.text and "2.0 GiB" in memory.text and "ulimit -v" in memory.fix
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    free = lacking(MemoryError(), 1, GIB)
    assert free is not None and free.code == "limit.memory" and "ulimit" not in free.fix
    machine = lacking(OSError(errno.ENFILE, ""), 1, GIB)
    assert machine is not None and "fs.file-max" in machine.text


def test_any_other_error_is_none_of_the_limits() -> None:
    assert lacking(OSError(errno.ENOENT, "no such file"), 1, GIB) is None
    assert lacking(OSError("no number"), 1, GIB) is None


@pytest.mark.parametrize("num_more", range(1, 9))
@pytest.mark.slow
def test_a_start_without_descriptors_is_one_line_and_leaves_nothing(tmp_path: Path, num_more: int) -> None:
    """Wherever it runs out of them: before the lock, at the pool, or at the first child."""
    run_dir = tmp_path / "run"
    words = (
        "import os, resource, sys, kvferry.cli.main, kvferry.cli.up\n"  # with most that Python will ever load of us
        f"most = len(os.listdir('/proc/self/fd')) - 1 + {num_more}\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))\n"
        "sys.exit(kvferry.cli.main.main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", words, "up", "--run-dir", run_dir, "--host-memory", "1MiB"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode in (1, 2), done.stderr
    assert "limit.files: this process may open" in done.stderr and "LimitNOFILE=" in done.stderr, done.stderr
    assert not run_dir.exists() and not kept.own_files(RunDir.at(run_dir))


def test_a_lack_that_is_no_limit_of_ours_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: object) -> bool:
        raise OSError(errno.EXDEV, "strange", "somewhere")

    monkeypatch.setattr(rundir, "make_private", fail)
    with pytest.raises(OSError, match="strange"):
        main(["up", "--run-dir", str(tmp_path)])


def test_memory_that_cannot_be_had_ends_the_start_with_code_two_and_no_lock(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("kvferry.gpu_worker.pool._populate", fail)
    run_dir = tmp_path / "run"
    assert main(["up", "--run-dir", str(run_dir), "--host-memory", "1MiB"]) == 2
    said = capsys.readouterr().err
    assert "limit.memory: " in said and "fix: " in said
    assert not run_dir.exists() and not kept.own_files(RunDir.at(run_dir))


def test_cleaning_up_needs_no_descriptor_and_takes_no_lack_of_one_for_a_useless_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.net.paths.SHM", tmp_path)
    run_dir = RunDir.at(tmp_path / "run")
    rundir.make_private(run_dir)
    for path in (run_dir.daemon, run_dir.rank(63), run_dir.pool(0), run_dir.table):
        path.touch()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            kept.look(run_dir)
        rundir.clean_up(run_dir)
        rundir.remove_files(run_dir)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert sorted(os.listdir(tmp_path)) == ["run"] and not os.listdir(run_dir.path)  # noqa: PTH208
