"""The decoder: RMSNorm, RoPE, grouped-query attention over a paged KV cache, SwiGLU. One rank's share of it.

    tokens ── embed ──▶ x
    each layer:         x += all-reduce( norm, q k v, RoPE, write KV, attend over the block table, o )
                        x += all-reduce( norm, gate up, SwiGLU, down )
    x ── norm, head ──▶ logits of the last token

Each rank holds `heads / tp` heads and `ffn / tp` columns; embedding and head are on every rank. It knows
nothing of requests, of prefix caching and of kvferry.

Arithmetic is float64 while the KV cache is float32. A prompt is computed in other pieces when part of its KV
comes from a cache, and sums in another order differ in their last bits. In float32 that flips a greedy token
once in some ten thousand; in float64 never in practice, so a token that differs means wrong KV and nothing else.

The weights have real spread (attention scores with a standard deviation near 3): each token looks at a few others
and not at the mean of all, so one wrong block changes the answer. `tests/examples` holds a control that proves it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reference_engine.config import ModelConfig

MATH = torch.float64
CACHE = torch.float32

# Sums one tensor over all ranks, in place of a collective library. Identity for one rank.
AllReduce = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One rank's share of one layer; shapes are (out, in)."""

    q: Tensor  # (heads/tp * head_dim, hidden)
    k: Tensor  # (kv_heads/tp * head_dim, hidden)
    v: Tensor  # (kv_heads/tp * head_dim, hidden)
    o: Tensor  # (hidden, heads/tp * head_dim)
    gate: Tensor  # (ffn/tp, hidden)
    up: Tensor  # (ffn/tp, hidden)
    down: Tensor  # (hidden, ffn/tp)


@dataclass(frozen=True, slots=True)
class Weights:
    """One rank's share of the model."""

    embed: Tensor  # (vocab, hidden)
    layers: tuple[LayerWeights, ...]
    head: Tensor  # (vocab, hidden)


def make_weights(config: ModelConfig, rank: int, tp: int) -> Weights:
    """The seeded weights of `rank`: every rank draws the whole model and keeps its share."""
    config.check(tp)
    draw = torch.Generator().manual_seed(config.seed)
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=draw, dtype=MATH).mul_(gain / math.sqrt(columns))

    def rows(whole: Tensor) -> Tensor:
        return whole.chunk(tp, dim=0)[rank].contiguous()

    def columns(whole: Tensor) -> Tensor:
        return whole.chunk(tp, dim=1)[rank].contiguous()

    embed = torch.randn(config.vocab, config.hidden, generator=draw, dtype=MATH)
    layers = tuple(
        LayerWeights(
            # 1.7 * 1.7 is the spread of the attention scores: see the module's docstring.
            q=rows(matrix(q_rows, config.hidden, gain=1.7)),
            k=rows(matrix(kv_rows, config.hidden, gain=1.7)),
            v=rows(matrix(kv_rows, config.hidden)),
            o=columns(matrix(config.hidden, q_rows)),
            gate=rows(matrix(config.ffn, config.hidden)),
            up=rows(matrix(config.ffn, config.hidden)),
            down=columns(matrix(config.hidden, config.ffn)),
        )
        for _ in range(config.layers)
    )
    return Weights(embed, layers, matrix(config.vocab, config.hidden))


def make_cache(config: ModelConfig, tp: int, num_blocks: int, block_tokens: int) -> dict[str, Tensor]:
    """An empty paged KV cache: per layer a view (blocks, kv_heads/tp, tokens, 2 * head_dim) of ONE tensor.

    K and V of a token lie side by side, so one block of one layer is one contiguous run.
    """
    shape = (config.layers, num_blocks, config.kv_heads // tp, block_tokens, 2 * config.head_dim)
    whole = torch.zeros(shape, dtype=CACHE)
    return {f"layers.{i}": whole[i] for i in range(config.layers)}


class Decoder:
    """One rank's share of the model, over its own paged KV cache."""

    def __init__(
        self, config: ModelConfig, weights: Weights, cache: Sequence[Tensor], all_reduce: AllReduce = lambda x: x
    ) -> None:
        self.config = config
        self.weights = weights
        self.cache = cache  # per layer (blocks, kv_heads/tp, tokens, 2 * head_dim)
        self.all_reduce = all_reduce
        half = config.head_dim // 2
        self._frequencies = config.rope_theta ** (-torch.arange(half, dtype=MATH) / half)  # (head_dim/2,)

    @torch.inference_mode()
    def forward(self, tokens: Sequence[int], start: int, blocks: Sequence[int]) -> Tensor:
        """Compute tokens [start, start + n) of one request, whose KV lies in `blocks` in order; logits (vocab,).

        The KV of tokens [0, start) must be in the blocks; that of the new tokens is written there.
        """
        positions = torch.arange(start, start + len(tokens))
        table = torch.tensor(blocks)
        angles = positions.to(MATH)[:, None] * self._frequencies  # (n, head_dim/2)
        turn = torch.polar(torch.ones_like(angles), angles)[:, None, :]  # (n, 1, head_dim/2), complex
        x = self.weights.embed[torch.tensor(tokens)]
        for layer, cache in zip(self.weights.layers, self.cache, strict=True):
            x = x + self.all_reduce(self._attention(layer, cache, self._norm(x), positions, table, turn))
            x = x + self.all_reduce(self._mlp(layer, self._norm(x)))
        return self.weights.head @ self._norm(x[-1])

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config.norm_eps)

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        return (torch.nn.functional.silu(x @ layer.gate.T) * (x @ layer.up.T)) @ layer.down.T

    def _attention(
        self, layer: LayerWeights, cache: Tensor, x: Tensor, positions: Tensor, table: Tensor, turn: Tensor
    ) -> Tensor:
        n, dim = len(x), self.config.head_dim
        q = _rotate((x @ layer.q.T).view(n, -1, dim), turn)
        k = _rotate((x @ layer.k.T).view(n, -1, dim), turn)
        v = (x @ layer.v.T).view(n, -1, dim)
        write_kv(cache, table, positions, torch.cat((k, v), dim=-1))
        keys, values = read_kv(cache, table, int(positions[-1]) + 1)
        return attend(q, keys, values, positions).reshape(n, -1) @ layer.o.T


def _rotate(x: Tensor, turn: Tensor) -> Tensor:
    """RoPE: x (n, heads, dim) with each pair of channels turned by its token's angle."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(-2)


def write_kv(cache: Tensor, table: Tensor, positions: Tensor, kv: Tensor) -> None:
    """Put kv (n, kv_heads, 2 * dim) of tokens at `positions` into the blocks of `table`."""
    block_tokens = cache.shape[2]
    cache[table[positions // block_tokens], :, positions % block_tokens] = kv.to(cache.dtype)


def read_kv(cache: Tensor, table: Tensor, end: int) -> tuple[Tensor, Tensor]:
    """K and V, each (kv_heads, end, dim), of tokens [0, end), gathered by the block table."""
    _, heads, block_tokens, width = cache.shape
    pages = cache[table[: -(-end // block_tokens)]]  # (pages, kv_heads, tokens, 2 * dim)
    kv = pages.transpose(0, 1).reshape(heads, -1, width)[:, :end].to(MATH)
    return kv[..., : width // 2], kv[..., width // 2 :]


def attend(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """Causal grouped-query attention: q (n, heads, dim) over keys and values (kv_heads, end, dim); (n, heads, dim)."""
    n, heads, dim = q.shape
    kv_heads, end, _ = keys.shape
    grouped = q.view(n, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)  # (kv_heads, share, n, dim)
    scores = grouped @ keys[:, None].transpose(-1, -2) / math.sqrt(dim)  # (kv_heads, share, n, end)
    if n > 1:
        scores.masked_fill_(torch.arange(end) > positions[:, None], float("-inf"))
    return (scores.softmax(-1) @ values[:, None]).permute(2, 0, 1, 3).reshape(n, heads, dim)
