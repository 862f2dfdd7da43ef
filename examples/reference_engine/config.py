"""Sizes of the reference engine: one frozen value for the model, one for the engine around it."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A small Llama: every number that a checkpoint's config.json would give.

    The weights come from `seed`. There is no checkpoint: the engine is about KV, not about prose.
    """

    vocab: int = 1024
    hidden: int = 256
    layers: int = 6
    heads: int = 8  # query heads
    kv_heads: int = 4  # GQA: `heads // kv_heads` query heads share one
    head_dim: int = 32
    ffn: int = 768
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    seed: int = 7

    def check(self, tp: int) -> None:
        """ValueError naming the numbers if the heads cannot be shared out over `tp` ranks."""
        for name, count in (("kv_heads", self.kv_heads), ("heads", self.heads), ("ffn", self.ffn)):
            if count % tp:
                raise ValueError(f"{name} = {count} cannot be split over {tp} ranks")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads = {self.heads} is no multiple of kv_heads = {self.kv_heads}")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine around the model."""

    model: ModelConfig = ModelConfig()
    tp: int = 2  # tensor parallel: one process per rank
    block_tokens: int = 16  # tokens whose KV one block holds
    num_blocks: int = 256  # the whole KV budget of each rank, in blocks
    chunk_tokens: int = 512  # prompt tokens computed in one step, over all requests
    max_running: int = 8  # requests that hold blocks at one time


@dataclass(frozen=True, slots=True)
class KvferryConfig:
    """How to reach the sidecar. `run_dir` None: the default one, where `kvferry up` is found without flags."""

    engine_id: str
    run_dir: Path | None = None
    attach_timeout_s: float = 5.0
    patience_s: float = 0.020  # how long a request may wait for a lookup's answer before it is a miss
