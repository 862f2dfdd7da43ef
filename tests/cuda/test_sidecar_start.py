"""Why a sidecar or a spare cannot start on a GPU: what is said, what is left, and who is served all the same."""

from pathlib import Path
from typing import Any

import pytest

from kvferry import Outcome
from kvferry.net.paths import RunDir
from tests.cuda.node import Node, attached, said
from tests.cuda.stubs import UUIDS
from tests.process.sidecar import alive, kvferry, until
from tests.process.tiny_engine import keys_of

pytestmark = pytest.mark.process


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
    one = node.engine_process(sidecar, "one")

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
    two = node.engine_process(sidecar, "two")
    assert two.ask(load=[7, 8], text="a") == {"hits": 2, "ok": True}
    assert two.ask(bytes=[7, 8])["digest"] == due
    assert one.ask(worker=0)["pid"] == one.worker
    for engine in (one, two):
        engine.kill()
        until(lambda pid=engine.worker: not alive(pid), 3, "the end of the worker")  # type: ignore[misc]
