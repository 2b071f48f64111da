"""Normalization of the residual stream and of the query and key heads; a norm is built as ``(size, *, eps)``."""

import torch
from torch import Tensor, nn

from lightning_llm.model.config import ModelConfig
from lightning_llm.ops.norm import rms_norm

LayerNorm = nn.LayerNorm  # Ba et al. 2016, "Layer Normalization"


class RMSNorm(nn.RMSNorm):
    """torch's module, computed by :func:`lightning_llm.ops.norm.rms_norm`."""

    def forward(self, x: Tensor) -> Tensor:
        """(…, size) -> (…, size)."""
        assert self.eps is not None
        return rms_norm(x, self.weight, self.eps)


class DynamicTanh(nn.Module):
    """``weight ⊙ tanh(alpha · x) + bias`` in place of a norm (Zhu et al. 2025, "Transformers without Normalization").

    DyT of arXiv:2503.10622, section 4: gamma and beta of the paper are ``weight`` and ``bias``. No statistics of the
    input are computed.

    Args:
        size: Of the last dimension.
        eps: For other norms; there is no division here.
        alpha: Initial value of the learned scale inside the tanh.
    """

    def __init__(self, size: int, *, eps: float, alpha: float = 0.5) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor([alpha]))
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """(…, size) -> (…, size)."""
        return torch.addcmul(self.bias, torch.tanh(self.alpha * x), self.weight)


def build_head_norm(config: ModelConfig) -> nn.Module:
    """QK-norm: RMSNorm over one head (Dehghani et al. 2023, "ViT-22B", section 2.1; as in Qwen3), or nothing."""
    assert config.head_dim is not None
    return RMSNorm(config.head_dim, eps=config.rms_norm_eps) if config.qk_norm else nn.Identity()
