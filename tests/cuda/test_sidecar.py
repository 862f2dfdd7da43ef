"""A whole `kvferry up --device cuda` on the stub driver, and what a fault in the driver costs whom.

    workers     find the stub as libcuda.so.1 and are steered by one control file
    engine      this process, or one of its own where it is to be killed; on the same stub, steered by nobody

For each fault: the outcome of the job, of its slots, of the engine and of the worker.
"""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry import Outcome
from kvferry.net.paths import RunDir
from tests.client.fake_gpu import FakeEngine
from tests.cuda.engine_process import EngineProcess
from tests.cuda.stubs import UUIDS, Stub, build, environment, violations
from tests.process.sidecar import Sidecar, alive, kvferry, until
from tests.process.test_cuda_engine import GpuEngine
from tests.process.tiny_engine import keys_of

pytestmark = pytest.mark.process

SHORT = ("--job-deadline", "1s", "--load-deadline", "1s", "--kill-grace", "3s")


class Node:
    """One machine with a stub GPU: its sidecar, its engines, the file that steers the workers' driver."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, cleanup: contextlib.ExitStack) -> None:
        self.journal, self._control, self._cleanup = folder / "calls", folder / "control", cleanup
        self.stub = Stub(folder / "engine")
        self.stub.control()  # told so, it looks at no file: what follows is for the workers
        for name, value in environment(self.journal, self._control).items():
            monkeypatch.setenv(name, value)

    def up(self, *arguments: str, **options: Any) -> Sidecar:
        """The sidecar; nothing is left of it in the end."""
        made = Sidecar("--device", "cuda", *arguments, **{"tp_size": 1, "host_memory": "4MiB", **options})
        return self._cleanup.enter_context(made)

    def engine(self, sidecar: Sidecar, name: str = "tiny", kind: str = "cuda_ipc") -> GpuEngine:
        """An engine in this process."""
        gpu = FakeEngine(self.stub.path)
        self._cleanup.callback(gpu.close)
        return self._cleanup.enter_context(GpuEngine(sidecar, gpu, kind, None, name=name))

    def steer(self, *lines: str) -> None:
        """How the workers' driver behaves from now on. The old file is replaced, never half there."""
        new = self._control.with_suffix(".new")
        new.write_text("\n".join(lines) + "\n")
        new.rename(self._control)

    def calls_of(self, pid: int) -> list[str]:
        """What a worker asked of the driver."""
        return self.journal.with_name(f"{self.journal.name}.{pid}").read_text().splitlines()

    def await_batch(self, pid: int, number: int) -> None:
        """Wait until a worker has given the driver its so-manieth batch."""
        until(lambda: sum("BatchAsync stream" in line for line in self.calls_of(pid)) >= number, 10, f"batch {number}")


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    build()
    with contextlib.ExitStack() as cleanup:
        made = Node(tmp_path, monkeypatch, cleanup)
        yield made
        made.steer()
    made.stub.check()
    assert made.stub.leaks() == ""
    made.stub.close()
    assert violations(made.journal) == []


def attached(engine: GpuEngine) -> GpuEngine:
    assert engine.client.wait_attached(10), engine.notes
    # The daemon tells the scheduler's side; the rank hears it of its worker, perhaps a moment later.
    until(lambda: engine.ranks[0].attached, 5, f"the rank's own word; {engine.notes}")
    return engine


def said(sidecar: Sidecar, words: str) -> None:
    """Wait until one of its processes has logged these words."""
    end = time.monotonic() + 10
    while not any(words in line for line in list(sidecar.lines)):
        assert time.monotonic() < end, "\n".join([f"nobody said {words!r}:", *sidecar.lines])
        time.sleep(0.01)


def at_rest(sidecar: Sidecar) -> dict[str, Any]:
    """The status once no slot is being written or held back."""

    def ask() -> dict[str, Any] | None:
        status = sidecar.status()
        busy = status["slots"]["writing"] + status["slots"]["quarantined"] + status["jobs"]["stores"]
        return None if busy or status["jobs"]["loads"] else status

    return until(ask, 15, "at rest")


def worker_of(engine: GpuEngine, not_pid: int = 0) -> int:
    """The worker that serves the engine's rank."""

    def ask() -> int:
        pid = engine.ranks[0].worker_pid
        return pid if pid not in (0, not_pid) and engine.client.attached and engine.ranks[0].attached else 0

    return until(ask, 15, f"a worker; {engine.notes}")


# ---- it serves -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cuda_ipc", "cuda_vmm_fd"])
def test_a_killed_engines_worker_is_gone_in_two_seconds_and_the_next_engine_loads_what_was_stored(
    node: Node, kind: str
) -> None:
    """Cases 41 and 104 too: with one rank the pool is `--host-memory`, pinned once by each worker."""
    sidecar = node.up()
    first = EngineProcess(sidecar.run_dir, node.stub.path, "one", kind)
    first.ask(fill=[1, 2, 3], seed=7)
    due = first.ask(bytes=[1, 2, 3])["digest"]
    assert first.ask(store=[1, 2, 3], text="a") == {"outcome": "OK"}
    (served,) = [w for w in sidecar.status()["workers"] if w["pid"] == first.worker]
    assert (served["state"], served["engine"], served["marks"]) == ("taken", "one", "word")
    assert served["device"]["uuid"] == UUIDS[0] and served["device"]["pinned_bytes"] == 4 << 20
    node.steer("copy delay 100")
    first.ask(begin=[4, 5, 6], text="b")
    node.await_batch(first.worker, 2)  # a copy is under way when it dies
    first.kill()
    died = time.monotonic()
    until(lambda: not alive(first.worker), 2, "the end of the worker")
    assert time.monotonic() - died < 2
    node.steer()
    second = EngineProcess(sidecar.run_dir, node.stub.path, "two", kind)
    assert second.worker != first.worker
    assert second.ask(load=[9, 8, 7], text="a") == {"hits": 3, "ok": True}
    assert second.ask(bytes=[9, 8, 7])["digest"] == due
    assert second.ask(load=[4, 5, 6], text="b")["hits"] == 0  # never published
    second.kill()
    until(lambda: not alive(second.worker), 2, "the end of the worker")
    assert at_rest(sidecar)["slots"]["ready"] == 3


def test_two_engines_share_one_pinned_pool_and_the_death_of_one_is_not_the_others(node: Node) -> None:
    """Two workers pin one file, each loads what the other stored; one is killed while both copy."""
    sidecar = node.up()
    one = EngineProcess(sidecar.run_dir, node.stub.path, "one")
    two = EngineProcess(sidecar.run_dir, node.stub.path, "two", "cuda_vmm_fd")
    assert one.worker != two.worker
    digests = {}
    for number, engine in enumerate((one, two)):
        engine.ask(fill=[1, 2, 3], seed=number)
        digests[engine.pid] = engine.ask(bytes=[1, 2, 3])["digest"]
        assert engine.ask(store=[1, 2, 3], text=f"of {number}") == {"outcome": "OK"}
    assert two.ask(load=[4, 5, 6], text="of 0") == {"hits": 3, "ok": True}
    assert two.ask(bytes=[4, 5, 6])["digest"] == digests[one.pid]
    assert one.ask(load=[4, 5, 6], text="of 1") == {"hits": 3, "ok": True}
    assert one.ask(bytes=[4, 5, 6])["digest"] == digests[two.pid]
    node.steer("copy delay 200")
    one.ask(begin=[7, 8], text="late")
    node.await_batch(one.worker, 3)
    two.ask(fill=[7, 8], seed=9)
    due = two.ask(bytes=[7, 8])["digest"]
    one.kill()
    assert two.ask(store=[7, 8], text="whole") == {"outcome": "OK"}
    until(lambda: not alive(one.worker), 3, "the end of the killed engine's worker")
    node.steer()
    assert two.ask(load=[10, 11], text="whole") == {"hits": 2, "ok": True}
    assert two.ask(bytes=[10, 11])["digest"] == due
    assert two.ask(worker=0)["pid"] == two.worker and sidecar.status()["workers_died"] == 0
    two.kill()
    until(lambda: not alive(two.worker), 3, "the end of the worker")


def test_status_shows_the_gpu_what_is_pinned_and_lent_and_how_marks_are_written(node: Node) -> None:
    """Case 41: what is held for an engine is stated."""
    sidecar = node.up()
    attached(node.engine(sidecar))
    until(lambda: [w["state"] for w in sidecar.status()["workers"]].count("spare") == 1, 10, "the next spare")
    for worker in sidecar.status()["workers"]:
        assert worker["device"] == {
            "kind": "cuda",
            "name": "Stub GPU",
            "uuid": UUIDS[0],
            "numa_node": 0,
            "driver": "CUDA 13.0",
            "copies": "batch",
            "pinned_bytes": 4 << 20,
            "pinned_chunks": 1,
            "pin_s": worker["device"]["pin_s"],
            "pin_refused": "",
        }
        assert worker["marks"] == ("word" if worker["state"] == "taken" else "")
        assert (worker["lent_bytes"] > 0) == (worker["state"] == "taken")
    text = kvferry("status", "--run-dir", sidecar.run_dir).stdout
    assert UUIDS[0] in text and "pinned_bytes=4,194,304" in text
    assert any("4194304 bytes of pool pinned in 1 chunks" in line for line in sidecar.lines)


def test_each_rank_has_the_gpu_that_is_named_for_it_and_no_other(node: Node) -> None:
    """The order of --devices is the order of the ranks; numbers become UUIDs before a worker hears them."""
    node.steer("devices 3")
    sidecar = node.up("--devices", f"2,{UUIDS[0]}", tp_size=2)
    uuids = {worker["rank"]: worker["device"]["uuid"] for worker in sidecar.status()["workers"]}
    assert uuids == {0: UUIDS[2], 1: UUIDS[0]}


# ---- it cannot serve -------------------------------------------------------------------------------


def test_without_a_driver_up_says_so_once_with_the_fix_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2, as for every setting that cannot be; before a pool is made."""
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    done = kvferry("up", "--device", "cuda", "--run-dir", tmp_path / "run", "--host-memory", "4MiB")
    if done.returncode != 2:
        pytest.skip("this machine has a CUDA driver")
    errors = [line for line in done.stderr.splitlines() if line.startswith("device.")]
    assert len(errors) == 1 and errors[0].startswith("device.no_driver")
    assert "fix:" in done.stderr and "--device cpu" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())


@pytest.mark.parametrize(
    "control, arguments, code, words",
    [
        ("cuInit fail 100", (), "device.no_gpu", "nvidia-smi"),
        ("attr 20 3", (), "device.exclusive", "nvidia-smi -c DEFAULT"),
        ("devices 1", ("--tp-size", "2"), "device.not_visible", UUIDS[0]),
        ("devices 1", ("--devices", UUIDS[1]), "device.not_visible", UUIDS[0]),
        ("devices 2", ("--tp-size", "2", "--devices", f"1,{UUIDS[1]}"), "settings.devices", "one GPU"),
        ("devices 2", ("--devices", "0,1"), "settings.devices", "2 GPUs for 1 rank"),
    ],
)
def test_gpus_that_cannot_be_used_are_refused_before_anything_is_made(
    node: Node, tmp_path: Path, control: str, arguments: tuple[str, ...], code: str, words: str
) -> None:
    """Case 98: the reason is found at the start and names the setting."""
    node.steer(control)
    done = kvferry("up", "--device", "cuda", "--run-dir", tmp_path / "run", "--host-memory", "4MiB", *arguments)
    assert done.returncode == 2
    assert code in done.stderr and words in done.stderr and "fix:" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_pool_that_cannot_be_pinned_ends_the_start_with_numbers_and_leaves_nothing(
    node: Node, tmp_path: Path
) -> None:
    """Cases 91, 93. Worker: exits with the reason. Sidecar: gives up at once, since another would meet the same."""
    node.steer("cuMemHostRegister_v2 fail 2")
    done = kvferry("up", "--device", "cuda", "--run-dir", tmp_path / "run", "--host-memory", "4MiB")
    assert done.returncode == 1
    assert "device.pin" in done.stderr and "4194304 bytes" in done.stderr and "ulimit -l" in done.stderr
    assert "before kvferry was ready" in done.stderr and "Traceback" not in done.stderr
    assert not RunDir.at(tmp_path / "run").pool(0).exists() and not (tmp_path / "run").exists()


def test_where_pinning_is_forbidden_a_sidecar_that_only_wants_it_serves_with_one_warning(node: Node) -> None:
    """Case 93. Stores and loads are right; status says why they are slow."""
    node.steer("cuMemHostRegister_v2 fail 800", "pageable 1")
    sidecar = node.up("--pin", "wanted")
    assert sum("used unpinned" in line for line in sidecar.lines) == 1
    (worker,) = sidecar.status()["workers"]
    assert "CUDA_ERROR_NOT_PERMITTED" in worker["device"]["pin_refused"] and not worker["device"]["pinned_bytes"]
    engine = attached(node.engine(sidecar))
    engine.fill([1, 2], seed=1)
    due = engine.bytes_of([1, 2])
    assert engine.store("one", keys_of("a", 2), [1, 2]) is Outcome.OK
    engine.client.finish("one")
    assert engine.hits("two", keys_of("a", 2)) == 2
    (end,) = engine.load("two", keys_of("a", 2), [7, 8])
    assert end.ok and engine.bytes_of([7, 8]) == due


@pytest.mark.parametrize(
    "call, code", [("cuDevicePrimaryCtxRetain", "device.open"), ("cuMemHostRegister_v2", "device.pin")]
)
def test_an_engine_is_served_on_while_the_next_spare_finds_no_room_on_its_gpu(node: Node, call: str, code: str) -> None:
    """Cases 41, 93. The engine took the memory that the next context needs: said once, shown, tried until it works.

    Engine: served by the worker it has. Sidecar: lives. The next engine: is served as soon as a spare starts.
    """
    sidecar = node.up()
    node.steer(f"{call} fail 2")
    one = EngineProcess(sidecar.run_dir, node.stub.path, "one")

    def lacks(tries: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = sidecar.status()["no_spare"]
        return found if found and found[0]["tries"] >= tries else []

    (lack,) = until(lambda: lacks(2), 20, "the second try")
    assert lack["rank"] == 0 and lack["why"].startswith(f"exited with code 2 ({code}: ")
    assert "CUDA_ERROR_OUT_OF_MEMORY" in lack["why"]
    plain, check = (kvferry("status", *more, "--run-dir", sidecar.run_dir) for more in ((), ("--check",)))
    assert (plain.returncode, check.returncode) == (0, 1), "health is the daemon's, an alarm is asked for"
    assert check.stdout.startswith(f"rank 0 has no spare: exited with code 2 ({code}: ")
    one.ask(fill=[1, 2], seed=1)
    due = one.ask(bytes=[1, 2])["digest"]
    assert one.ask(store=[1, 2], text="a") == {"outcome": "OK"}
    node.steer()
    until(lambda: not sidecar.status()["no_spare"], 20, "a spare")
    assert sum("rank 0 has no spare: " in line for line in sidecar.lines) == 1
    assert sum(f"rank 0: {code}" in line for line in sidecar.lines) == 1  # the worker's own, with the fix
    said(sidecar, "rank 0 has a spare again, after ")
    assert sidecar.status()["spares_failed"] >= 2
    two = EngineProcess(sidecar.run_dir, node.stub.path, "two")
    assert two.ask(load=[7, 8], text="a") == {"hits": 2, "ok": True}
    assert two.ask(bytes=[7, 8])["digest"] == due
    assert one.ask(worker=0)["pid"] == one.worker
    for engine in (one, two):
        engine.kill()
        until(lambda pid=engine.worker: not alive(pid), 3, "the end of the worker")  # type: ignore[misc]


# ---- the driver fails while it serves --------------------------------------------------------------


def test_a_refused_import_leaves_the_engine_without_a_cache_and_with_the_reason(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 98. Engine: runs, told once. Worker: refuses, exits 0. Later: the rank attaches by itself."""
    monkeypatch.setattr("kvferry.client.rank.REFUSED_RETRY_S", 0.5)
    sidecar = node.up()
    node.steer("cuIpcOpenMemHandle_v2 fail 205")
    engine = node.engine(sidecar)
    until(lambda: any("handle.refused" in note for note in engine.notes), 10, f"the reason: {engine.notes}")
    assert not engine.client.attached
    assert any("CUDA_ERROR_MAP_FAILED" in note for note in engine.notes)
    engine.client.lookup("r", keys_of("a", 1))
    assert engine.client.hits("r").count == 0
    assert sidecar.status()["workers_died"] == 0
    node.steer()
    attached(engine)
    assert engine.store("one", keys_of("a", 2), [1, 2]) is Outcome.OK


def test_an_engine_on_another_gpu_is_refused_with_both_uuids(node: Node) -> None:
    """Case 98. A worker never follows: its pool is pinned and its context open where it was told."""
    node.steer("devices 2")
    sidecar = node.up("--devices", "1")
    engine = node.engine(sidecar)
    until(lambda: any("handle.other_gpu" in note for note in engine.notes), 10, f"the reason: {engine.notes}")
    (told,) = {note for note in engine.notes if "handle.other_gpu" in note}
    assert UUIDS[0] in told and UUIDS[1] in told and "--devices" in told


@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_batch_that_the_driver_refuses_fails_its_job_alone(node: Node, direction: str) -> None:
    """Job: COPY_FAILED. Slots: free (store) or as they were (load). Engine, worker: go on as if nothing had been."""
    sidecar = node.up()
    engine = attached(node.engine(sidecar))
    pid = worker_of(engine)
    keys = keys_of("a", 2)
    engine.fill([1, 2], seed=1)
    due = engine.bytes_of([1, 2])
    # The call works here, both ways: else its first refusal would mean that copies go one by one.
    assert engine.store("first", keys_of("f", 1), [3]) is Outcome.OK
    engine.client.finish("first")
    assert engine.hits("first again", keys_of("f", 1)) == 1
    assert engine.load("first again", keys_of("f", 1), [4])[0].ok
    engine.client.finish("first again")
    if direction == "store":
        node.steer("cuMemcpyBatchAsync fail 1 times 1")
        assert engine.store("one", keys, [1, 2]) is Outcome.COPY_FAILED
        engine.client.finish("one")
        status = at_rest(sidecar)
        assert status["slots"]["ready"] == 1 and status["slots"]["free"] == status["slots"]["total"] - 1
        assert engine.hits("two", keys) == 0
        assert engine.store("three", keys, [1, 2]) is Outcome.OK
        engine.client.finish("three")
    else:
        assert engine.store("one", keys, [1, 2]) is Outcome.OK
        engine.client.finish("one")
        node.steer("cuMemcpyBatchAsync fail 1 times 1")
        assert engine.hits("two", keys) == 2
        (end,) = engine.load("two", keys, [7, 8])
        assert not end.ok and sorted(end.failed_blocks) == [7, 8]
        engine.client.finish("two")
        at_rest(sidecar)
    assert engine.hits("last", keys) == 2
    (end,) = engine.load("last", keys, [11, 12])
    assert end.ok and engine.bytes_of([11, 12]) == due
    assert worker_of(engine) == pid and sidecar.status()["workers_died"] == 0


@pytest.mark.parametrize("how", ["on the GPU", "in a call"])
def test_a_sticky_error_ends_the_worker_and_its_death_is_the_answer(node: Node, how: str) -> None:
    """Load: FAILED with its blocks, after the reap. Slots: as they were. Engine: computes, attaches to the next."""
    sidecar = node.up()
    engine = attached(node.engine(sidecar))
    first = worker_of(engine)
    keys = keys_of("a", 2)
    engine.fill([1, 2], seed=1)
    due = engine.bytes_of([1, 2])
    assert engine.store("one", keys, [1, 2]) is Outcome.OK
    engine.client.finish("one")
    assert engine.hits("two", keys) == 2
    node.steer("copy fail 700" if how == "on the GPU" else "cuMemcpyBatchAsync fail 719")
    (end,) = engine.load("two", keys, [7, 8])
    assert not end.ok and sorted(end.failed_blocks) == [7, 8]
    assert not alive(first)
    node.steer()
    engine.client.finish("two")
    worker_of(engine, not_pid=first)
    said(sidecar, "exited with code 71")
    assert any("device.lost" in line and "attaches to the next" in line for line in sidecar.lines)
    assert at_rest(sidecar)["workers_died"] == 1
    assert engine.hits("three", keys) == 2
    (end,) = engine.load("three", keys, [11, 12])
    assert end.ok and engine.bytes_of([11, 12]) == due


def test_a_store_under_a_sticky_error_ends_with_its_worker_and_its_slots_are_free_after_the_reap(node: Node) -> None:
    """Store: WORKER_DIED, after the reap. Slots: what was stored before stays, the others are free. Engine: goes on."""
    sidecar = node.up()
    engine = attached(node.engine(sidecar))
    first = worker_of(engine)
    assert engine.store("works", keys_of("w", 1), [1]) is Outcome.OK
    node.steer("cuMemcpyBatchAsync fail 719")
    assert engine.store("one", keys_of("a", 2), [2, 3], timeout_s=15) is Outcome.WORKER_DIED
    assert not alive(first)
    node.steer()
    engine.client.finish("one")
    worker_of(engine, not_pid=first)
    slots = at_rest(sidecar)["slots"]
    assert slots["ready"] == 1 and slots["free"] == slots["total"] - 1
    assert engine.hits("two", keys_of("a", 2)) == 0
    assert engine.store("three", keys_of("a", 2), [2, 3]) is Outcome.OK


def test_a_gpu_lost_while_a_rank_is_let_in_costs_that_rank_a_moment(node: Node) -> None:
    """Worker: refuses, exits 71. Engine: told once, asks the next spare within seconds."""
    sidecar = node.up()
    node.steer("cuIpcOpenMemHandle_v2 fail 719")
    engine = node.engine(sidecar)
    until(lambda: any("device.lost" in note for note in engine.notes), 10, f"the reason: {engine.notes}")
    said(sidecar, "exited with code 71")
    node.steer()
    refused = time.monotonic()
    attached(engine)
    assert time.monotonic() - refused < 8
    assert engine.store("one", keys_of("a", 2), [1, 2]) is Outcome.OK


@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("where", ["copy", "cuMemcpyBatchAsync"])
def test_a_copy_that_hangs_is_given_up_and_its_worker_killed_and_replaced(
    node: Node, where: str, direction: str
) -> None:
    """Store: DEADLINE at once, its slots held until the worker is dead. Load: FAILED after the reap, with its blocks.

    `copy`: the GPU never ends it, the loop lives. `cuMemcpyBatchAsync`: the loop itself never comes back.
    """
    sidecar = node.up(*SHORT)
    engine = attached(node.engine(sidecar))
    first = worker_of(engine)
    keys = keys_of("a", 2)
    engine.fill([1, 2], seed=1)
    due = engine.bytes_of([1, 2])
    assert engine.store("one", keys, [1, 2]) is Outcome.OK
    engine.client.finish("one")
    node.steer(f"{where} hang")
    if direction == "store":
        assert engine.store("two", keys_of("b", 2), [3, 4], timeout_s=15) is Outcome.DEADLINE
        slots = sidecar.status()["slots"]
        assert alive(first) and slots["quarantined"] == 2, slots
    else:
        assert engine.hits("two", keys) == 2
        (end,) = engine.load("two", keys, [7, 8], timeout_s=15)
        assert not end.ok and sorted(end.failed_blocks) == [7, 8]
        assert not alive(first)
    until(lambda: not alive(first), 15, "the end of the worker that hangs")
    node.steer()
    engine.client.finish("two")
    worker_of(engine, not_pid=first)
    assert at_rest(sidecar)["slots"]["ready"] == 2
    said(sidecar, "killing rank 0 worker")
    assert engine.hits("three", keys) == 2
    (end,) = engine.load("three", keys, [11, 12])
    assert end.ok and engine.bytes_of([11, 12]) == due


def test_every_call_of_closing_may_hang_and_the_worker_is_gone_in_two_seconds(node: Node) -> None:
    """A hang in close: a worker closes nothing. It exits, and the kernel takes the mappings back."""
    closing = ("cuIpcCloseMemHandle", "cuMemUnmap", "cuMemAddressFree", "cuMemHostUnregister")
    closing += ("cuStreamDestroy_v2", "cuEventDestroy_v2", "cuDevicePrimaryCtxRelease_v2")
    node.steer(*(f"{name} hang" for name in closing))
    sidecar = node.up()
    engine = attached(node.engine(sidecar))
    first = worker_of(engine)
    assert engine.store("one", keys_of("a", 2), [1, 2]) is Outcome.OK
    engine.ranks[0].close()  # a polite end
    until(lambda: not alive(first), 2, "the end of the worker")
    assert not [line for line in node.calls_of(first) if any(name in line for name in closing)]
    killed = EngineProcess(sidecar.run_dir, node.stub.path, "two")
    killed.kill()
    until(lambda: not alive(killed.worker), 2, "the end of the worker")
    assert sidecar.status()["workers_died"] == 0


def test_a_worker_that_hangs_while_an_engine_dies_is_gone_all_the_same(node: Node) -> None:
    """It drains for a second and leaves with what hangs: code 70 says that its death ended the copy."""
    sidecar = node.up()
    engine = EngineProcess(sidecar.run_dir, node.stub.path, "one")
    engine.ask(fill=[1, 2], seed=1)
    node.steer("copy hang")
    engine.ask(begin=[1, 2], text="a")
    node.await_batch(engine.worker, 1)
    engine.kill()
    died = time.monotonic()
    until(lambda: not alive(engine.worker), 3, "the end of the worker")
    assert time.monotonic() - died < 2.5
    node.steer()
    said(sidecar, "exited with code 70")
    assert at_rest(sidecar)["slots"]["ready"] == 0


def test_a_slow_pin_holds_up_nobody_and_is_ended_by_a_stop(node: Node) -> None:
    """Case 92: the spare that replaces a taken one pins while engines serve."""
    sidecar = node.up()
    node.steer("cuMemHostRegister_v2 delay 1500")
    engine = attached(node.engine(sidecar))
    began = time.monotonic()
    assert engine.store("one", keys_of("a", 2), [1, 2]) is Outcome.OK
    assert time.monotonic() - began < 1.5
    engine.close()
