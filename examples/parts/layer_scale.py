"""A learned scale for each branch of a block (Touvron et al. 2021, "Going deeper with Image Transformers", section 2).

lightning-llm fit … --model.architecture.block layer_scale.LayerScale
"""

import torch
from torch import Tensor, nn

from lightning_llm.model.block import Block
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.context import Context


class LayerScale(Block):
    """``x + scale ⊙ attention(norm(x))``, then the same with the MLP. With one scale of 0 it would be ReZero.

    Args:
        config: Of the model.
        layer: Index of the block.
        seed: Of the initial values.
        initial: The scales at the start.
    """

    def __init__(self, config: ModelConfig, layer: int, seed: int, *, initial: float = 0.1) -> None:
        super().__init__(config, layer, seed)
        self.attention_scale = nn.Parameter(torch.full((config.hidden_size,), initial))
        self.mlp_scale = nn.Parameter(torch.full((config.hidden_size,), initial))

    def add_branches(self, x: Tensor, context: Context) -> Tensor:
        """(batch, seq, hidden) -> (batch, seq, hidden)."""
        x = x + self.attention_scale * self.attend(x, context)
        return x + self.mlp_scale * self.feed_forward(x)
