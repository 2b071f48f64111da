"""Causal attention of short sequences on a CPU, as one operator for autograd.

The built-in ``scaled_dot_product_attention`` keeps O(seq) numbers per head where this keeps the probabilities, but its
backward in bf16 on a CPU is slow: at 32 × 3 heads × 64 × 64 it took 6.6 ms where this takes 0.6 (AMD Zen 5, 2 cores,
torch 2.13).
"""

from typing import Any

import torch
from torch import Tensor

from lightning_llm.ops import compiled, sizes
from lightning_llm.ops.attention_blocks import attention_backward, attention_forward


def is_worth_it(query: Tensor) -> bool:
    """Whether :func:`causal_attention` is the faster way: training on a CPU, at a short context."""
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
    flat = (x.reshape(-1, *shape[-2:]) for x in (query, key, value))
    if torch.compiler.is_compiling():
        return compiled.causal_attention(*flat).view(shape)
    out: Tensor = _CausalAttention.apply(*flat)  # type: ignore[no-untyped-call]
    return out.view(shape)


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, probabilities = attention_forward(query, key, value)
        ctx.save_for_backward(query, key, value, *probabilities)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, *probabilities = ctx.saved_tensors
        return attention_backward(d_out, query, key, value, probabilities)
