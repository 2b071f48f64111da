"""Attention and norm as ``bench ladder`` begins with them: written out head by head, then by torch's own operators.

They take the place of the package's own inside a Transformer, with the same weights.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_llm.model.attention import CausalSelfAttention
from lightning_llm.model.norm import RMSNorm
from lightning_llm.model.rope import Rotation, rotate
from lightning_llm.model.transformer import Transformer


class PerHeadAttention(nn.Module):
    """A module for each head, one after another; scores and mask are written out, as a course teaches it."""

    def __init__(self, whole: CausalSelfAttention) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            _Head(*(proj.weight.detach()[start : start + whole.head_dim] for proj in projections))
            for projections in [(whole.q_proj, whole.k_proj, whole.v_proj)]
            for start in range(0, whole.q_proj.out_features, whole.head_dim)
        )
        self.o_proj = whole.o_proj

    def forward(self, x: Tensor, *, rotation: Rotation, cache: None = None, mask: None = None) -> Tensor:
        """(batch, seq, hidden) -> (batch, seq, hidden)."""
        out: Tensor = self.o_proj(torch.cat([head(x, rotation) for head in self.heads], dim=-1))
        return out


class _Head(nn.Module):
    def __init__(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (_linear(weight) for weight in (query, key, value))

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        """(batch, seq, hidden) -> (batch, seq, head_dim)."""
        query, key, value = rotate(self.q_proj(x), rotation), rotate(self.k_proj(x), rotation), self.v_proj(x)
        scores = query @ key.mT / math.sqrt(query.shape[-1])  # (batch, seq, seq)
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).tril()
        mixed: Tensor = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1) @ value
        return mixed


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data.copy_(weight)
    return linear


class TorchAttention(nn.Module):
    """All heads in one product for each projection, and ``scaled_dot_product_attention``."""

    def __init__(self, whole: CausalSelfAttention) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = whole.q_proj, whole.k_proj, whole.v_proj, whole.o_proj
        self.head_dim = whole.head_dim

    def forward(self, x: Tensor, *, rotation: Rotation, cache: None = None, mask: None = None) -> Tensor:
        """(batch, seq, hidden) -> (batch, seq, hidden)."""
        query, key, value = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, rotation), rotate(key, rotation)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


def use_plain_operators(model: Transformer, operators: str) -> None:
    """Put attention ``per head`` or of ``torch`` into a model, and torch's norm; ``ours`` changes nothing."""
    if operators == "ours":
        return
    attention = {"per head": PerHeadAttention, "torch": TorchAttention}[operators]
    for block in model.layers:
        assert isinstance(block.self_attn, CausalSelfAttention)
        block.self_attn = attention(block.self_attn)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, RMSNorm):
                setattr(parent, name, _torch_norm(child))


def _torch_norm(norm: RMSNorm) -> nn.RMSNorm:
    plain = nn.RMSNorm(norm.normalized_shape, eps=norm.eps)
    plain.weight = norm.weight
    return plain
