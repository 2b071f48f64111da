"""A GPT in plain torch, as small training scripts write it: what a compiler makes fast without operators of its own.

Learned positions, LayerNorm without bias, one projection for queries, keys and values, the built-in attention, GELU,
and the cross-entropy of all logits at once. The MLP has two matrices where SwiGLU has three, so it is half as wide
again: equally many parameters and FLOPs.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_llm.model.config import ModelConfig


class PlainBlock(nn.Module):
    """Attention and MLP, each behind its norm and added to the residual stream; a config has the sizes of SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.intermediate_size is not None
        hidden, wide = config.hidden_size, config.intermediate_size * 3 // 2
        self.heads = config.num_attention_heads
        self.norm_1, self.norm_2 = (nn.LayerNorm(hidden, bias=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, wide, bias=False), nn.Linear(wide, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, hidden) -> (batch, seq, hidden)."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))
        return out


class PlainGPT(nn.Module):
    """The model with its loss; the head may share the embedding's weight."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.vocab_size is not None
        hidden = config.hidden_size
        self.tokens = nn.Embedding(config.vocab_size, hidden)
        self.positions = nn.Embedding(config.max_position_embeddings, hidden)
        self.blocks = nn.ModuleList(PlainBlock(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(hidden, bias=False)
        self.head = nn.Linear(hidden, config.vocab_size, bias=False)
        for weight in (parameter for parameter in self.parameters() if parameter.ndim == 2):
            nn.init.normal_(weight, std=config.initializer_range)
        if config.tie_word_embeddings:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of (batch, seq) ids and targets."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())
