"""Start, stop and everything that may go wrong between: what a person sees, and what is left behind."""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from kvferry.net.paths import RunDir
from tests.process.sidecar import KVFERRY, Sidecar, environment, kvferry, until

pytestmark = pytest.mark.process


def shm_of(run_dir: Path) -> list[str]:
    """Names of this sidecar's files in /dev/shm."""
    one = RunDir.at(run_dir)
    return sorted(path.name for path in one.table.parent.glob(f"kvferry-{one.instance}*"))


def test_one_line_says_that_it_is_ready_with_the_sum_of_all_ranks(shared: Sidecar) -> None:
    """Case 104: the total is printed as such."""
    [line] = [line for line in shared.lines if line.startswith("kvferry ready")]
    assert f"run dir {shared.run_dir}, 2 ranks x 32.0 MiB = 64.0 MiB, device cpu" in line


def test_the_pool_takes_exactly_what_was_given(shared: Sidecar) -> None:
    """Case 95: no rounding up of pools."""
    one = RunDir.at(shared.run_dir)
    sizes = [one.pool(rank).stat() for rank in (0, 1)]
    assert [stat.st_size for stat in sizes] == [32 << 20] * 2
    assert sum(stat.st_blocks * 512 for stat in sizes) == 64 << 20


def test_only_its_user_can_reach_it(shared: Sidecar) -> None:
    one = RunDir.at(shared.run_dir)
    assert one.path.stat().st_mode & 0o777 == 0o700
    for path in [one.daemon, one.tether, one.rank(0), one.rank(1), one.lock, one.pool(0), one.pool(1), one.table]:
        assert path.stat().st_mode & 0o777 == 0o600, path


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_stop_signal_leaves_no_process_or_socket_and_no_pool_that_holds_nothing(number: signal.Signals) -> None:
    sidecar = Sidecar()
    try:
        assert len(sidecar.children()) == 3
        assert len(shm_of(sidecar.run_dir)) == 3
        started = time.monotonic()
        assert sidecar.stop(number) == 0
        assert time.monotonic() - started < 8
        assert sidecar.leftovers() == []
        assert sidecar.lines[-1].endswith("nothing is kept")
        assert not sidecar.run_dir.exists(), "it made the directory, so it takes it away"
    finally:
        sidecar.kill()


def test_ctrl_c_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    run_dir = Path("/tmp") / f"kvf-{os.getpid()}-early"
    for delay_s in (0.15, 0.4, 0.6):
        process = subprocess.Popen(
            [*KVFERRY, "up", "--run-dir", str(run_dir), "--tp-size", "2", "--host-memory", "256MiB"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment(),
        )
        # The moment is the point: anywhere in the start, from the interpreter's to the children's.
        time.sleep(delay_s)
        process.send_signal(signal.SIGINT)
        process.wait(15)
        assert shm_of(run_dir) == []
        assert not run_dir.exists() or not list(run_dir.iterdir())


def test_down_ends_it_and_says_so() -> None:
    sidecar = Sidecar(tp_size=1)
    try:
        done = kvferry("down", "--run-dir", sidecar.run_dir)
        assert done.stdout == f"kvferry (pid {sidecar.pid}) at {sidecar.run_dir} is down\n"
        assert done.returncode == 0
        assert sidecar.wait() == 0
        assert sidecar.leftovers() == []
    finally:
        sidecar.kill()


@pytest.mark.parametrize("command", ["status", "down"])
def test_without_a_sidecar_a_command_says_so_in_one_line(command: str, tmp_path: Path) -> None:
    done = kvferry(command, "--run-dir", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"no kvferry runs at {tmp_path}\n"


def test_status_is_a_table_for_people_and_json_for_programs(shared: Sidecar) -> None:
    """Case 53: health is the state of each rank, not of the front process."""
    status = json.loads(kvferry("status", "--json", "--run-dir", shared.run_dir).stdout)
    assert status["state"] == "serving"
    assert status["kept"]["filled"] == 0
    assert status["daemon_pid"] == shared.daemon()
    assert sorted((w["rank"], w["state"]) for w in status["workers"]) == [(0, "spare"), (1, "spare")]
    names = {Path(f"/proc/{pid}/comm").read_text().strip() for pid in (shared.pid, *shared.children())}
    assert names == {"kvferry-up", "kvferry-daemon", "kvferry-rank-0", "kvferry-rank-1"}
    text = kvferry("status", "--run-dir", shared.run_dir).stdout
    assert all(word in text for word in ("serving", "slots", "workers", "spare", str(shared.daemon())))


def test_a_second_one_on_the_same_run_dir_is_refused_with_the_first_ones_pid(shared: Sidecar) -> None:
    done = kvferry("up", "--run-dir", shared.run_dir)
    assert done.returncode == 2
    assert f"run_dir.locked: another kvferry (pid {shared.pid}) serves {shared.run_dir}" in done.stderr
    assert "  fix: " in done.stderr
    assert shared.status()["state"] == "serving"


def test_a_run_dir_that_cannot_be_written_is_named_with_the_fix(tmp_path: Path) -> None:
    under_a_file = tmp_path / "file" / "run"
    under_a_file.parent.write_text("")
    for run_dir in (under_a_file, Path("/proc/kvferry")):
        done = kvferry("up", "--run-dir", run_dir)
        assert done.returncode == 2
        assert done.stderr.startswith(f"run_dir.unusable: cannot write in the run dir {run_dir}: ")
        assert "  fix: choose a directory that you may write" in done.stderr


def test_more_memory_than_dev_shm_has_is_refused_with_both_numbers_and_leaves_nothing(tmp_path: Path) -> None:
    """Case 101: a clear refusal, never a SIGBUS."""
    run_dir = tmp_path / "run"
    done = kvferry("up", "--run-dir", run_dir, "--host-memory", "100TiB")
    assert done.returncode == 2
    assert "host_memory.shm: the pool of 100.0 TiB does not fit /dev/shm, which has " in done.stderr
    assert " GiB free (its slot table may take " in done.stderr
    assert "\n  fix: set --host-memory to at most " in done.stderr
    assert "Traceback" not in done.stderr
    assert not run_dir.exists()
    assert shm_of(run_dir) == []


def test_a_stopped_child_does_not_keep_it_from_ending() -> None:
    """A worker that hangs is killed within the bounds; the pool and the sockets go all the same."""
    sidecar = Sidecar(tp_size=1)
    try:
        os.kill(sidecar.workers(0)[0], signal.SIGSTOP)
        assert sidecar.stop(timeout_s=12) == 0
        assert sidecar.leftovers() == []
    finally:
        sidecar.kill()


def test_somebody_elses_socket_files_are_replaced_and_the_directory_is_kept(tmp_path: Path) -> None:
    run_dir = Path("/tmp") / f"kvf-{os.getpid()}-kept"
    run_dir.mkdir(mode=0o700)
    try:
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(run_dir / "daemon.sock"))
        with Sidecar(tp_size=1, run_dir=run_dir) as sidecar:
            assert sidecar.status()["state"] == "serving"
        assert run_dir.exists()
    finally:
        run_dir.rmdir()


class Ears(threading.Thread):
    """A service manager that listens at an abstract socket."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.name_of_socket = f"@kvferry-test-{os.getpid()}"
        self.said: list[str] = []
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind("\0" + self.name_of_socket[1:])

    def run(self) -> None:
        while (text := self._sock.recv(4096).decode()) != "over":
            self.said += text.split("\n")

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(b"over", "\0" + self.name_of_socket[1:])
        self.join(10)
        self._sock.close()


def test_a_service_manager_hears_when_it_serves_that_it_lives_what_it_does_and_that_it_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ears = Ears()
    ears.start()
    monkeypatch.setenv("NOTIFY_SOCKET", ears.name_of_socket)
    monkeypatch.setenv("WATCHDOG_USEC", "1000000")
    sidecar = Sidecar(tp_size=1)
    try:
        until(lambda: "READY=1" in ears.said, 10, "ready")
        for child in sidecar.children():
            inherited = Path(f"/proc/{child}/environ").read_bytes()
            assert b"NOTIFY_SOCKET" not in inherited and b"WATCHDOG" not in inherited
        before = len(ears.said)
        until(lambda: ears.said[before:].count("WATCHDOG=1") >= 3, 10, "signs of life")
        os.kill(sidecar.daemon(), signal.SIGKILL)
        again = "STATUS=starting again: the daemon died"
        until(lambda: again in ears.said and "STATUS=serving" in ears.said[ears.said.index(again) :], 30, "again")
        assert sidecar.stop(signal.SIGTERM) == 0
        assert ears.said.count("READY=1") == 1
        first = ears.said.index("STOPPING=1")
        assert ears.said.index("READY=1") < first and "STATUS=stopping" in ears.said[first - 1 :]
    finally:
        sidecar.kill()
        ears.close()
