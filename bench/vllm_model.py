"""A small Llama with seeded weights of ordinary spread, written to disk: no download, and the KV cache matters.

vLLM's own dummy weights are near 1e-3, so an answer hardly depends on the cache and wrong bytes pass
unnoticed. Here queries and keys are wide enough that attention is peaked (a score's deviation is about
`sharpness`), and the attention's output is as large as the stream it is added to.

    KV bytes of a token = layers * 2 * kv_heads * head_dim * 4 (float32)
    the default: 6 * 2 * 4 * 32 * 4 = 6144; 4096 tokens are 24 MiB
"""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of the model; two shapes differ in their KV geometry if these do."""

    hidden: int = 256
    layers: int = 6
    heads: int = 8
    kv_heads: int = 4
    intermediate: int = 1024
    vocabulary: int = 2048
    positions: int = 8192
    sharpness: float = 2.5
    seed: int = 7

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of KV of one token over all layers and KV heads, float32."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 4


def write_model(folder: Path, shape: ModelShape = ModelShape()) -> Path:
    """Write `config.json` and `model.safetensors` into `folder` unless they are there; the folder."""
    marker = json.dumps({name: getattr(shape, name) for name in ModelShape.__slots__}, sort_keys=True)
    if (folder / "shape.json").exists() and (folder / "shape.json").read_text() == marker:
        return folder
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    rng = torch.Generator().manual_seed(shape.seed)

    def normal(rows: int, columns: int, std: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=rng) * std

    h, kv = shape.hidden, shape.kv_heads * shape.head_dim
    # The norms make every layer's input unit-sized, so a weight's deviation sets its output's directly:
    # q and k of deviation sqrt(sharpness) give scores q.k/sqrt(head_dim) of deviation `sharpness`.
    unit, sharp = h**-0.5, (shape.sharpness**0.5) * h**-0.5
    tensors = {
        "model.embed_tokens.weight": normal(shape.vocabulary, h, 1.0),
        "model.norm.weight": torch.ones(h),
        "lm_head.weight": normal(shape.vocabulary, h, 2 * unit),
    }
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        tensors |= {
            at + "input_layernorm.weight": torch.ones(h),
            at + "post_attention_layernorm.weight": torch.ones(h),
            at + "self_attn.q_proj.weight": normal(h, h, sharp),
            at + "self_attn.k_proj.weight": normal(kv, h, sharp),
            at + "self_attn.v_proj.weight": normal(kv, h, unit),
            at + "self_attn.o_proj.weight": normal(h, h, 2 * unit),
            at + "mlp.gate_proj.weight": normal(shape.intermediate, h, unit),
            at + "mlp.up_proj.weight": normal(shape.intermediate, h, unit),
            at + "mlp.down_proj.weight": normal(h, shape.intermediate, shape.intermediate**-0.5),
        }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": h,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "shape.json").write_text(marker)
    return folder


def write_mla_model(folder: Path, seed: int = 7) -> Path:
    """A small model of DeepSeek's kind, seeded weights; the folder. MLA: one latent of 576 values a token and layer."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    rng = torch.Generator().manual_seed(seed)
    h, layers, heads, latent, rope, nope, inner, vocabulary = 256, 2, 4, 512, 64, 128, 512, 2048

    def normal(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=rng) * gain * columns**-0.5

    tensors = {
        "model.embed_tokens.weight": torch.randn(vocabulary, h, generator=rng),
        "model.norm.weight": torch.ones(h),
        "lm_head.weight": normal(vocabulary, h, 2.0),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}."
        tensors |= {
            at + "input_layernorm.weight": torch.ones(h),
            at + "post_attention_layernorm.weight": torch.ones(h),
            at + "self_attn.q_proj.weight": normal(heads * (nope + rope), h, 1.6),
            at + "self_attn.kv_a_proj_with_mqa.weight": normal(latent + rope, h, 1.6),
            at + "self_attn.kv_a_layernorm.weight": torch.ones(latent),
            at + "self_attn.kv_b_proj.weight": normal(heads * 2 * nope, latent, 1.6),
            at + "self_attn.o_proj.weight": normal(h, heads * nope, 2.0),
            at + "mlp.gate_proj.weight": normal(inner, h),
            at + "mlp.up_proj.weight": normal(inner, h),
            at + "mlp.down_proj.weight": normal(h, inner),
        }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": h,
        "intermediate_size": inner,
        "moe_intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": latent,
        "q_lora_rank": None,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": nope,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": layers,
        "moe_layer_freq": 1,
        "num_experts_per_tok": 2,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "routed_scaling_factor": 1.0,
        "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder
