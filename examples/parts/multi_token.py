"""Multi-token prediction (Gloeckle et al. 2024, "Better & Faster Large Language Models", arXiv:2404.19737) as a `loss`.

lightning-llm fit … --model.architecture.loss multi_token.MultiToken
"""

from torch import Tensor, nn

from lightning_llm.model.config import ModelConfig
from lightning_llm.model.loss import IGNORED, CrossEntropy
from lightning_llm.model.norm import RMSNorm


class MultiToken(CrossEntropy):
    """Adds the loss of the token after the next, from hidden states that pass through one more layer (section 2).

    Args:
        config: Of the model.
        weight: Of the added loss.
    """

    def __init__(self, config: ModelConfig, *, weight: float = 0.5) -> None:
        super().__init__(config)
        self.weight = weight
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.ahead_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self,
        hidden: Tensor,
        head: nn.Module,
        targets: Tensor,
        weights: Tensor | None = None,
        num_chunks: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The sum over (batch, seq) targets, and how many count."""
        total, count = super().forward(hidden, head, targets, weights, num_chunks)
        later = targets.roll(-1, dims=1)
        later[:, -1] = IGNORED
        later_weights = None if weights is None else weights.roll(-1, dims=1)
        ahead = hidden + self.ahead_proj(self.norm(hidden))
        added, _ = super().forward(ahead, head, later, later_weights, num_chunks)
        return total + self.weight * added, count
