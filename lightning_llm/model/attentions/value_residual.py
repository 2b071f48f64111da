"""Attention whose later layers use the values of the first one too (Zhou et al. 2024, "Value Residual Learning")."""

import torch
from torch import Tensor, nn

from lightning_llm.model.attention import CausalSelfAttention
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.context import Context

FIRST_VALUES = "first values"  # their place in ``Context.shared``


class ValueResidual(CausalSelfAttention):
    """The values of each later layer are a learned mixture of its own and the first layer's (arXiv:2410.17897).

    The paper's ResFormer, with two learned weights for each layer after the first.

    Args:
        config: As for full attention.
        layer: Index of the block.
        share: Of the first layer's values at the start; the layer's own have the rest.
        softcap: As for full attention.
    """

    def __init__(self, config: ModelConfig, layer: int, *, share: float = 0.5, softcap: float | None = None) -> None:
        super().__init__(config, layer, softcap=softcap)
        if layer:
            self.shares = nn.Parameter(torch.tensor([1 - share, share]))

    def project(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().project(x, context)
        if not self.layer:
            context.shared[FIRST_VALUES] = value
        else:
            own, first = self.shares.to(value.dtype)
            value = own * value + first * context.shared[FIRST_VALUES]
        return query, key, value
