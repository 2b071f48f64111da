"""Attention of x-transformers, with its own options, for any head size.

lightning-llm fit --config configs/shakespeare-char.yaml --model.architecture.position none \
      --model.architecture.attention x_heads.Heads --model.architecture.attention.gate_values true
"""

from typing import Any

from torch import Tensor
from x_transformers.x_transformers import Attention, RotaryEmbedding

from lightning_llm import ModelConfig
from lightning_llm.model.context import Context


class Heads(Attention):  # type: ignore[misc]
    """``x_transformers.Attention`` as a part, with rotary positions of its own: set ``position: none``."""

    def __init__(self, config: ModelConfig, **options: Any) -> None:
        sizes = {"dim_head": config.head_dim, "heads": config.num_attention_heads}
        super().__init__(config.hidden_size, causal=True, **{**sizes, **options})
        self.rotary = RotaryEmbedding(config.head_dim)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """(batch, seq, hidden) -> the same shape."""
        out: Tensor = super().forward(x, rotary_pos_emb=self.rotary(context.positions))
        return out
