"""What is lent of a rank's memory, on each kind of device. Needs torch for CPU tensors, and no vLLM."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace as Some
from typing import Any

import pytest

from kvferry import RankClient
from kvferry.cuda.driver import Driver
from kvferry.vllm.memory import lend_memory, stated_bytes
from tests.client.fake_gpu import FakeEngine, GpuTensor
from tests.cuda.stubs import Stub

torch = pytest.importorskip("torch")

BLOCKS, HEADS, TOKENS, CONTENT = 6, 2, 4, 8
PAGE = HEADS * TOKENS * CONTENT * 4


def layers(count: int = 2) -> dict[str, Any]:
    """Layers as views of one buffer, as vLLM has them."""
    buffer = torch.zeros(count * BLOCKS * PAGE // 4)
    return {
        f"l{n}": part.view(BLOCKS, HEADS, TOKENS, CONTENT) for n, part in enumerate(buffer.split(BLOCKS * PAGE // 4))
    }


def engine(**spec: Any) -> tuple[Any, Any]:
    """(configuration, cache configuration), as far as they are read."""
    config = Some(parallel_config=Some(world_size=1), compilation_config=Some(static_forward_context={}))
    said = {"block_size": TOKENS, "unpadded_page_size_bytes": PAGE, **spec}
    group = Some(kv_cache_spec=Some(**said), layer_names=["l0", "l1"])
    return config, Some(kv_cache_groups=[group], num_blocks=BLOCKS)


@pytest.fixture
def lend(tmp_path: Path) -> Iterator[Any]:
    """Lends tensors to nobody: there is no sidecar at this place."""
    made: list[RankClient] = []
    notes: list[str] = []

    def lent(kv_caches: dict[str, Any], **spec: Any) -> tuple[RankClient | None, str]:
        config, cache = engine(**spec)
        client = lend_memory(
            kv_caches, config, cache, rank=0, engine_id="e", run_dir=str(tmp_path), facts={}, note=notes.append
        )
        made.extend([] if client is None else [client])
        return client, "\n".join(notes)

    yield lent
    for client in made:
        fds = client._search._memory.fds
        client.close()
        for fd in fds:
            os.close(fd)


def layout_of(client: RankClient) -> Any:
    return client._register.layout


def test_a_cpu_engine_lends_without_a_word_to_cuda(lend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 46: a machine without a GPU is asked for none."""
    for name in ("init", "_lazy_init", "current_stream", "is_available", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("torch.cuda was called"))
    for name in [name for name in sys.modules if name.startswith("kvferry") and "cuda" in name]:
        monkeypatch.delitem(sys.modules, name)
    client, _ = lend(layers())
    assert client is not None
    assert not [name for name in sys.modules if name.startswith("kvferry") and "cuda" in name]
    assert client.describe()["mark_mode"] == "word"


def test_what_vllm_says_of_a_block_is_what_is_registered(lend: Any) -> None:
    """Case 71: a layout that was read wrong leaves bytes out, and nothing else would notice."""
    client, _ = lend(layers())
    assert layout_of(client).groups[0].block_bytes == 2 * PAGE
    assert layout_of(client).null_block


def test_a_block_of_other_bytes_than_vllm_says_is_refused_before_any_worker_sees_it(lend: Any) -> None:
    """Case 71: with both numbers."""
    client, notes = lend(layers(), unpadded_page_size_bytes=PAGE * 17)
    assert client is None
    assert "caching is off: layout.geometry" in notes and str(2 * PAGE) in notes and str(34 * PAGE) in notes


def test_layers_that_share_their_kv_count_once() -> None:
    kv_caches = layers()
    kv_caches["twin"] = kv_caches["l0"]
    _, cache = engine()
    assert stated_bytes(kv_caches, cache.kv_cache_groups[0]) == 2 * PAGE


def test_a_vllm_that_does_not_surely_say_it_says_nothing() -> None:
    _, cache = engine(unpadded_page_size_bytes=None, page_size_bytes=PAGE, real_page_size_bytes=PAGE)
    assert stated_bytes(layers(), cache.kv_cache_groups[0]) == 0
    by_layer = engine(kv_cache_specs={"l0": Some(unpadded_page_size_bytes=PAGE)})[1]
    assert stated_bytes(layers(), by_layer.kv_cache_groups[0]) == 0, "nothing is said of l1"


def test_each_layer_counts_with_its_own_page() -> None:
    specs = {"l0": Some(unpadded_page_size_bytes=PAGE), "l1": Some(unpadded_page_size_bytes=3)}
    _, cache = engine(kv_cache_specs=specs)
    assert stated_bytes(layers(), cache.kv_cache_groups[0]) == PAGE + 3


def test_kernel_blocks_are_put_together(lend: Any) -> None:
    split = {name: tensor.view(BLOCKS * 2, HEADS, TOKENS // 2, CONTENT) for name, tensor in layers().items()}
    client, _ = lend(split)
    assert [(r.run, r.blocks) for r in layout_of(client).groups[0].regions] == [(PAGE, BLOCKS)] * 2


def test_an_engine_elsewhere_serves_without_and_says_why_in_one_line(lend: Any) -> None:
    client, notes = lend({"l0": Some(device=Some(type="xpu"))})
    assert client is None and notes.startswith("caching is off: device.kind: the KV cache is on 'xpu'")


def test_without_a_driver_a_gpu_engine_serves_without_and_says_why(lend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 98: what is missing is named, and the engine starts."""
    from kvferry.proto.errors import ConfigError

    def load() -> Driver:
        raise ConfigError("device.no_driver", "there is no CUDA driver here", "install it")

    monkeypatch.setattr(Driver, "load", load)
    client, notes = lend({"l0": Some(device=Some(type="cuda"), shape=(BLOCKS, 2), data_ptr=lambda: 4096)})
    assert client is None and "caching is off: device.no_driver" in notes


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEngine]:
    """A GPU that is a stub of the driver, and torch's current stream on it."""
    stub = Stub(tmp_path / "calls")
    engine = FakeEngine(stub.path)
    load = Driver.load
    monkeypatch.setattr(Driver, "load", lambda: load(stub.path))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Some(cuda_stream=engine.stream()))
    yield engine
    engine.close()
    stub.check()
    assert stub.leaks() == ""
    stub.close()


class OnGpu(GpuTensor):
    device = Some(type="cuda")


def test_a_gpu_engine_lends_its_allocation_and_its_stream_writes_the_marks(gpu: FakeEngine, tmp_path: Path) -> None:
    base = gpu.allocate(1 << 20)
    strides = (HEADS * TOKENS * CONTENT, TOKENS * CONTENT, CONTENT, 1)
    kv_caches = {
        f"l{n}": OnGpu(base + 512 + n * BLOCKS * PAGE, (BLOCKS, HEADS, TOKENS, CONTENT), strides, 4, "torch.float32")
        for n in range(2)
    }
    config, cache = engine()
    config.compilation_config.static_forward_context = {name: Some(kv_cache=None) for name in kv_caches}
    options = {"rank": 0, "engine_id": "e", "run_dir": str(tmp_path), "facts": {}}
    client = lend_memory(kv_caches, config, cache, note=lambda _: None, **options)  # type: ignore[arg-type]
    assert client is not None
    layout = layout_of(client)
    assert [handle.kind for handle in layout.handles] == ["cuda_ipc"] and layout.handles[0].base_offset == 512
    assert layout.groups[0].block_bytes == layout.groups[0].payload_bytes == 2 * PAGE
    assert client.describe()["mark_mode"] == "word" and client.describe()["mark"] == 1
    client.close()
