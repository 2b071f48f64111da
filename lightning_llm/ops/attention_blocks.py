"""Causal attention on a CPU in blocks of queries: forward and backward without autograd, by batched matrix products.

For queries Q, keys K and values V of one head, (seq, head_dim) each, with scores S = Q Kᵀ / √head_dim, probabilities
P = softmax(S + mask) and O = P V (Vaswani et al. 2017, equation 1), the gradients of a loss with dO given are

    dV = Pᵀ dO,    dP = dO Vᵀ,    dS = P ⊙ (dP - rowsum(dP ⊙ P)),    dQ = dS K / √head_dim,    dK = dSᵀ Q / √head_dim

P is kept for backward, but for what lies behind the mask of a whole block of queries: up to (batch, heads, seq, seq),
which is why this is for short sequences. Scores exist for some heads and one block of queries at a time.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from lightning_llm.ops import sizes


def attention_forward(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The result and the probabilities.

    Args:
        query: (heads, seq, head_dim), the heads of all rows.
        key: As ``query``.
        value: As ``query``.

    Returns:
        (heads, seq, head_dim), and for each block of queries (heads, queries, keys that they may look at).
    """
    heads, seq, head_dim = query.shape
    mask = _triangle(seq, query.dtype, query.device)
    blocks = sizes.attention_blocks(seq)
    probabilities = [query.new_empty(shape) for shape in kept_shapes(query)]
    out = torch.empty_like(query)
    tile = _tile(query)
    with torch.autocast(query.device.type, enabled=False):
        for some in sizes.slices(heads, tile.shape[0]):
            for (start, end), kept in zip(blocks, probabilities, strict=True):
                p, here = kept[some], slice(start, end)
                scores, unseen = _part(tile, p.shape), mask[:, here, :end].expand(p.shape)
                torch.baddbmm(unseen, query[some, here], key[some, :end].mT, alpha=head_dim**-0.5, out=scores)
                torch.softmax(scores, dim=-1, out=p)
                torch.bmm(p, value[some, :end], out=out[some, here])
    return out, probabilities


def kept_shapes(query: Tensor) -> list[tuple[int, int, int]]:
    """Shapes of the probabilities for queries (heads, seq, head_dim)."""
    heads, seq, _ = query.shape
    return [(heads, end - start, end) for start, end in sizes.attention_blocks(seq)]


def attention_backward(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, probabilities: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values, each (heads, seq, head_dim), from what forward was given and kept."""
    heads, seq, head_dim = query.shape
    d_query, d_key, d_value = (torch.empty_like(x) for x in (query, key, value))
    tile = _tile(query)
    blocks = [*zip(sizes.attention_blocks(seq), probabilities, strict=True)][::-1]  # the last one has all the keys
    for some in sizes.slices(heads, tile.shape[0]):
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


@lru_cache(maxsize=8)
def _triangle(seq: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(1, seq, seq): 0 where a position may look, minus infinity above the diagonal."""
    return torch.full((1, seq, seq), float("-inf"), dtype=dtype, device=device).triu(1)
