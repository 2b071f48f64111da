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

Change = Callable[[Tensor, slice, slice], Tensor]


def score_mod_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    change: Change = lambda scores, queries, keys: scores,
    *,
    window: int | None = None,
    start: Tensor | None = None,
    seen: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of every query to itself and the keys before it, or to those that ``seen`` tells.

    Args:
        query: (batch, heads, seq, head_dim).
        key: (batch, kv_heads, keys, head_dim); ``heads`` is a multiple of ``kv_heads``. The last ``seq`` of them are at
            the places of the queries.
        value: As ``key``.
        change: From the scores of a block, (batch, heads, queries, keys) in float32 at least, and the places of its
            queries and keys in those that are given here, to new scores.
        window: A query sees so many keys at most, the last ones.
        start: (batch, seq), the first key that each query sees.
        seen: True where a query sees a key, (seq, keys) with leading dimensions, instead of all of these.
        dropout: Of the weights.

    Returns:
        (batch, heads, seq, head_dim).
    """
    seq, old = query.shape[2], key.shape[2] - query.shape[2]

    def block(query: Tensor, key: Tensor, value: Tensor, queries: slice, keys: slice) -> Tensor:
        scores = change(_grouped(query, key.mT).to(wide) * query.shape[-1] ** -0.5, queries, keys)
        scores = scores.masked_fill(~_seen(queries, keys), float("-inf"))
        weights = F.dropout(scores.softmax(dim=-1), dropout).to(value.dtype)
        return _grouped(weights, value)

    def _seen(queries: slice, keys: slice) -> Tensor:
        if seen is not None:
            return seen[..., queries, keys]
        place = torch.arange(keys.start, keys.stop, device=query.device)
        own = torch.arange(old + queries.start, old + queries.stop, device=query.device)[:, None]
        visible = place <= own
        if window is not None:
            visible = visible & (place > own - window)
        return visible if start is None else visible & (place >= start[:, None, queries, None])

    wide, parts = torch.promote_types(query.dtype, torch.float32), []
    is_saving = torch.is_grad_enabled() and query.requires_grad and not torch.compiler.is_compiling()
    for first, end in sizes.attention_blocks(seq):
        begin = 0 if window is None or seen is not None else max(0, old + first + 1 - window)
        stop = key.shape[2] if seen is not None else old + end
        inputs = query[:, :, first:end], key[:, :, begin:stop], value[:, :, begin:stop]
        places = slice(first, end), slice(begin, stop)
        parts.append(checkpoint(block, *inputs, *places, use_reentrant=False) if is_saving else block(*inputs, *places))
    return torch.cat(parts, dim=2)


def _grouped(left: Tensor, right: Tensor) -> Tensor:
    """A matmul for each query head with that of its group: (batch, heads, m, k), (batch, kv_heads, k, n)."""
    rows = left.reshape(*right.shape[:2], -1, left.shape[-1])
    return (rows @ right).view(*left.shape[:-1], right.shape[-1])
