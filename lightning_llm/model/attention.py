"""Causal self-attention with grouped-query heads (Vaswani et al. 2017; Ainslie et al. 2023), full or in a window.

:func:`dot_product_attention` mixes queries, keys and values in the way that a forward pass asks for: training or
decoding, documents in one row, scores with a bias. Attention of the user's own can call it too.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_llm.model.config import ModelConfig
from lightning_llm.model.context import Context, Mask
from lightning_llm.model.norm import build_head_norm
from lightning_llm.model.parts import window_of_layer
from lightning_llm.ops import sizes, traced
from lightning_llm.ops.attention import causal_attention
from lightning_llm.ops.dispatch import matmul_dtype
from lightning_llm.ops.score_mod_attention import ScoreMod, score_mod_attention
from lightning_llm.ops.span_attention import AttentionSpans, span_attention, with_flex_blocks
from lightning_llm.ops.traced import device_type

WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class CausalSelfAttention(nn.Module):
    """Attention of every position to itself and those before it.

    Args:
        config: Sizes, biases, QK-norm and dropout.
        layer: Index of the block, and of its part of the cache.
        softcap: The scores are limited to this by a tanh (Gemma Team 2024, "Gemma 2", section 2).

    Attributes:
        uses_cache: Whether it adds its keys and values to a cache. A class that does not sees whole sequences.
        residual_outputs: Paths of the layers that write to the residual stream, and start smaller.
    """

    uses_cache = True
    residual_outputs = ("o_proj",)
    window: int | None = None

    def __init__(self, config: ModelConfig, layer: int, *, softcap: float | None = None) -> None:
        super().__init__()
        assert config.head_dim is not None
        assert config.num_key_value_heads is not None
        self.layer = layer
        self.head_dim = config.head_dim
        self.dropout = config.dropout
        self.softcap = softcap
        width, kv_width = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_bias)
        self.q_norm = build_head_norm(config)
        self.k_norm = build_head_norm(config)

    def prepare(self, x: Tensor, context: Context) -> None:
        """Leave what all layers share in ``context.shared``; called before the first block.

        Args:
            x: (batch, seq, hidden), what enters the first block.
            context: Of the forward pass.
        """
        name = f"window {self.window}"
        if self.window is not None and self.window < x.shape[1] and name not in context.shared:
            spans = spans_of_window(context, self.window, len(x), x.shape[1])
            context.shared[name] = with_blocks(spans, matmul_dtype(x), self.head_dim)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Mix positions: (batch, seq, hidden) -> (batch, seq, hidden)."""
        query, key, value = self.project(x, context)
        if context.cache is not None:
            key, value = context.cache.append(self.layer, key, value)
        dropout = self.dropout if self.training else 0.0
        mixed = dot_product_attention(
            query, key, value, context, window=self.window, softcap=self.softcap, dropout=dropout
        )
        return self.output(mixed.transpose(1, 2).flatten(2), x)

    def project(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (batch, heads, seq, head_dim), keys and values (batch, kv_heads, seq, head_dim), rotated."""
        query, key, value = (
            each.view(*each.shape[:-1], -1, self.head_dim) for each in self.projections(x, context)
        )  # (batch, seq, heads, head_dim)
        query = self.q_norm(query).to(value.dtype)
        key = self.k_norm(key).to(value.dtype)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))  # (batch, heads, seq, head_dim)
        query, key = context.rotate(query, key)
        return query, key, value

    def projections(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of all heads, each (batch, seq, width), before their norms and the rotation."""
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def output(self, mixed: Tensor, x: Tensor) -> Tensor:
        """(batch, seq, heads × head_dim) -> (batch, seq, hidden); ``x`` is what :meth:`forward` got."""
        out: Tensor = self.o_proj(mixed)
        return out


class SlidingWindowAttention(CausalSelfAttention):
    """Attention of every position to itself and the nearest before it (Beltagy et al. 2020, "Longformer", section 3.1).

    Args:
        config: As for full attention.
        layer: Index of the block.
        window: How many positions are seen, its own among them.
        every: Every n-th layer has full attention (2: Gemma 2; 6: Gemma 3).
        softcap: As for full attention.
    """

    def __init__(
        self, config: ModelConfig, layer: int, *, window: int, every: int | None = None, softcap: float | None = None
    ) -> None:
        super().__init__(config, layer, softcap=softcap)
        self.window = window_of_layer(layer, window, every)


def dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: Context,
    *,
    window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Causal attention, within documents and with the bias of the positions where there are any.

    After a cache, :func:`_after_cache` says first which keys the new positions see. Then the first line applies:

    =============================================================  ==================================
    softcap, or a bias of the positions, or a window with dropout  ``ops/score_mod_attention.py``
    documents, or a window                                         ``ops/span_attention.py``
    one new position after a cache, without dropout                :func:`_decode_attention`
    anything else                                                  :func:`_attention_by_form`
    =============================================================  ==================================

    Args:
        query: (batch, heads, seq, head_dim), rotated.
        key: (batch, kv_heads, keys, head_dim), rotated: with a cache all of its positions, the new ones last.
        value: As ``key``.
        context: Of the forward pass.
        window: A position sees so many at most, its own among them.
        softcap: Limits the scores.
        dropout: Of the attention weights.

    Returns:
        (batch, heads, seq, head_dim).
    """
    seq = query.shape[-2]
    keys = key.shape[-2]
    mask = context.mask
    window = None if window is None or window >= keys else window
    if context.cache is not None and keys > seq:
        key, value, mask, window = _after_cache(key, value, context, seq, window)
    if softcap is not None or context.position.has_score_bias or (window is not None and dropout):
        score_mod = _score_mod(context, keys - key.shape[-2], keys, softcap)
        visible = mask if context.cache is not None and isinstance(mask, Tensor) else None
        span_start = None if context.spans is None else context.spans.start
        return score_mod_attention(
            query, key, value, score_mod, window=window, span_start=span_start, visible=visible, dropout=dropout
        )
    if window is not None:
        mask = context.shared.get(f"window {window}") or spans_of_window(context, window, len(query), seq)
    if isinstance(mask, AttentionSpans):
        return span_attention(query, key, value, mask)
    if seq == 1 and context.cache is not None and not dropout:
        return _decode_attention(query, key, value, mask)
    return _attention_by_form(query, key, value, mask, dropout)


def _after_cache(
    key: Tensor, value: Tensor, context: Context, new: int, window: int | None
) -> tuple[Tensor, Tensor, Mask | None, int | None]:
    """Keys, values, mask and window where earlier positions are in a cache.

    ====================  ==============  =================================
    new positions         window          which keys are seen
    ====================  ==============  =================================
    one, rows even        yes             the last ones: no others are left
    one, rows uneven      yes             a mask with the window
    several               yes or no       a mask, with the window if any
    one                   no              the cache's own mask, if any
    ====================  ==============  =================================
    """
    if new == 1 and window is None:
        return key, value, context.mask, None
    if new == 1 and window is not None and context.mask is None:
        return key[:, :, -window:], value[:, :, -window:], None, None
    return key, value, _visible(context, new, key.shape[-2], window), None


def _visible(context: Context, new: int, keys: int, window: int | None) -> Tensor:
    """Positions of a cache that the new ones see: (new, keys), or (batch, 1, 1, keys) for rows of unequal length."""
    assert context.cache is not None
    positions = context.cache.positions(new)[..., None]
    key_positions = torch.arange(keys, device=context.positions.device)
    visible = key_positions <= positions
    if window is not None:
        visible = visible & (key_positions > positions - window)
    return visible if visible.dim() == 2 else visible[:, None]


def _attention_by_form(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """The attention of ``sizes.attention_form``, causal without a mask: (batch, heads, seq, head_dim)."""
    kind = "causal" if mask is None else "dense"
    _, heads, seq, head_dim = query.shape
    form = sizes.attention_form(
        device_type(query),
        query.dtype.itemsize,
        head_dim,
        seq,
        mask=kind,
        dropout=dropout,
        training=query.requires_grad,
    )
    if form == "short":
        return causal_attention(query, key, value)
    groups = heads // key.shape[1]
    if form == "efficient" and groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    trace = traced.current()
    if trace is not None and trace.device == "cuda" and form in ("fused", "efficient"):
        return trace.attention(query, key, value, form)  # type: ignore[no-any-return]
    with _kernels(query, form):
        return F.scaled_dot_product_attention(
            query, key, value, mask, dropout, mask is None and seq > 1, enable_gqa=heads != key.shape[1]
        )


def _decode_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of one new position: the heads of a group are the rows of one matmul with their common keys.

    With 4 heads to each of 2 at 1,024 positions this took 54 µs where ``enable_gqa``, which copies the keys for each
    head, took 104 (AMD Zen 5, 1 thread, torch 2.13). The query is (batch, heads, 1, head_dim), as is the result.
    """
    batch, heads, _, head_dim = query.shape
    rows = query.reshape(batch, key.shape[1], -1, head_dim)
    with _kernels(query, "fused"):
        mixed = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask)
    return mixed.reshape(batch, heads, 1, head_dim)


def _kernels(query: Tensor, form: str) -> AbstractContextManager[None]:
    """On a GPU not cuDNN's, where lengths vary: it makes a plan for each (pytorch#155958), for 0.1 s and more.

    In training they do not. Without gradients prompts, prefixes and last batches have any length. A trace takes the
    plain form where the device that is meant would.
    """
    if traced.current() is not None and form == "math":
        return sdpa_kernel(SDPBackend.MATH)
    return sdpa_kernel(WITHOUT_CUDNN) if query.is_cuda and not query.requires_grad else nullcontext()


def _score_mod(context: Context, first_key: int, num_keys: int, softcap: float | None) -> ScoreMod:
    """Function that changes the scores: by the cap, and by the bias of the positions."""
    position, positions = context.position, context.positions
    key_positions = positions if context.cache is None else torch.arange(first_key, num_keys, device=positions.device)

    def score_mod(scores: Tensor, queries: slice, keys: slice) -> Tensor:
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if not position.has_score_bias:
            return scores
        bias = position.score_bias(positions[..., queries], key_positions[..., keys])
        if bias is None or bias.shape[-3:] != scores.shape[1:]:
            expected = tuple(scores.shape[1:])
            got = None if bias is None else tuple(bias.shape)
            raise ValueError(
                f"position {type(position).__qualname__}: score_bias must return (heads, queries, keys), here "
                f"{expected}, got {got}"
            )
        return scores + bias

    return score_mod


def spans_of_window(context: Context, window: int, batch: int, seq: int) -> AttentionSpans:
    """The spans of a sliding window, within documents where there are any."""
    start = (torch.arange(seq, device=context.positions.device) - (window - 1)).clamp(min=0)
    return AttentionSpans(
        start.expand(batch, seq) if context.spans is None else torch.maximum(start, context.spans.start)
    )


def with_blocks(spans: AttentionSpans, dtype: torch.dtype, head_dim: int) -> AttentionSpans:
    """The spans, with the blocks of FlexAttention where that computes the attention."""
    device = device_type(spans.start)
    seq = spans.start.shape[1]
    form = sizes.attention_form(device, dtype.itemsize, head_dim, seq, mask="spans", dropout=0.0)
    return with_flex_blocks(spans) if form == "flex" else spans


def attention_kernel(config: ModelConfig, seq: int, dtype: torch.dtype, device: torch.device) -> str:
    """Kernel of torch for causal attention in training: ``cudnn``, ``flash``, ``efficient`` or ``math``.

    It depends on the versions of torch and cuDNN and on the GPU.
    """
    assert config.num_key_value_heads is not None
    form = sizes.attention_form(
        device.type, dtype.itemsize, config.head_dim or 0, seq, mask="causal", dropout=config.dropout
    )
    heads = config.num_attention_heads
    kv_heads = heads if form == "efficient" else config.num_key_value_heads
    with torch.enable_grad():
        query, key = (
            torch.empty(1, count, seq, config.head_dim or 0, dtype=dtype, device=device, requires_grad=True)
            for count in (heads, kv_heads)
        )
        chosen = torch._fused_sdp_choice(query, key, key, None, config.dropout, True, enable_gqa=kv_heads != heads)
    return SDPBackend(chosen).name.lower().removesuffix("_attention")
