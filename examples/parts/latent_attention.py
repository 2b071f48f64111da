"""Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", arXiv:2405.04434, section 2.1).

lightning-llm fit … --model.architecture.partial_rotary_factor 0.5 \
      --model.architecture.attention '{class_path: latent_attention.LatentAttention, init_args: {rank: 64}}'
"""

import torch
from torch import Tensor, nn

from lightning_llm.model.attention import attend
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.context import Context
from lightning_llm.model.norm import RMSNorm


class LatentAttention(nn.Module):
    """Keys and values of all heads come from one narrow latent; a part of each key, with positions, does not.

    The part of a head that the positions rotate is ``partial_rotary_factor`` of it. The latent is what a cache would
    hold; the built-in one holds keys and values, so this class uses none, and generation recomputes.

    Args:
        config: Of the model, with ``position: rope``.
        rank: Width of the latent.
    """

    def __init__(self, config: ModelConfig, *, rank: int) -> None:
        super().__init__()
        self.head_dim, self.rotary_dim = config.head_dim, config.rotary_dim
        width = config.num_attention_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.down = nn.Linear(config.hidden_size, rank + self.rotary_dim, bias=False)
        self.norm = RMSNorm(rank, eps=config.rms_norm_eps)
        of_head = 2 * config.head_dim - self.rotary_dim  # of the rest of its key, and of its value
        self.up = nn.Linear(rank, config.num_attention_heads * of_head, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """(batch, seq, hidden) -> (batch, seq, hidden)."""
        query = self.q_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (batch, heads, seq, head_dim)
        latent, rotated = self.down(x).split([self.norm.normalized_shape[0], self.rotary_dim], dim=-1)
        both = self.up(self.norm(latent)).unflatten(-1, (query.shape[1], -1)).transpose(1, 2)
        rest, value = both.split([self.head_dim - self.rotary_dim, self.head_dim], dim=-1)
        shared = rotated[:, None].expand(-1, query.shape[1], -1, -1)  # one for all heads
        query, key = context.rotate(query, torch.cat((shared, rest), dim=-1))
        return self.o_proj(attend(query, key, value, context).transpose(1, 2).flatten(2))
