"""Attention whose output passes a sigmoid gate (Qiu et al. 2025, "Gated Attention for Large Language Models").

arXiv:2505.06708, section 2.2: the gate is behind the attention and before the output projection, the place that the
paper calls G1. It is a sigmoid of a linear function of the layer's input.
"""

import torch
from torch import Tensor, nn

from lightning_llm.model.attention import CausalSelfAttention
from lightning_llm.model.config import ModelConfig


class GatedAttention(CausalSelfAttention):
    """Full attention with a gate for each element of each head's output, or one for each head.

    Args:
        config: As for full attention.
        layer: Index of the block.
        per: ``element`` or ``head``.
        softcap: As for full attention.
    """

    def __init__(self, config: ModelConfig, layer: int, *, per: str = "element", softcap: float | None = None) -> None:
        super().__init__(config, layer, softcap=softcap)
        gates = config.num_attention_heads * (self.head_dim if per == "element" else 1)
        self.gate_proj = nn.Linear(config.hidden_size, gates, bias=False)

    def output(self, mixed: Tensor, x: Tensor) -> Tensor:
        heads = mixed.view(*mixed.shape[:-1], -1, self.head_dim)  # (batch, seq, heads, head_dim)
        gates = torch.sigmoid(self.gate_proj(x)).view(*heads.shape[:-1], -1)
        return super().output((heads * gates).flatten(-2), x)
