"""Causal self-attention with grouped-query heads (Vaswani et al. 2017; Ainslie et al. 2023) and rotary positions.

The rotation is that of Su et al. 2021, "RoFormer", section 3.2.2, in the rotate-half form of Llama.
"""

import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_llm.model.config import ModelConfig
from lightning_llm.model.kv_cache import KVCache
from lightning_llm.model.norm import build_head_norm
from lightning_llm.ops import sizes
from lightning_llm.ops.attention import causal_attention
from lightning_llm.ops.span_attention import Spans, span_attention

Mask = Tensor | Spans
Rotation = tuple[Tensor, Tensor]

WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class CausalSelfAttention(nn.Module):
    """Attention of every position to itself and those before it.

    Args:
        config: Sizes, biases, QK-norm and dropout.
        layer: Index of the block, and of its part of the cache.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        assert config.head_dim is not None
        assert config.num_key_value_heads is not None
        self.layer, self.head_dim, self.dropout = layer, config.head_dim, config.dropout
        width, kv_width = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_bias)
        self.q_norm, self.k_norm = build_head_norm(config), build_head_norm(config)

    def forward(
        self, x: Tensor, *, rotation: Rotation | None = None, cache: KVCache | None = None, mask: Mask | None = None
    ) -> Tensor:
        """Mix positions.

        Args:
            x: (batch, seq, hidden).
            rotation: Of these positions; ``None`` leaves queries and keys as they are.
            cache: Keys and values of the positions before; the new ones are added to it.
            mask: The spans that positions see; or (batch, 1, seq, seq), added to the scores in their dtype, or true
                where a position may look; with a cache (batch, 1, 1, its length + 1). ``None``: everything before.

        Returns:
            (batch, seq, hidden).
        """
        query, key, value = (
            proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )  # (batch, seq, heads, head_dim)
        query, key = self.q_norm(query).to(value.dtype), self.k_norm(key).to(value.dtype)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))  # (batch, heads, seq, head_dim)
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        seq = query.shape[-2]
        causal = seq > 1 and mask is None
        if cache is not None:
            key, value = cache.append(self.layer, key, value)
            if causal and cache.length:  # several new positions after old ones: the built-in triangle would misalign
                mask = torch.ones(seq, key.shape[-2], dtype=torch.bool, device=x.device).tril(cache.length)
                causal = False
        dropout = self.dropout if self.training else 0.0
        if isinstance(mask, Spans):
            mixed = span_attention(query, key, value, mask)
        elif seq == 1 and cache is not None and not dropout:
            mixed = _attend_once(query, key, value, mask)
        else:
            mixed = _attend(query, key, value, mask, dropout, causal=causal)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, *, causal: bool) -> Tensor:
    """The attention of ``sizes.attention_form``: (batch, heads, seq, head_dim)."""
    sort = "causal" if mask is None else "dense"
    places = query.device.type, query.dtype.itemsize, query.shape[-1], query.shape[-2]
    form = sizes.attention_form(*places, mask=sort, dropout=dropout, training=query.requires_grad)
    if form == "short":
        return causal_attention(query, key, value)
    groups = query.shape[1] // key.shape[1]
    if form == "efficient" and groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    return F.scaled_dot_product_attention(
        query, key, value, mask, dropout, causal, enable_gqa=query.shape[1] != key.shape[1]
    )


def _attend_once(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of one new position: the heads of a group are the rows of one matmul with their common keys.

    With 4 heads to each of 2 at 1,024 positions this took 54 µs where ``enable_gqa``, which copies the keys for each
    head, took 104 (AMD Zen 5, 1 thread, torch 2.13). The query is (batch, heads, 1, head_dim), as is the result.
    """
    batch, heads, _, head_dim = query.shape
    rows = query.reshape(batch, key.shape[1], -1, head_dim)
    # on a GPU not by cuDNN, which makes a new plan for every length of the cache (pytorch#155958)
    with sdpa_kernel(WITHOUT_CUDNN) if query.is_cuda else nullcontext():
        mixed = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask)
    return mixed.reshape(batch, heads, 1, head_dim)


def rotation(
    positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype, scaling: dict[str, Any] | None = None
) -> Rotation:
    """Cosines and sines for the given positions: computed once per forward pass, used by every block.

    Args:
        positions: (seq,) or (batch, seq), token positions.
        head_dim: Width of a head; pair i (of dimensions i and i + head_dim / 2) rotates by ``theta^(-2i / head_dim)``
            per position.
        theta: Base of the frequencies.
        dtype: Of the result. The angles are computed in float32: bf16 cannot tell position 257 from 258.
        scaling: ``ModelConfig.rope_scaling``.

    Returns:
        Cosines and sines, each (seq, head_dim / 2) or (batch, 1, seq, head_dim / 2).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    periods = theta**exponents  # positions for one radian, (head_dim / 2)
    if scaling is not None:
        periods = _stretched(periods, scaling)
    angles = positions.float().unsqueeze(-1) / periods  # (…, seq, head_dim / 2)
    if angles.dim() == 3:
        angles = angles.unsqueeze(1)  # one rotation for all heads
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Rotate each pair of dimensions of every head by its position's angle.

    Args:
        x: (batch, heads, seq, head_dim).
        by: The result of :func:`rotation`.

    Returns:
        As ``x``.
    """
    cos, sin = by
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def _stretched(periods: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Periods of a model whose context was extended after pre-training: (head_dim / 2) -> (head_dim / 2).

    ``linear`` makes all of them longer by ``factor``. ``llama3`` does so with those that the first context did not see
    ``low_freq_factor`` times, leaves those that it saw ``high_freq_factor`` times, and blends between (the frequencies,
    linearly in the number of times): ``apply_scaling`` in Meta's llama-models, models/llama3/model.py.
    """
    factor = float(scaling["factor"])
    if scaling["rope_type"] == "linear":
        return periods * factor
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    times_seen = float(scaling["original_max_position_embeddings"]) / (2 * math.pi * periods)
    kept = ((times_seen - low) / (high - low)).clamp(0, 1)
    return periods / ((1 - kept) / factor + kept)
