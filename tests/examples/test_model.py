"""The decoder against a plain dense one, its ranks against the whole, and the control that wrong KV shows."""

import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from reference_engine.config import ModelConfig
from reference_engine.model import Decoder, Weights, make_cache, make_weights
from torch import Tensor

TINY = ModelConfig(vocab=97, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48, seed=3)
BLOCK_TOKENS, NUM_BLOCKS = 4, 32


def prompt(count: int, seed: int = 0) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(TINY.vocab, (count,), generator=draw).tolist()


def decoder(config: ModelConfig = TINY) -> Decoder:
    return Decoder(config, make_weights(config, 0, 1), list(make_cache(config, 1, NUM_BLOCKS, BLOCK_TOKENS).values()))


def dense_logits(config: ModelConfig, weights: Weights, tokens: Sequence[int]) -> Tensor:
    """The same mathematics the long way: all tokens at once, no cache, one head and one token at a time."""

    def norm(x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt()

    def rope(vector: Tensor, position: int) -> Tensor:
        out = vector.clone()
        for i in range(config.head_dim // 2):
            angle = torch.tensor(position * config.rope_theta ** (-i / (config.head_dim // 2)), dtype=torch.float64)
            a, b = vector[2 * i], vector[2 * i + 1]
            out[2 * i] = a * angle.cos() - b * angle.sin()
            out[2 * i + 1] = a * angle.sin() + b * angle.cos()
        return out

    x = weights.embed[list(tokens)]
    for layer in weights.layers:
        h, dim = norm(x), config.head_dim
        mixed = torch.zeros(len(tokens), config.heads * dim, dtype=torch.float64)
        for head in range(config.heads):
            kv_head = head // (config.heads // config.kv_heads)
            q = (h @ layer.q.T)[:, head * dim : (head + 1) * dim]
            k = (h @ layer.k.T)[:, kv_head * dim : (kv_head + 1) * dim]
            v = (h @ layer.v.T)[:, kv_head * dim : (kv_head + 1) * dim].float().double()  # as the cache rounds it
            k = torch.stack([rope(k[i], i) for i in range(len(tokens))]).float().double()
            for i in range(len(tokens)):
                weight = (k[: i + 1] @ rope(q[i], i) / dim**0.5).softmax(0)
                mixed[i, head * dim : (head + 1) * dim] = weight @ v[: i + 1]
        x = x + mixed @ layer.o.T
        h = norm(x)
        gate = h @ layer.gate.T
        x = x + (gate * gate.sigmoid() * (h @ layer.up.T)) @ layer.down.T
    return weights.head @ norm(x[-1])


def on_two_ranks(run: Callable[[Decoder], Tensor]) -> list[Tensor]:
    """Run the same on both ranks of TP 2, each in a thread, with a sum over the two."""
    barrier = threading.Barrier(2, timeout=30)
    parts: list[Tensor | None] = [None, None]
    results: list[Tensor | None] = [None, None]

    def rank_main(rank: int) -> None:
        def all_reduce(part: Tensor) -> Tensor:
            parts[rank] = part
            barrier.wait()
            total = parts[0] + parts[1]
            barrier.wait()
            return total

        cache = list(make_cache(TINY, 2, NUM_BLOCKS, BLOCK_TOKENS).values())
        results[rank] = run(Decoder(TINY, make_weights(TINY, rank, 2), cache, all_reduce))

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [result for result in results if result is not None]


@pytest.mark.parametrize("count", [1, 3, 4, 21])
def test_paged_attention_equals_dense_attention(count: int) -> None:
    tokens = prompt(count)
    blocks = [9, 3, 17, 30, 1, 2][: -(-count // BLOCK_TOKENS)]
    torch.testing.assert_close(
        decoder().forward(tokens, 0, blocks), dense_logits(TINY, make_weights(TINY, 0, 1), tokens)
    )


@pytest.mark.parametrize("cut", [1, 4, 7, 20])
def test_a_prompt_in_two_chunks_gives_the_logits_of_one(cut: int) -> None:
    tokens, blocks = prompt(21), [5, 4, 31, 0, 2, 7]
    whole = decoder().forward(tokens, 0, blocks)
    pieces = decoder()
    pieces.forward(tokens[:cut], 0, blocks)
    # Far below any gap between the two best tokens, far above what float32 rounding of KV could leave.
    torch.testing.assert_close(pieces.forward(tokens[cut:], cut, blocks), whole, rtol=1e-6, atol=1e-6)


def test_two_ranks_give_the_logits_of_one() -> None:
    tokens, blocks = prompt(21), [5, 4, 31, 0, 2, 7]
    ranks = on_two_ranks(lambda one: one.forward(tokens, 0, blocks))
    assert torch.equal(ranks[0], ranks[1])
    torch.testing.assert_close(ranks[0], decoder().forward(tokens, 0, blocks), rtol=1e-6, atol=1e-6)


def test_the_cache_is_one_storage_and_each_layer_a_view_of_it() -> None:
    views = list(make_cache(TINY, 2, NUM_BLOCKS, BLOCK_TOKENS).values())
    assert {view.untyped_storage().data_ptr() for view in views} == {views[0].untyped_storage().data_ptr()}
    assert views[0].shape == (NUM_BLOCKS, TINY.kv_heads // 2, BLOCK_TOKENS, 2 * TINY.head_dim)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "block_tokens"), [(TINY, 4), (ModelConfig(), 16)], ids=["tiny", "demo"])
def test_a_wrong_block_changes_the_answer(config: ModelConfig, block_tokens: int) -> None:
    """Control: comparing tokens notices any one block of a prompt that holds another block's KV."""
    tokens = [token % config.vocab for token in range(5, 5 + 37 * 16 * block_tokens, 37)]
    cache = list(make_cache(config, 1, 24, block_tokens).values())
    one = Decoder(config, make_weights(config, 0, 1), cache)
    blocks = list(range(24))
    one.forward(tokens[:-1], 0, blocks)
    kept = [layer.clone() for layer in cache]

    def answer(spoilt: int | None) -> list[int]:
        for layer, right in zip(cache, kept, strict=True):
            layer.copy_(right)
            if spoilt is not None:
                layer[spoilt] = right[(spoilt + 1) % 15]
        out = tokens[-1:]
        for step in range(16):
            out.append(int(one.forward(out[-1:], len(tokens) - 1 + step, blocks).argmax()))
        return out

    right = answer(None)
    assert answer(None) == right
    unnoticed = [block for block in range(15) if answer(block) == right]
    assert not unnoticed
