"""Lends a rank's KV memory to its worker: vLLM's tensors become a `KVMemory`, and that a `RankClient`.

    kv_caches {layer: tensor} ──blocks out of kernel blocks──▶ export ──▶ RankClient (waits for the verdict)
                                    cpu: shared in place ──┤
                                   cuda: exported by handle ┘

Imports the exporter of the device at hand, and torch through it; vLLM not at all. What cannot be lent gives None
and one line: the engine serves without, and nothing is ever offered.
"""

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvferry.client import KVMemory, RankClient
from kvferry.proto.errors import ConfigError, KvferryError

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
    group = kv_cache_config.kv_cache_groups[0]
    fds: tuple[int, ...] = ()
    try:
        export = _exporter(device)
        memory = export(
            {name: _in_blocks(tensor, kv_cache_config.num_blocks) for name, tensor in kv_caches.items()},
            block_tokens=group.kv_cache_spec.block_size,
            format=f"vllm {kv_cache_config.kv_cache_layout}" if hasattr(kv_cache_config, "kv_cache_layout") else "vllm",
            null_block=True,
            block_bytes=stated_bytes(kv_caches, group),
            probe_with=_of_the_layers(kv_caches, vllm_config),
        )
        fds = memory.fds
        return RankClient(
            engine_id,
            rank,
            world_size=vllm_config.parallel_config.world_size,
            memory=memory,
            facts=facts,
            run_dir=run_dir,
            on_note=note,
        )
    except KvferryError as error:
        for fd in fds:  # nobody owns them
            os.close(fd)
        note(f"caching is off: {error}")
        return None


def _exporter(device: str) -> Callable[..., KVMemory]:
    """The exporter of a kind of device. Each is imported only where it is used: none of CUDA on a CPU."""
    if device == "cpu":
        from kvferry.client.torch_memory import export_cpu

        return export_cpu
    if device == "cuda":
        from kvferry.client.cuda_memory import export_cuda

        return export_cuda
    raise ConfigError("device.kind", f"the KV cache is on {device!r}", "kvferry serves engines on CPU and on CUDA")


def stated_bytes(kv_caches: "Mapping[str, Tensor]", group: Any) -> int:
    """What vLLM itself says one block has on this rank, padding left out; 0 where it does not surely say it.

    Layers that share their KV count once. Only a vLLM whose layer views are made of exactly these numbers (it calls
    them unpadded) says it surely; older ones have rules of their own for scales and padding.
    """
    spec = group.kv_cache_spec
    by_layer = getattr(spec, "kv_cache_specs", None)
    pages: dict[int, int] = {}
    for name, tensor in kv_caches.items():
        page = getattr(spec if by_layer is None else by_layer.get(name), "unpadded_page_size_bytes", None)
        if isinstance(page, int) and page > 0:
            pages.setdefault(tensor.data_ptr(), page)
        elif tensor.data_ptr() not in pages:
            return 0
    return sum(pages.values())


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
