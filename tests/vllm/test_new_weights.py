"""New weights in a running engine (docs/operations.md): after its reset it answers as an engine that started with them.

    first   old weights ─ stores ─ reload ─ (no reset: wrong) ─ reset ─ new weights, a namespace of its own
    second  old weights all the time: keeps what both shared before
    third   starts on the replaced files: a namespace by its files, from the start

Engine starts take most of the time, so it is one story.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm_lab as lab
from engine_kit import CACHE, NOISE, PATIENCE_MS, PROMPTS, SHAPE, WHOLE, difference, evict, held, returned, same
from vllm_model import ModelShape, write_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NEW = replace(SHAPE, seed=8)
CHAINS = list(PROMPTS.values())


class Fleet:
    """A model's folder, a sidecar, and engines that are started on what the folder holds then."""

    def __init__(self, stack: ExitStack) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvferry-vllm-", dir="/tmp"))
        stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self.model = write_model(self.folder / "model", SHAPE)
        self._stack = stack
        stack.enter_context(lab.running_sidecar(self.folder / "run", host_memory="256MiB"))

    def start(self, *names: str) -> list[lab.Engine]:
        """Engines of the sidecar, started side by side."""
        made = []
        for name in names:
            connector = lab.connector(self.folder / "run", patience_ms=PATIENCE_MS)
            made.append(lab.start_engine(self.folder, self.model, name=name, kv_transfer=connector, **CACHE))
            self._stack.callback(lab.stop_engine, made[-1])
        for engine in made:
            engine.answer()
        return made

    def alone(self) -> list[dict[str, Any]]:
        """What an engine without kvferry answers."""
        with lab.running_engine(self.folder, self.model, name="alone", **CACHE) as engine:
            return engine.generate(CHAINS)

    def put(self, shape: ModelShape) -> None:
        """Other numbers of the same shape into the model's folder, as a training run would leave them."""
        fresh = write_model(self.folder / "fresh", shape) / "model.safetensors"
        fresh.replace(self.model / "model.safetensors")


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(stack)


def check_stores(engine: lab.Engine, due: list[dict[str, Any]]) -> None:
    """It finds nothing, computes what is due, and finds that again."""
    for prompt, answer in zip(CHAINS, due, strict=True):
        fresh = engine.generate([prompt])[0]
        assert held(fresh) == 0
        same(fresh, answer)
    evict(engine)
    check_finds(engine, due)


def check_finds(engine: lab.Engine, due: list[dict[str, Any]]) -> None:
    """What its own cache has not, the sidecar has."""
    for prompt, answer in zip(CHAINS, due, strict=True):
        assert returned(engine, prompt, answer) == WHOLE


def test_after_new_weights_and_a_reset_an_engine_answers_as_one_that_started_with_them(fleet: Fleet) -> None:
    """Case 70: and its neighbour, which keeps the old weights, keeps what they stored."""
    first, second = fleet.start("first", "second")
    old = first.generate(CHAINS)
    evict(first)
    check_finds(first, old)
    check_finds(second, old)

    fleet.put(NEW)
    new = fleet.alone()
    assert all(difference(one, other) > 100 * NOISE for one, other in zip(new, old, strict=True))

    first.ask(op="reload")
    assert first.ask(op="reset")["ok"] is True
    wrong = first.generate(CHAINS[:1])[0]  # the control: its own cache was emptied, and the sidecar still has the old
    assert held(wrong) == WHOLE and difference(wrong, new[0]) > 100 * NOISE
    assert first.ask(op="reset", connector=True)["ok"] is True
    check_stores(first, new)

    evict(second)
    check_finds(second, old)  # its neighbour, under the old weights, has what both stored, and nothing else
    (third,) = fleet.start("third")
    check_stores(third, new)  # who starts on the new files has a namespace by them from the start

    fleet.put(SHAPE)  # the other way round: first the reset, then the weights, and no request between
    assert first.ask(op="reset", connector=True)["ok"] is True
    first.ask(op="reload")
    check_stores(first, old)


@pytest.mark.filterwarnings("ignore")
def test_over_http_the_reset_that_the_manual_names_reaches_the_connector() -> None:
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from vllm.entrypoints.serve.dev.cache.api_router import attach_router

    heard = []

    async def reset_prefix_cache(reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        heard.append((reset_running_requests, reset_connector))
        return True

    app = FastAPI()
    attach_router(app)
    app.state.engine_client = SimpleNamespace(reset_prefix_cache=reset_prefix_cache)
    with TestClient(app) as client:
        assert client.post("/reset_prefix_cache?reset_external=true").json() == {"success": True}
        assert client.post("/reset_prefix_cache").json() == {"success": True}
    assert heard == [(False, True), (False, False)]
