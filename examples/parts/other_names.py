"""SwiGLU with other names of its layers: a comparison with the built-in one must find no difference.

lightning-llm fit … --model.architecture.mlp other_names.OtherNames
"""

from torch import Tensor, nn
from torch.nn import functional as F

from lightning_llm.model.config import ModelConfig


class OtherNames(nn.Module):
    """``down(SiLU(gate(x)) ⊙ up(x))``, exactly ``swiglu``, without the suffix ``_proj``.

    Args:
        config: Of the model.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, wide = config.hidden_size, config.intermediate_size or 4 * config.hidden_size
        self.gate, self.up = nn.Linear(hidden, wide, bias=False), nn.Linear(hidden, wide, bias=False)
        self.down = nn.Linear(wide, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, hidden) -> (batch, seq, hidden)."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out
