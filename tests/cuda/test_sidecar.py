"""A whole `kvferry up --device cuda` on the stub driver: whom it serves, and what it shows of it."""

import time

import pytest

from tests.cuda.node import Node, at_rest, attached
from tests.cuda.stubs import UUIDS
from tests.process.sidecar import alive, kvferry, until

pytestmark = pytest.mark.process


@pytest.mark.parametrize("kind", ["cuda_ipc", "cuda_vmm_fd"])
def test_a_killed_engines_worker_is_gone_in_two_seconds_and_the_next_engine_loads_what_was_stored(
    node: Node, kind: str
) -> None:
    """Cases 41 and 104 too: with one rank the pool is `--host-memory`, pinned once by each worker."""
    sidecar = node.up()
    first = node.engine_process(sidecar, "one", kind)
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
    second = node.engine_process(sidecar, "two", kind)
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
    one = node.engine_process(sidecar, "one")
    two = node.engine_process(sidecar, "two", "cuda_vmm_fd")
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
