"""The connector's settings, what makes it stay off, and the facts that name a block. Without vLLM."""

import copy
from pathlib import Path
from types import SimpleNamespace as Some
from typing import Any

import pytest

from kvferry.vllm.fingerprint import KEY_BYTES, block_facts
from kvferry.vllm.options import Options, why_off


class FullAttentionSpec(Some):
    """Stands for vLLM's class of this name."""


class SlidingWindowSpec(Some):
    """Stands for vLLM's class of this name."""


def engine(folder: Path | str = "org/model", **over: Any) -> tuple[Any, Any]:
    """An engine's configuration, as far as it is read."""
    config = Some(
        model_config=Some(
            model=str(folder), revision=None, dtype="torch.float32", quantization=None, hf_config=Some(layers=2), seed=0
        ),
        cache_config=Some(cache_dtype="auto", prefix_caching_hash_algo="sha256"),
        load_config=Some(load_format="auto"),
        parallel_config=Some(tensor_parallel_size=1, pipeline_parallel_size=1, world_size=1),
        device_config=Some(device_type="cpu"),
        kv_transfer_config=Some(kv_role="kv_both"),
        speculative_config=None,
    )
    for path, value in over.items():
        at, name = config, path.split("__")
        for part in name[:-1]:
            at = getattr(at, part)
        setattr(at, name[-1], value)
    spec = FullAttentionSpec(block_size=16, dtype="torch.float32")
    return config, Some(kv_cache_groups=[Some(kv_cache_spec=spec)])


def facts(**over: Any) -> dict[str, str]:
    config, cache = engine(**over)
    return block_facts(config, cache, "0.32.0", "cpu")


def test_options_are_read_and_wrong_ones_are_complained_of() -> None:
    options = Options.read({"kvferry.run_dir": "/r", "kvferry.salt": "s", "kvferry.store": "prompt", "other": 1})
    assert (options.run_dir, options.salt, options.store, options.complaints) == ("/r", b"s", "prompt", ())
    assert (options.layout, Options.read({"kvferry.layout": "block"}).layout) == ("engine", "block")
    wrong = Options.read(
        {"kvferry.stor": "all", "kvferry.store": "some", "kvferry.patience_ms": "long", "kvferry.layout": "BLHNC"}
    )
    assert (wrong.store, wrong.patience_s, wrong.layout) == ("all", 0.02, "engine")
    assert len(wrong.complaints) == 4
    assert "kvferry.stor" in wrong.complaints[0] and "kvferry.store" in wrong.complaints[0]
    assert Options.read(None) == Options()


def test_one_full_attention_group_is_served_and_anything_else_says_why_not() -> None:
    config, cache = engine()
    assert why_off(config, cache) is None
    two = Some(kv_cache_groups=cache.kv_cache_groups * 2)
    assert "2 KV cache groups" in str(why_off(config, two))
    window = Some(kv_cache_groups=[Some(kv_cache_spec=SlidingWindowSpec(block_size=16))])
    assert "SlidingWindowSpec" in str(why_off(config, window))
    assert "kv_both" in str(why_off(engine(kv_transfer_config__kv_role="kv_producer")[0], cache))
    assert "decode_context_parallel_size" in str(
        why_off(engine(parallel_config__decode_context_parallel_size=2)[0], cache)
    )
    cache.needs_kv_cache_zeroing = True  # of several precisions, for one
    assert why_off(config, cache) is None  # runner V1 tells connectors first
    config.use_v2_model_runner = True
    assert "VLLM_USE_V2_MODEL_RUNNER=0" in str(why_off(config, cache))
    cache.needs_kv_cache_zeroing = False
    sleepy = engine(model_config__enable_sleep_mode=True)[0]
    assert why_off(sleepy, cache) is None  # the CPU server ignores sleep
    sleepy.device_config.device_type = "cuda"
    assert "sleep mode" in str(why_off(sleepy, cache))


@pytest.mark.parametrize(
    "change",
    [
        {"model_config__model": "org/other"},
        {"model_config__revision": "abc"},
        {"model_config__dtype": "torch.bfloat16"},
        {"model_config__quantization": "fp8"},
        {"model_config__hf_config": Some(layers=2, rope_scaling=8.0)},
        {"cache_config__cache_dtype": "fp8"},
        {"cache_config__prefix_caching_hash_algo": "sha256_cbor"},
        {"parallel_config__tensor_parallel_size": 2},
        {"speculative_config": Some(method="eagle", model="org/draft", num_speculative_tokens=3)},
    ],
    ids=lambda change: next(iter(change)).split("__")[-1],
)
def test_engines_that_differ_in_what_a_block_means_have_other_facts(change: dict[str, Any]) -> None:
    """Cases 64, 66, 67."""
    assert facts(**change) != facts()


def test_a_resolved_dtype_counts_and_not_the_word_auto() -> None:
    """Case 64."""
    assert facts()["cache_dtype"] == "float32"
    assert facts(cache_config__cache_dtype="float32") == facts()


def test_new_weights_in_the_same_place_are_another_model(tmp_path: Path) -> None:
    """Case 70: across restarts."""
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")
    before = facts(folder=tmp_path)
    assert facts(folder=tmp_path) == before
    weights.write_bytes(b"other")
    assert facts(folder=tmp_path) != before


@pytest.mark.vllm
def test_a_branch_of_the_hub_that_has_moved_is_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 70: by the commit that the hub's cache has, as the engine loaded it."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert facts()["weights"] == "", "not in the cache"
    cache = tmp_path / "models--org--model"
    for commit in ("a" * 40, "b" * 40):
        (cache / "snapshots" / commit).mkdir(parents=True)
        (cache / "snapshots" / commit / "config.json").write_text("{}")
        (cache / "refs").mkdir(exist_ok=True)
        (cache / "refs" / "main").write_text(commit)
        assert facts()["weights"] == commit
    assert facts(model_config__revision="a" * 40)["weights"] == "a" * 40
    assert facts(folder="s3://bucket/model")["weights"] == ""


def test_hashes_that_differ_in_every_process_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 62."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert facts()["hash_seed"] == "default"
    assert facts(cache_config__prefix_caching_hash_algo="xxhash")["hash_seed"] == "random"
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert facts(cache_config__prefix_caching_hash_algo="xxhash")["hash_seed"] == "PYTHONHASHSEED=7"
    assert KEY_BYTES["xxhash"] == 16


def test_facts_are_short_texts() -> None:
    found = facts()
    assert all(isinstance(value, str) and len(value) < 200 for value in found.values())
    assert copy.deepcopy(found) == facts()
