"""Lends a rank's KV memory to its worker: vLLM's tensors become a `KVMemory`, and that a `RankClient`.

    kv_caches {layer: tensor} ──blocks out of kernel blocks──▶ export ──▶ RankClient (waits for the verdict)

Imports torch through the exporter of the device at hand; vLLM not at all. A device that has no exporter yet
gives None and one line: its loads would fail, but nothing is ever offered.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvferry.client import RankClient
from kvferry.proto.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


def lend_memory(
    kv_caches: "Mapping[str, Tensor]",
    vllm_config: Any,
    kv_cache_config: Any,
    *,
    rank: int,
    engine_id: str,
    run_dir: str | None,
    facts: Mapping[str, str],
    note: Callable[[str], None],
) -> RankClient | None:
    """The rank's client; None, with one line, if this memory cannot be lent."""
    device = next(iter(kv_caches.values())).device.type
    if device != "cpu":
        note(f"caching is off: the KV cache is on {device!r}; this version serves engines on CPU")
        return None
    from kvferry.client.torch_memory import export_cpu

    group = kv_cache_config.kv_cache_groups[0]
    views = {name: _in_blocks(tensor, kv_cache_config.num_blocks) for name, tensor in kv_caches.items()}
    try:
        memory = export_cpu(
            views,
            block_tokens=group.kv_cache_spec.block_size,
            format=f"vllm {kv_cache_config.kv_cache_layout}" if hasattr(kv_cache_config, "kv_cache_layout") else "vllm",
            null_block=True,
            probe_with=_of_the_layers(kv_caches, vllm_config),
        )
    except ConfigError as error:
        note(f"caching is off: {error}")
        return None
    return RankClient(
        engine_id,
        rank,
        world_size=vllm_config.parallel_config.world_size,
        memory=memory,
        facts=facts,
        run_dir=run_dir,
        on_note=note,
    )


def _in_blocks(tensor: "Tensor", num_blocks: int) -> "Tensor":
    """The tensor with the scheduler's blocks in front: an attention kernel's may be smaller ones."""
    if tensor.shape[0] == num_blocks:
        return tensor
    if tensor.shape[0] % num_blocks:
        raise ConfigError("layout.blocks", f"a KV tensor has {tensor.shape[0]} blocks; the engine has {num_blocks}")
    return tensor.unflatten(0, (num_blocks, -1))


def _of_the_layers(kv_caches: "Mapping[str, Tensor]", vllm_config: Any) -> "list[Tensor] | None":
    """What the attention layers themselves read and write: other objects than those registered, maybe."""
    layers = getattr(vllm_config.compilation_config, "static_forward_context", {})
    found = [getattr(layers.get(name), "kv_cache", None) for name in kv_caches]
    tensors: list[Tensor] = [one for one in found if one is not None and hasattr(one, "data_ptr") and one.numel()]
    # One for each piece of memory is proof enough, and all layers lie in one; the ends are the likeliest to differ.
    return [tensors[0], tensors[-1]] if len(tensors) > 1 else tensors or None
