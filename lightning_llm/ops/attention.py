"""Causal attention of short sequences on a CPU: batched matrix products, forward and backward, in one Function.

For queries Q, keys K and values V of one head, (seq, head_dim) each, with scores S = Q Kᵀ / √head_dim, probabilities
P = softmax(S + mask) and O = P V (Vaswani et al. 2017, equation 1), the gradients of a loss with dO given are

    dV = Pᵀ dO,    dP = dO Vᵀ,    dS = P ⊙ (dP - rowsum(dP ⊙ P)),    dQ = dS K / √head_dim,    dK = dSᵀ Q / √head_dim

P is kept for backward, but for what lies behind the mask of a whole block of queries: up to (batch, heads, seq, seq),
which is why this is for short sequences. Scores exist for some heads and one block of queries at a time. The built-in
``scaled_dot_product_attention`` keeps O(seq) but its backward in bf16 on a CPU is slow: at 32 × 3 heads × 64 × 64
it took 6.6 ms where this takes 0.6 (AMD Zen 5, 2 cores, torch 2.13).
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lightning_llm.ops import sizes


def is_worth_it(query: Tensor) -> bool:
    """Whether :func:`causal_attention` is the faster way: training on a CPU, at a short context, not compiled."""
    if torch.compiler.is_compiling():
        return False
    return query.device.type == "cpu" and query.requires_grad and query.shape[-2] <= sizes.LONGEST_SHORT_ATTENTION


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """What ``scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)`` gives.

    Args:
        query: (batch, heads, seq, head_dim).
        key: (batch, kv_heads, seq, head_dim); ``heads`` is a multiple of ``kv_heads``.
        value: As ``key``.

    Returns:
        (batch, heads, seq, head_dim).
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    shape = query.shape
    out: Tensor = _CausalAttention.apply(*(x.reshape(-1, *shape[-2:]) for x in (query, key, value)))  # type: ignore[no-untyped-call]
    return out.view(shape)


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads, seq, head_dim = query.shape
        mask = _triangle(seq, query.dtype, query.device)
        blocks = sizes.attention_blocks(seq)
        probabilities = [query.new_empty(heads, end - start, end) for start, end in blocks]
        out = torch.empty_like(query)
        tile = _tile(query)
        with torch.autocast(query.device.type, enabled=False):
            for some in _slices(heads, tile.shape[0]):
                for (start, end), kept in zip(blocks, probabilities, strict=True):
                    p, here = kept[some], slice(start, end)
                    scores, unseen = _part(tile, p.shape), mask[:, here, :end].expand(p.shape)
                    torch.baddbmm(unseen, query[some, here], key[some, :end].mT, alpha=head_dim**-0.5, out=scores)
                    torch.softmax(scores, dim=-1, out=p)
                    torch.bmm(p, value[some, :end], out=out[some, here])
        ctx.save_for_backward(query, key, value, *probabilities)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, *probabilities = ctx.saved_tensors
        heads, seq, head_dim = query.shape
        d_query, d_key, d_value = (torch.empty_like(x) for x in (query, key, value))
        tile = _tile(query)
        blocks = [*zip(sizes.attention_blocks(seq), probabilities, strict=True)][::-1]  # the last one has all the keys
        for some in _slices(heads, tile.shape[0]):
            for (start, end), kept in blocks:
                p, q, d = kept[some], query[some, start:end], d_out[some, start:end]
                k, v, here = key[some, :end], value[some, :end], slice(start, end)
                d_scores = torch.bmm(d, v.mT, out=_part(tile, p.shape))
                torch.ops.aten._softmax_backward_data.out(d_scores, p, -1, d_scores.dtype, grad_input=d_scores)
                d_query[some, here] = d_scores @ k
                for total, left, right in ((d_value, p, d), (d_key, d_scores, q)):
                    if end == seq:
                        torch.bmm(left.mT, right, out=total[some])
                    else:
                        total[some, :end] += left.mT @ right
            for grad in (d_query, d_key):
                grad[some] *= head_dim**-0.5
        return d_query, d_key, d_value


def _tile(query: Tensor) -> Tensor:
    """A buffer for the scores of some heads and one block of queries: (some, elements)."""
    heads, seq = query.shape[:2]
    some = sizes.attention_heads(heads, seq, query.dtype.itemsize)
    return query.new_empty(some, sizes.even(seq, sizes.ATTENTION_ROWS) * seq)


def _part(tile: Tensor, shape: torch.Size) -> Tensor:
    return tile.view(-1)[: shape.numel()].view(shape)


def _slices(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


@lru_cache(maxsize=8)
def _triangle(seq: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(1, seq, seq): 0 where a position may look, minus infinity above the diagonal."""
    return torch.full((1, seq, seq), float("-inf"), dtype=dtype, device=device).triu(1)
