"""Store, find and load through real processes: the bytes that come back are the bytes that went in."""

import pytest

from kvferry import Outcome
from tests.process.sidecar import Sidecar, until
from tests.process.tiny_engine import TinyEngine, keys_of

pytestmark = pytest.mark.process


def test_two_ranks_store_and_load_and_the_bytes_are_equal(shared: Sidecar) -> None:
    sidecar = shared
    keys, blocks, others = keys_of("a", 4), [1, 2, 3, 4], [9, 8, 7, 6]
    with TinyEngine(sidecar) as engine:
        assert engine.client.wait_attached(30)
        engine.fill(blocks, seed=1)
        before = engine.bytes_of(blocks)
        assert engine.hits("r1", keys) == 0
        assert engine.store("r1", keys, blocks) is Outcome.OK
        engine.fill(blocks, seed=2)
        assert engine.hits("r2", keys) == 4
        assert [end.ok for end in engine.load("r2", keys, others)] == [True, True]
        assert engine.bytes_of(others) == before
        # Two workers serve, and two fresh spares stand ready for the next engine.
        status = until(lambda: (s := sidecar.status())["links"]["worker"] == 4 and s)
        assert status["slots"]["ready"] == 4
        assert status["links"] == {"client": 1, "worker": 4, "admin": 1}


def test_a_second_engine_finds_what_the_first_one_stored_and_so_does_its_successor(shared: Sidecar) -> None:
    sidecar = shared
    keys, blocks = keys_of("shared", 8), list(range(8))
    with TinyEngine(sidecar, "one") as one:
        assert one.client.wait_attached(30)
        one.fill(blocks, seed=3)
        stored = one.bytes_of(blocks)
        assert one.store("r", keys, blocks) is Outcome.OK
        with TinyEngine(sidecar, "two") as two:
            assert two.client.wait_attached(30)
            assert two.hits("r", keys) == 8
            two.load("r", keys, blocks)
            assert two.bytes_of(blocks) == stored
    with TinyEngine(sidecar, "one") as again:
        assert again.client.wait_attached(30)
        assert again.hits("r", keys) == 8
        again.load("r", keys, blocks)
        assert again.bytes_of(blocks) == stored


def test_when_an_engine_has_left_nothing_of_it_is_held_but_its_keys(shared: Sidecar) -> None:
    """Case 30: no worker, link, job, lease or fence outlives its engine; what it stored stays."""
    sidecar = shared
    before = sidecar.status()["slots"]["ready"]
    with TinyEngine(sidecar) as engine:
        assert engine.client.wait_attached(30)
        served = {rank.worker_pid for rank in engine.ranks}
        engine.store("r", keys_of("left", 2), [0, 1])
        engine.hits("r2", keys_of("left", 2))
    until(lambda: not served & sidecar.children(), what="workers of an engine that left")
    status = until(lambda: _at_rest(sidecar), what="jobs, leases and links back to zero")
    assert status["slots"]["ready"] == before + 2
    assert status["slots"]["pinned"] == 0


def _at_rest(sidecar: Sidecar) -> dict[str, object] | None:
    status = sidecar.status()
    busy = [status["fences"], status["leases"], status["jobs"]["stores"], status["jobs"]["loads"]]
    idle = not any(busy) and not status["engines"] and status["links"]["client"] == 0
    return status if idle and [w["state"] for w in status["workers"]] == ["spare", "spare"] else None
