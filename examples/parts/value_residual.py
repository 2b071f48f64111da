"""Values of the first layer in all others (Zhou et al. 2024, "Value Residual Learning", arXiv:2410.17897).

lightning-llm fit … --model.architecture.attention value_residual.ValueResidual
"""

import torch
from torch import Tensor, nn

from lightning_llm.model.attention import CausalSelfAttention
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.context import Context


class ValueResidual(CausalSelfAttention):
    """The values of each later layer are a learned mixture of its own and the first layer's (section 3.3).

    Args:
        config: Of the model.
        layer: Index of the block.
        share: Of the first layer's values at the start.
    """

    def __init__(self, config: ModelConfig, layer: int, *, share: float = 0.5) -> None:
        super().__init__(config, layer)
        if layer:
            self.shares = nn.Parameter(torch.tensor([1 - share, share]))

    def project(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each (batch, heads or kv_heads, seq, head_dim)."""
        query, key, value = super().project(x, context)
        if not self.layer:
            context.shared["first values"] = value
        else:
            own, first = self.shares.to(value.dtype)
            value = own * value + first * context.shared["first values"]
        return query, key, value
