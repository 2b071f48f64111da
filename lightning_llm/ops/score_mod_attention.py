"""Causal attention whose scores a function changes before softmax, such as a cap or a bias.

No kernel of torch computes it for any function, so the queries go through in blocks, in plain operators. A block is
computed again in backward: what is saved are queries, keys and values, and no tensor grows with the square of the
sequence, except under ``torch.compile``, which saves what it chooses.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_llm.ops import sizes

ScoreMod = Callable[[Tensor, slice, slice], Tensor]


def score_mod_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod = lambda scores, queries, keys: scores,
    *,
    window: int | None = None,
    span_start: Tensor | None = None,
    visible: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of every query to itself and the keys before it, or to those that ``visible`` tells.

    Args:
        query: (batch, heads, seq, head_dim).
        key: (batch, kv_heads, keys, head_dim); ``heads`` is a multiple of ``kv_heads``. The last ``seq`` of them are at
            the positions of the queries.
        value: As ``key``.
        score_mod: From the scores of a block, (batch, heads, queries, keys) in float32 at least, and the slices of its
            queries and keys in those that are given here, to new scores.
        window: A query sees so many keys at most, the last ones.
        span_start: (batch, seq), the first key that each query sees.
        visible: True where a query sees a key, (seq, keys) with leading dimensions, instead of all of these.
        dropout: Of the weights.

    Returns:
        (batch, heads, seq, head_dim).
    """
    seq = query.shape[2]
    earlier = key.shape[2] - query.shape[2]

    def block(query: Tensor, key: Tensor, value: Tensor, queries: slice, keys: slice) -> Tensor:
        scores = score_mod(_grouped(query, key.mT).to(wide) * query.shape[-1] ** -0.5, queries, keys)
        scores = scores.masked_fill(~visible_keys(queries, keys), float("-inf"))
        weights = F.dropout(scores.softmax(dim=-1), dropout).to(value.dtype)
        return _grouped(weights, value)

    def visible_keys(queries: slice, keys: slice) -> Tensor:
        if visible is not None:
            return visible[..., queries, keys]
        key_position = torch.arange(keys.start, keys.stop, device=query.device)
        position = torch.arange(earlier + queries.start, earlier + queries.stop, device=query.device)[:, None]
        is_visible = key_position <= position
        if window is not None:
            is_visible = is_visible & (key_position > position - window)
        return is_visible if span_start is None else is_visible & (key_position >= span_start[:, None, queries, None])

    wide = torch.promote_types(query.dtype, torch.float32)
    parts = []
    is_saving = torch.is_grad_enabled() and query.requires_grad and not torch.compiler.is_compiling()
    for start, end in sizes.attention_blocks(seq):
        first_key = 0 if window is None or visible is not None else max(0, earlier + start + 1 - window)
        queries = slice(start, end)
        keys = slice(first_key, key.shape[2] if visible is not None else earlier + end)
        inputs = query[:, :, queries], key[:, :, keys], value[:, :, keys], queries, keys
        parts.append(checkpoint(block, *inputs, use_reentrant=False) if is_saving else block(*inputs))
    return torch.cat(parts, dim=2)


def _grouped(left: Tensor, right: Tensor) -> Tensor:
    """A matmul for each query head with that of its group: (batch, heads, m, k), (batch, kv_heads, k, n)."""
    rows = left.reshape(*right.shape[:2], -1, left.shape[-1])
    return (rows @ right).view(*left.shape[:-1], right.shape[-1])
