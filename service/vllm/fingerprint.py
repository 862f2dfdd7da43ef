"""What names the bytes of a block: the facts that two engines must share to share what they store.

    model · revision · weights on disk · dtypes · block size · hash algorithm and its seed · software
        │
        └─▶ facts: {name: text}, the same in the scheduler half and in every rank half of one engine

The byte format of the memory is no part of it (the layout's digest covers that), nor are the number of
blocks, the parallel rank or anything else that may differ between engines with equal bytes. Where something
might matter it is in: a fact too many costs a miss, one too few would cost the answer.

Everything here reads vLLM's configuration by name and imports nothing of vLLM.
"""

import hashlib
import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

# Bytes of a block hash by algorithm (vllm.utils.hashing).
KEY_BYTES: Final = {"sha256": 32, "sha256_cbor": 32, "xxhash": 16, "xxhash_cbor": 16}
WEIGHT_FILES: Final = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def block_facts(vllm_config: Any, kv_cache_config: Any, vllm_version: str, device: str) -> dict[str, str]:
    """The facts of one engine, as short texts."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    dtype = str(model.dtype).removeprefix("torch.")
    algorithm = str(cache.prefix_caching_hash_algo)
    facts = {
        "engine": f"vllm {vllm_version}",
        "device": device,
        "model": str(model.model),
        "revision": str(model.revision or ""),
        "weights": weights_stamp(str(model.model), vllm_config),
        "shape": _digest(_plain(model.hf_config)),
        "quantization": str(model.quantization or ""),
        "dtype": dtype,
        "cache_dtype": dtype if cache.cache_dtype == "auto" else str(cache.cache_dtype),
        "block": f"{spec.block_size} tokens of {type(spec).__name__} {getattr(spec, 'dtype', '')}",
        "hash": algorithm,
        "hash_seed": hash_seed(algorithm),
        "speculative": _digest(_speculative(vllm_config)),
        "parallel": f"tp{vllm_config.parallel_config.tensor_parallel_size}"
        f" pp{vllm_config.parallel_config.pipeline_parallel_size}",
    }
    if not algorithm.endswith("_cbor"):
        # The hash is taken over a pickle, whose bytes are only known to agree within one Python version.
        facts["pickle"] = f"python {sys.version_info.major}.{sys.version_info.minor}"
    return facts


def hash_seed(algorithm: str) -> str:
    """What the first block's hash starts from: the same in every process that shall share blocks."""
    if (seed := os.environ.get("PYTHONHASHSEED")) is not None:
        return f"PYTHONHASHSEED={seed}"
    return "default" if is_reproducible(algorithm) else "random"


def is_reproducible(algorithm: str) -> bool:
    """Whether two processes give equal blocks equal hashes."""
    return algorithm.startswith("sha256") or os.environ.get("PYTHONHASHSEED") is not None


def weights_stamp(model: str, vllm_config: Any) -> str:
    """Tells one version of the weights from another: names, sizes and times of a local model's files.

    A model by name is told apart by its commit, since a branch moves. Dummy weights are made of the seed.
    """
    load = vllm_config.load_config
    if str(load.load_format) == "dummy":
        return f"dummy seed {vllm_config.model_config.seed}"
    folder = Path(model)
    if not folder.is_dir():
        return _hub_commit(model, vllm_config.model_config.revision)
    found = sorted({path for pattern in WEIGHT_FILES for path in folder.glob(pattern)})
    return _digest([(path.name, stat.st_size, stat.st_mtime_ns) for path, stat in _stats(found)])


def _hub_commit(model: str, revision: str | None) -> str:
    """The commit that the hub's cache on this machine has of a model that the engine has just loaded; "" if none."""
    try:
        hub = importlib.import_module("huggingface_hub")
        found = hub.try_to_load_from_cache(model, "config.json", revision=revision)
    except (ImportError, ValueError):  # no hub here, or no name that it could have
        return ""
    return Path(found).parent.name if isinstance(found, str) else ""


def _stats(paths: list[Path]) -> Iterator[tuple[Path, os.stat_result]]:
    for path in paths:
        yield path, path.stat()


def _speculative(vllm_config: Any) -> Any:
    """A draft model's layers may lie in the same blocks."""
    found = vllm_config.speculative_config
    return None if found is None else [str(found.method), str(found.model), found.num_speculative_tokens]


def _plain(config: Any) -> Any:
    """A model's configuration as plain values, without what differs between equal models."""
    values = dict(config.to_dict()) if hasattr(config, "to_dict") else dict(vars(config))
    for name in ("_name_or_path", "transformers_version"):
        values.pop(name, None)
    return values


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
