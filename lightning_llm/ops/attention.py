"""Causal attention of short sequences on a CPU, in blocks of queries, with batched matmuls.

For queries Q, keys K and values V of one head, (seq, head_dim) each, with scores S = Q Kᵀ / √head_dim, probabilities
P = softmax(S + mask) and O = P V (Vaswani et al. 2017, equation 1), the gradients of a loss with dO given are

    dV = Pᵀ dO,    dP = dO Vᵀ,    dS = P ⊙ (dP - rowsum(dP ⊙ P)),    dQ = dS K / √head_dim,    dK = dSᵀ Q / √head_dim

P is saved for backward, except where the mask hides a whole block: up to (batch, heads, seq, seq), which is why this is
for short sequences. Scores exist for some heads and one block of queries at a time.

The built-in ``scaled_dot_product_attention`` saves O(seq) numbers per head where this saves P, but its backward in bf16
on a CPU is slow: at 32 × 3 heads × 64 × 64 it took 6.6 ms where this takes 0.6 (AMD Zen 5, 2 cores, torch 2.13).
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lightning_llm.ops import sizes, traced
from lightning_llm.ops.autograd import autograd_function, custom_op


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Computes ``scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)``.

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
    flat = [x.reshape(-1, *query.shape[-2:]) for x in (query, key, value)]
    out = _operator(*flat)[0] if torch.compiler.is_compiling() else _function(*flat)
    return out.view(query.shape)


def _forward(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """The result and, for each block of queries, the probabilities (heads, queries, visible keys).

    Inputs and result are (heads, seq, head_dim), with the heads of all rows.
    """
    heads, seq, head_dim = query.shape
    mask = _triangle(seq, query.dtype, query.device, traced.current())
    tile = _tile(query)
    out, *probabilities = _empty_results(query, key, value)
    with torch.autocast(query.device.type, enabled=False):
        for head_slice in sizes.slices(heads, tile.shape[0]):
            for (start, end), saved in zip(sizes.attention_blocks(seq), probabilities, strict=True):
                p = saved[head_slice]
                q = query[head_slice, start:end]
                k = key[head_slice, :end]
                scores = part_of(tile, p.shape)
                block_mask = mask[:, start:end, :end].expand(p.shape)
                torch.baddbmm(block_mask, q, k.mT, alpha=head_dim**-0.5, out=scores)
                torch.softmax(scores, dim=-1, out=p)
                torch.bmm(p, value[head_slice, :end], out=out[head_slice, start:end])
    return [out, *probabilities]


def _backward(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, probabilities: Sequence[Tensor]
) -> list[Tensor]:
    """The gradients of queries, keys and values, each (heads, seq, head_dim), from what forward took and saved."""
    heads, seq, head_dim = query.shape
    d_query, d_key, d_value = map(torch.empty_like, (query, key, value))
    tile = _tile(query)
    blocks = [*zip(sizes.attention_blocks(seq), probabilities, strict=True)][::-1]  # the last one has all the keys
    for head_slice in sizes.slices(heads, tile.shape[0]):
        for (start, end), saved in blocks:
            p = saved[head_slice]
            q = query[head_slice, start:end]
            d = d_out[head_slice, start:end]
            d_scores = torch.bmm(d, value[head_slice, :end].mT, out=part_of(tile, p.shape))
            torch.ops.aten._softmax_backward_data.out(d_scores, p, -1, d_scores.dtype, grad_input=d_scores)
            d_query[head_slice, start:end] = d_scores @ key[head_slice, :end]
            for total, left, right in ((d_value, p, d), (d_key, d_scores, q)):
                if end == seq:
                    torch.bmm(left.mT, right, out=total[head_slice])
                else:
                    total[head_slice, :end] += left.mT @ right
        for grad in (d_query, d_key):
            grad[head_slice] *= head_dim**-0.5
    return [d_query, d_key, d_value]


def _tile(query: Tensor) -> Tensor:
    """A buffer for the scores of some heads and one block of queries: (heads at once, elements)."""
    heads, seq = query.shape[:2]
    heads_at_once = sizes.attention_heads(heads, seq, query.dtype.itemsize)
    return query.new_empty(heads_at_once, sizes.even(seq, sizes.ATTENTION_ROWS) * seq)


def part_of(tile: Tensor, shape: torch.Size) -> Tensor:
    """A view of the first numbers of a buffer, in this shape."""
    return tile.view(-1)[: shape.numel()].view(shape)


@lru_cache(maxsize=8)
def _triangle(seq: int, dtype: torch.dtype, device: torch.device, trace: traced.TraceContext | None) -> Tensor:
    """(1, seq, seq): 0 for visible positions, minus infinity above the diagonal; each trace has its own."""
    return torch.full((1, seq, seq), float("-inf"), dtype=dtype, device=device).triu(1)


def _empty_results(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    heads, seq, _ = query.shape
    blocks = sizes.attention_blocks(seq)
    return [torch.empty_like(query), *(query.new_empty(heads, end - start, end) for start, end in blocks)]


def empty_gradients(d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> list[Tensor]:
    """Empty gradients of queries, keys and values."""
    return [torch.empty_like(x) for x in (query, key, value)]


def _gradients(ctx: Any, grads: list[Tensor], run: Callable[..., list[Tensor]] | None = None) -> tuple[Tensor, ...]:
    query, key, value, *probabilities = ctx.saved_tensors
    return tuple((run or _operator_backward)(grads[0], query, key, value, probabilities))


_INPUTS = "Tensor query, Tensor key, Tensor value"
_function = autograd_function("_CausalAttention", _forward, _gradients, _backward)
_operator = custom_op("causal_attention", _INPUTS, _forward, _empty_results, gradients=_gradients)
_operator_backward = custom_op(
    "causal_attention_backward", f"Tensor d_out, {_INPUTS}, Tensor[] probabilities", _backward, empty_gradients
)
