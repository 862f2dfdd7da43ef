"""Ours beside another connector, under vLLM's MultiConnector and its schedulers: who loads, stores and waits."""

import random
from pathlib import Path
from typing import Any

import pytest
from fake_sidecar import FakeSidecar
from scheduling_kit import BOTH, check_held, tokens

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What our connector warns of."""
    from kvferry.vllm import connector

    told: list[str] = []
    monkeypatch.setattr(connector.logger, "warning", lambda text, *args: told.append(text % args))
    return told


def beside(lab: Any, model: Path, sidecar: FakeSidecar, **options: Any) -> Any:
    """An engine with a neighbour that is asked first; `shelf` sets it up."""
    from neighbour import CONFIG, Neighbour, Shelf

    Neighbour.shelf = Shelf(memories=sidecar.memories, **options.pop("shelf", {}))
    Neighbour.ranks = 0
    outer = {"kv_load_failure_policy": "recompute", **options.pop("outer", {})}
    chosen = {"num_blocks": 60, "is_async": True, "siblings": [CONFIG], "outer": outer, **options}
    return lab.Engine(model, sidecar, **chosen)


@BOTH
def test_what_we_hold_is_loaded_by_us_and_what_a_neighbour_holds_by_it(lab: Any, model: Path, is_async: bool) -> None:
    """Case 21: words on loads of the other one change nothing here."""
    from neighbour import Neighbour

    sidecar = FakeSidecar(1)
    engine = beside(lab, model, sidecar, num_blocks=20, is_async=is_async)
    ours, theirs = tokens(1, 100), tokens(2, 100)
    Neighbour.shelf.prompts[tuple(theirs)] = 96
    assert engine.answer(ours) == lab.expected(ours, 8)
    sidecar.settle()
    before = engine.computed
    assert engine.answer(theirs) == lab.expected(theirs, 8)
    assert engine.computed - before <= 8 + 4 + 1 and Neighbour.shelf.loaded == 1 and sidecar.loaded == 0
    before = engine.computed
    assert engine.answer(ours) == lab.expected(ours, 8)
    assert engine.computed - before <= 8 + 4 + 1 and sidecar.loaded == 1
    sidecar.settle()
    check_held(lab, engine, sidecar)


def test_what_a_neighbour_loaded_is_stored_as_well(lab: Any, model: Path) -> None:
    sidecar = FakeSidecar(2)
    theirs = tokens(2, 100)
    engine = beside(lab, model, sidecar, shelf={"prompts": {tuple(theirs): 96}})
    engine.answer(theirs)
    sidecar.settle()
    assert len(sidecar.held) >= 12
    check_held(lab, engine, sidecar)


@BOTH
def test_a_neighbours_load_that_fails_is_computed_and_the_right_bytes_are_stored(
    lab: Any, model: Path, is_async: bool
) -> None:
    sidecar = FakeSidecar(3)
    theirs = tokens(2, 100)
    engine = beside(lab, model, sidecar, is_async=is_async, shelf={"prompts": {tuple(theirs): 96}, "fails": True})
    from neighbour import Neighbour

    name = engine.add(theirs)
    while not Neighbour.shelf.loaded:
        engine.step()
    Neighbour.shelf.prompts.clear()
    engine.run()
    assert engine.outputs[name] == lab.expected(theirs, 8)
    sidecar.settle()
    check_held(lab, engine, sidecar)


@BOTH
@pytest.mark.parametrize("fails", [False, True], ids=["well", "failing"])
def test_a_neighbour_that_loads_within_a_step_ends_our_stores_and_nothing_wrong_is_published(
    lab: Any, model: Path, warnings: list[str], is_async: bool, fails: bool
) -> None:
    """Case 5: its load may fail after its blocks were used; what was computed from them is stored by nobody."""
    from neighbour import Neighbour

    sidecar = FakeSidecar(4)
    ours, theirs = tokens(1, 60), tokens(2, 100)
    engine = beside(lab, model, sidecar, is_async=is_async, shelf={"is_async": False, "fails": fails})
    assert engine.answer(ours) == lab.expected(ours, 8)
    sidecar.settle()
    held = len(sidecar.held)
    assert held > 0 and not any("in the middle of a step" in line for line in warnings)
    Neighbour.shelf.prompts[tuple(theirs)] = 96
    name = engine.add(theirs)
    for runner in engine.runners:
        runner.tolerates = True  # the forward of the failed step attends to what is not there
    while not Neighbour.shelf.loaded:
        engine.step()
    Neighbour.shelf.prompts.clear()
    if fails and not is_async:  # vLLM drops what the failed step sampled, and a runner with it
        for runner in engine.runners:
            del runner.tokens[name][len(theirs) :]
    engine.run()
    if not fails:
        assert engine.outputs[name] == lab.expected(theirs, 8)
    engine.answer(tokens(3, 80))
    sidecar.settle()
    assert len(sidecar.held) == held
    assert sum("in the middle of a step" in line for line in warnings) == 1
    check_held(lab, engine, sidecar)


@pytest.mark.parametrize(
    ("outer", "words"),
    [
        ({"kv_load_failure_policy": "fail"}, "set kv_load_failure_policy to 'recompute' beside MultiConnector"),
        ({"kv_role": "kv_producer"}, "the outer kv_role is 'kv_producer'"),
    ],
)
def test_where_the_outer_settings_would_break_requests_caching_stays_off_and_says_what_to_set(
    lab: Any, model: Path, warnings: list[str], outer: dict[str, str], words: str
) -> None:
    """Case 105: a child cannot change them, and a failed load would be a failed request."""
    sidecar = FakeSidecar(5)
    engine = beside(lab, model, sidecar, outer=outer)
    assert not engine.is_on
    assert [line for line in warnings if "caching is off" in line and words in line]
    prompt = tokens(1, 60)
    assert engine.answer(prompt) == lab.expected(prompt, 8)
    assert not sidecar.held


def test_alone_the_policy_is_set_by_us(lab: Any, model: Path, warnings: list[str]) -> None:
    engine = lab.Engine(model, FakeSidecar(6), num_blocks=40, is_async=True)
    assert engine.is_on and engine.scheduler.recompute_kv_load_failures
    assert not [line for line in warnings if "caching is off" in line]


@pytest.mark.parametrize("seed", range(6))
@BOTH
def test_nothing_wrong_is_ever_attended_to_or_published_beside_a_neighbour(
    lab: Any, model: Path, is_async: bool, seed: int
) -> None:
    """Case 20, with a second connector that takes some of the loads."""
    from neighbour import Neighbour

    rng = random.Random(seed)
    sidecar = FakeSidecar(seed, num_ranks=1 + seed % 2, fail_one_in=rng.choice([0, 5]))
    engine = beside(lab, model, sidecar, is_async=is_async, num_blocks=rng.choice([24, 40]))
    roots = [tokens(n, rng.randrange(20, 90)) for n in range(4)]
    due = {}
    for _ in range(30):
        prompt = rng.choice(roots) + tokens(rng.randrange(6), rng.randrange(0, 30))
        if rng.random() < 0.3:
            Neighbour.shelf.prompts[tuple(prompt)] = (len(prompt) - 1) // lab.BLOCK * lab.BLOCK
        name = engine.add(prompt, rng.randrange(1, 24))
        due[name] = engine.asked[-1][1]
        for _ in range(rng.randrange(6)):
            engine.step()
    engine.run()
    sidecar.settle()
    assert engine.outputs == due
    assert Neighbour.shelf.loaded > 0 and sidecar.loaded > 0
    check_held(lab, engine, sidecar)
