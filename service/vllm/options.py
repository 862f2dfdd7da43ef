"""The connector's settings (`kv_connector_extra_config`), and what makes it stay off. Pure.

    kvferry.run_dir      where the sidecar is; by default where a local one looks too
    kvferry.salt         text that keeps this engine's blocks apart from others'
    kvferry.store        "all" (default) or "prompt": whether generated tokens' blocks are stored too
    kvferry.patience_ms  how long a request waits for a late answer before it is computed (default 20)
    kvferry.layout       "engine" (default): whatever layout vLLM chooses; "block": ask vLLM to lay each block out
                         in one piece, which a GPU copies faster (not every attention backend reads it right)
    kvferry.trace        file that gets one JSON line for each load: where its time went

A model or a setup that cannot be served yet runs with caching off; the reason is one line for the log.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

STORES: Final = ("all", "prompt")
LAYOUTS: Final = ("engine", "block")
NAMES: Final = ("run_dir", "salt", "store", "patience_ms", "layout", "trace")
PATIENCE_MS: Final = 20.0


@dataclass(frozen=True, slots=True)
class Options:
    """What the user chose; `complaints` are lines for the log about what could not be used."""

    run_dir: str | None = None
    salt: bytes = b""
    store: str = "all"
    patience_s: float = PATIENCE_MS / 1e3
    layout: str = "engine"
    trace: str | None = None
    complaints: tuple[str, ...] = ()

    @classmethod
    def read(cls, extra: Mapping[str, Any] | None) -> "Options":
        """Options from `kv_connector_extra_config`; what is wrong in it is complained of and left out."""
        given = {k.removeprefix("kvferry."): v for k, v in (extra or {}).items() if str(k).startswith("kvferry.")}
        complaints = [
            f"unknown setting kvferry.{name}; known are {', '.join('kvferry.' + known for known in NAMES)}"
            for name in given
            if name not in NAMES
        ]
        store = _choice("store", given, STORES, complaints)
        layout = _choice("layout", given, LAYOUTS, complaints)
        try:
            patience_ms = float(given.get("patience_ms", PATIENCE_MS))
            if not 0 <= patience_ms <= 60_000:
                raise ValueError
        except (TypeError, ValueError):
            complaints.append(
                f"kvferry.patience_ms is {given['patience_ms']!r}; it may be 0 to 60000: taking {PATIENCE_MS:g}"
            )
            patience_ms = PATIENCE_MS
        return cls(
            run_dir=str(given["run_dir"]) if given.get("run_dir") else None,
            salt=str(given.get("salt", "")).encode(),
            store=store,
            patience_s=patience_ms / 1e3,
            layout=layout,
            trace=str(given["trace"]) if given.get("trace") else None,
            complaints=tuple(complaints),
        )


def _choice(name: str, given: Mapping[str, Any], allowed: tuple[str, ...], complaints: list[str]) -> str:
    """One of a few words, the first if none or another was given."""
    word = str(given.get(name, allowed[0]))
    if word in allowed:
        return word
    complaints.append(f"kvferry.{name} is {word!r}; it may be {' or '.join(map(repr, allowed))}: taking {allowed[0]!r}")
    return allowed[0]


def why_off(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """Why caching must stay off for this engine, in one line; None if it can be served.

    Both halves of an engine come to the same answer: nothing here depends on a rank.
    """
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    if transfer.kv_role != "kv_both":
        return f"kv_role is {transfer.kv_role!r}: kvferry stores and loads; start the engine with kv_role='kv_both'"
    if kv_cache_config is None:
        return "the engine told no kv_cache_config"
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return f"the model has {len(groups)} KV cache groups; only models with one are served yet"
    spec = groups[0].kv_cache_spec
    kinds = {type(one).__name__ for one in getattr(spec, "kv_cache_specs", {0: spec}).values()}
    if not kinds <= {"FullAttentionSpec", "MLAAttentionSpec"}:
        return f"the model's KV cache is {', '.join(sorted(kinds))}; only full attention and MLA are served yet"
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            return f"{name} is {getattr(parallel, name)}; only 1 is served yet"
    if getattr(kv_cache_config, "needs_kv_cache_zeroing", False) and getattr(vllm_config, "use_v2_model_runner", False):
        # It launches the zeroing of a step's new blocks before any hook of ours: a store that still reads one of
        # them could not be revoked in time, and would be kept with zeros in it.
        return "this vLLM zeroes new blocks before connectors hear of them; start it with VLLM_USE_V2_MODEL_RUNNER=0"
    if getattr(vllm_config.model_config, "enable_sleep_mode", False) and device_of(vllm_config) != "cpu":
        return "sleep mode unmaps the KV cache, which no connector is told of; start the engine without it"
    return None


def device_of(vllm_config: Any) -> str:
    """Type of the device that the engine computes on."""
    return str(getattr(vllm_config.device_config, "device_type", "cpu"))
