"""Multi-head latent attention, MLA (DeepSeek-AI 2024, "DeepSeek-V2", arXiv:2405.04434, section 2.1).

Keys and values of all heads are linear functions of one narrow latent of each token, which is all that the cache holds,
with the rotated part of the key, one for all heads. With the paper's names:

    latent      c = norm(W_DKV x)                         rank wide
    key         [RoPE(W_KR x), W_UK c] of each head       the first part is the same for all heads
    value       W_UV c of each head

In decoding, one new position multiplies W_UK into the query and W_UV into the result instead ("absorbed", section
2.1.2): then the latents themselves are keys and values of one head, and no earlier position is projected again.
"""

import math

import torch
from torch import Tensor, nn

from lightning_llm.model.attention import dot_product_attention
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.context import Context
from lightning_llm.model.norm import RMSNorm
from lightning_llm.model.unmodified import is_unmodified


class LatentAttention(nn.Module):
    """Attention whose cache has ``rank`` and the rotated dimensions for each token, whatever the number of heads.

    The rotated part of a head is ``partial_rotary_factor`` of it; with other positions than ``rope`` there is none.

    Args:
        config: Sizes, dropout, and biases, which all projections but that from the latent have.
        layer: Index of the block.
        rank: Width of the latent. ``None``: 4 times ``head_dim``, as in the paper.
    """

    uses_cache = True
    residual_outputs = ("o_proj",)

    def __init__(self, config: ModelConfig, layer: int, *, rank: int | None = None) -> None:
        super().__init__()
        assert config.head_dim is not None
        self.layer = layer
        self.dropout = config.dropout
        self.heads = config.num_attention_heads
        self.head_dim = config.head_dim
        self.rank = rank or 4 * config.head_dim
        self.rotary_dim = config.rotary_dim if config.position == "rope" else 0
        hidden = config.hidden_size
        width = self.heads * self.head_dim
        has_bias = config.attention_bias
        self.q_proj = nn.Linear(hidden, width, bias=has_bias)
        self.latent_proj = nn.Linear(hidden, self.rank + self.rotary_dim, bias=has_bias)
        self.latent_norm = RMSNorm(self.rank, eps=config.rms_norm_eps)
        self.kv_proj = nn.Linear(self.rank, 2 * width - self.heads * self.rotary_dim, bias=False)
        self.o_proj = nn.Linear(width, hidden, bias=has_bias)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Mix positions: (batch, seq, hidden) -> (batch, seq, hidden)."""
        query = self._by_head(self.q_proj(x))
        latent, rotated = torch.split(self.latent_proj(x), [self.rank, self.rotary_dim], dim=-1)
        latent, rotated = self.latent_norm(latent)[:, None], rotated[:, None]  # of one head
        if self.rotary_dim:
            query, rotated = context.rotate(query, rotated)
        if context.cache is not None:
            latent = context.cache.extend(self.layer, "latent", latent)
            rotated = context.cache.extend(self.layer, "rotated key", rotated)
        dropout = self.dropout if self.training else 0.0
        if context.cache is not None and x.shape[1] == 1 and not dropout and is_unmodified(self.kv_proj, nn.Linear):
            mixed = self._absorbed(query, latent, rotated, context)
        else:
            both = self._by_head(self.kv_proj(latent[:, 0]))
            key, value = torch.split(both, [self._unrotated, self.head_dim], dim=-1)
            key = torch.cat((rotated.expand(-1, self.heads, -1, -1), key), dim=-1)
            mixed = dot_product_attention(query, key, value, context, dropout=dropout)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    @property
    def _unrotated(self) -> int:
        return self.head_dim - self.rotary_dim

    def _by_head(self, x: Tensor) -> Tensor:
        """(batch, seq, heads × width) -> (batch, heads, seq, width)."""
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def _absorbed(self, query: Tensor, latent: Tensor, rotated: Tensor, context: Context) -> Tensor:
        """Attention as in :meth:`forward`, from queries (batch, heads, 1, head_dim) and the cache, without dropout."""
        by_head = self.kv_proj.weight.view(self.heads, -1, self.rank)
        to_key, to_value = torch.split(by_head, [self._unrotated, self.head_dim], dim=1)  # (heads, …, rank)
        first, rest = torch.split(query, [self.rotary_dim, self._unrotated], dim=-1)
        scale = math.sqrt((self.rank + self.rotary_dim) / self.head_dim)  # attention divides by the root of its width
        query = scale * torch.cat((first, rest @ to_key), dim=-1)
        both = torch.cat((rotated, latent), dim=-1)
        mixed = dot_product_attention(query, both, both, context)[..., self.rotary_dim :]  # (batch, heads, 1, rank)
        return mixed @ to_value.mT
