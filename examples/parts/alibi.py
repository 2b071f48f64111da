"""Attention with linear biases (Press et al. 2021, "Train Short, Test Long", arXiv:2108.12409) as a `position`.

lightning-llm fit … --model.architecture.position alibi.ALiBi
"""

import torch
from torch import Tensor

from lightning_llm.model.config import ModelConfig
from lightning_llm.model.position import Position


class ALiBi(Position):
    """Each head lowers the scores by its slope times the distance (section 3); nothing is embedded or rotated."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        heads = config.num_attention_heads
        slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)
        self.register_buffer("slopes", slopes[:, None, None], persistent=False)

    def score_bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """(queries,) and (keys,), or with the batch before -> (heads, queries, keys), or with the batch before."""
        distance = query_positions[..., :, None] - key_positions[..., None, :]
        return -self.slopes * distance.unsqueeze(-3)
