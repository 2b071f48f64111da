"""Normalization of the residual stream and of the query and key heads; a norm is built as ``(size, *, eps)``."""

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


def build_head_norm(config: ModelConfig) -> nn.Module:
    """QK-norm: RMSNorm over one head (Dehghani et al. 2023, "ViT-22B", section 2.1; as in Qwen3), or nothing."""
    assert config.head_dim is not None
    return RMSNorm(config.head_dim, eps=config.rms_norm_eps) if config.qk_norm else nn.Identity()
