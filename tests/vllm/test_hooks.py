"""What our connector does in which of vLLM's hooks, none within a forward, and what it makes of vLLM's caches."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace as Some
from typing import Any

import pytest

from kvferry.client.types import Directive, RankReport

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@dataclass
class Recorder:
    """A rank client that writes down when it is called."""

    within: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    holding: bool = False
    open_loads: frozenset[int] = frozenset()

    def _note(self, name: str) -> None:
        self.calls.append((self.within, name))

    def revoke(self, directive: Directive) -> None:
        self._note("revoke")

    def begin_loads(self, directive: Directive) -> None:
        self._note("begin_loads")

    def begin_stores(self, directive: Directive) -> None:
        self._note("begin_stores")

    def wait(self, timeout_s: float) -> None:
        self._note("wait")

    def poll(self) -> RankReport:
        self._note("poll")
        return RankReport()

    def close(self, wait_s: float = 1.0) -> None:
        self._note("close")


def worker_half(lab: Any, model: Path) -> tuple[Any, Recorder]:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from kvferry.vllm.connector import KvferryConnector
    from kvferry.vllm.rank import RankHalf

    config, cache = lab.make_config(model, 20, is_async=True)
    made, recorder = KvferryConnector(config, KVConnectorRole.WORKER, cache), Recorder()
    made._rank = RankHalf(recorder)
    return made, recorder


def metadata() -> Any:
    from kvferry.vllm.connector import KvferryMetadata
    from kvferry.vllm.work import StepWork

    directive = Directive(1, loads=((1, (4, 5)),), stores=(2,), revokes=(3,))
    return KvferryMetadata(StepWork(directive, {1: "a"}))


def test_no_hook_within_the_forward_touches_the_rank_client(lab: Any, model: Path) -> None:
    """A call into the driver while a CUDA graph is captured would end the capture, or be captured with it.

    The marks lie before the forward for loads and behind it for stores, whatever order the runners have.
    """
    connector, recorder = worker_half(lab, model)
    for name, hook in (
        ("preemptions", lambda: connector.handle_preemptions(metadata())),
        ("bind", lambda: connector.bind_connector_metadata(metadata())),
        ("load", lambda: connector.start_load_kv(None)),
        ("layer load", lambda: connector.wait_for_layer_load("layer")),
        ("layer save", lambda: connector.save_kv_layer("layer", None, None)),
        ("finish forward", lambda: connector.finish_forward()),
        ("capture", lambda: connector.reset_capture_state()),
        ("after", lambda: connector.wait_for_save()),
        ("results", lambda: connector.get_transfer_results(set())),
        ("clear", lambda: connector.clear_connector_metadata()),
    ):
        recorder.within = name
        hook()
    assert recorder.calls == [
        ("preemptions", "revoke"),
        ("bind", "begin_loads"),
        ("after", "begin_stores"),
        ("results", "poll"),
    ]


def test_graphs_may_hold_whole_forwards(lab: Any, model: Path) -> None:
    """Nothing of ours runs between layers, so vLLM need not cut its graphs for it."""
    connector, _ = worker_half(lab, model)
    assert not connector.requires_piecewise_for_cudagraph({})


def test_hooks_that_vllm_calls_in_dummy_runs_do_nothing_without_orders(lab: Any, model: Path) -> None:
    """Graphs are captured in dummy runs; a runner that called a hook there would pass no metadata of ours."""
    connector, recorder = worker_half(lab, model)
    connector.wait_for_save()
    assert recorder.calls == []


def test_by_default_no_layout_is_asked_for_and_blocks_in_one_piece_on_request(lab: Any, model: Path) -> None:
    from vllm.distributed.kv_transfer.kv_connector.utils import get_kv_connector_cache_layout
    from vllm.v1.kv_cache_layout import KVCacheLayout

    def asked(**extra: Any) -> str | None:
        config, _ = lab.make_config(model, 20, is_async=False, **extra)
        answer: str | None = get_kv_connector_cache_layout(config)
        return answer

    assert asked() is None
    name = asked(**{"kvferry.layout": "block"})
    assert name is not None and KVCacheLayout[name].is_block_outermost and KVCacheLayout[name].is_block_compact
    assert asked(**{"kvferry.layout": "sideways"}) is None


def test_a_vllm_without_that_layout_or_without_settings_is_asked_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine never fails to start for a wish."""
    from kvferry.vllm import connector

    told: list[str] = []
    monkeypatch.setattr(connector.logger, "warning", lambda text, *args: told.append(text % args))
    wish = Some(kv_transfer_config=Some(kv_connector_extra_config={"kvferry.layout": "block"}))
    monkeypatch.setattr(connector, "BLOCK_OUTERMOST", "XYZ")
    assert connector.KvferryConnector.get_required_kvcache_layout(wish) is None
    assert connector.KvferryConnector.get_required_kvcache_layout(Some()) is None
    assert len(told) == 2 and "no layout XYZ" in told[0]


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
@pytest.mark.parametrize("kind", ["full", "mla", "fp8", "split", "padded"])
def test_what_vllm_says_of_a_block_is_what_its_own_views_hold(layout: str, kind: str) -> None:
    """Case 71: for each of vLLM's layouts and kinds of cache, made by vLLM's own code."""
    import torch
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheGroupSpec,
        KVCacheTensor,
        MLAAttentionSpec,
        compute_layout_strides,
        create_kv_cache_views,
    )
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from kvferry.client.torch_memory import export_cpu
    from kvferry.vllm.memory import _in_blocks, stated_bytes

    blocks, layers, chosen = 5, 3, KVCacheLayout[layout]
    if kind == "mla":
        spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=36, dtype=torch.float32)
    else:
        dtype = torch.uint8 if kind == "fp8" else torch.float32
        spec = FullAttentionSpec(
            block_size=16,
            num_kv_heads=2,
            head_size=8,
            dtype=dtype,
            page_size_padded=3072 if kind == "padded" else None,
        )
    page, real = spec.page_size_bytes, spec.unpadded_page_size_bytes
    if kind == "padded" and not chosen.is_block_compact:
        pytest.skip("vLLM pads only pages that are one piece")
    if kind == "split" and (chosen.is_block_outermost or not chosen.is_block_compact):
        pytest.skip("vLLM splits only pages that are dense and one piece")
    layer_stride, block_stride = compute_layout_strides(spec, blocks, layers, chosen)[:2]
    names = [f"l{n}" for n in range(layers)]
    tensor = KVCacheTensor(
        size=blocks * layers * page, layers=names, layer_stride=layer_stride, block_stride=block_stride
    )
    raw = torch.zeros(blocks * layers * page, dtype=torch.int8)
    views = create_kv_cache_views(raw, spec, blocks, chosen, tensor, 4 if kind == "split" else None)
    kv_caches = dict(zip(names, views, strict=True))
    stated = stated_bytes(kv_caches, KVCacheGroupSpec(names, spec))
    assert stated == layers * real
    memory = export_cpu(
        {name: _in_blocks(view, blocks) for name, view in kv_caches.items()}, block_tokens=16, block_bytes=stated
    )
    assert memory.layout.groups[0].payload_bytes == stated
