"""A gate after attention (Qiu et al. 2025, "Gated Attention for Large Language Models", arXiv:2505.06708).

lightning-llm fit … --model.architecture.attention gated_attention.GatedAttention
"""

import torch
from torch import Tensor, nn

from lightning_llm.model.attention import CausalSelfAttention
from lightning_llm.model.config import ModelConfig


class GatedAttention(CausalSelfAttention):
    """Each element of each head's output is multiplied by a sigmoid of the input (section 2.2, position G1).

    The rest, and with it the cache of keys and values, is that of the built-in attention.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.gate_proj = nn.Linear(config.hidden_size, config.num_attention_heads * self.head_dim, bias=False)

    def output(self, mixed: Tensor, x: Tensor) -> Tensor:
        """(batch, seq, heads × head_dim) and the input (batch, seq, hidden) -> (batch, seq, hidden)."""
        return super().output(mixed * torch.sigmoid(self.gate_proj(x)), x)
