"""The MLPs of a block with dense layers.

``SwiGLU`` and ``MemoryOptimizedSwiGLU`` are plain modules for anybody's model: they take sizes, not a config, and
share one state dict. The functions at the end make what ``ModelConfig.mlp`` names.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_llm.model.config import ModelConfig
from lightning_llm.model.norm import RMSNorm
from lightning_llm.model.parts import name_of
from lightning_llm.model.unmodified import is_unmodified
from lightning_llm.ops.swiglu import memory_optimized_swiglu


class SquaredReLU(nn.Module):
    """``ReLU(x)²`` (So et al. 2021, "Primer: Searching for Efficient Transformers", section 4)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "relu2": SquaredReLU,
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
}


class SwiGLU(nn.Module):
    """``down(SiLU(gate(x)) ⊙ up(x))`` (Shazeer 2020, "GLU Variants Improve Transformer", equation 6).

    Args:
        hidden_size: Width of input and output.
        intermediate_size: Width between.
        bias: Biases in all three projections.
        device: Of the parameters, as in ``nn.Linear``.
        dtype: Of the parameters, as in ``nn.Linear``.
    """

    residual_outputs = ("down_proj",)

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=bias, device=device, dtype=dtype)
        self.gate_proj = linear(hidden_size, intermediate_size)
        self.up_proj = linear(hidden_size, intermediate_size)
        self.down_proj = linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """(…, hidden) -> (…, hidden)."""
        out: Tensor = self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return out

    @staticmethod
    def activation(x: Tensor) -> Tensor:
        """The activation of the gate, elementwise: SiLU."""
        return F.silu(x)


class GeGLU(SwiGLU):
    """The same with GELU, by the error function, in place of SiLU (Shazeer 2020, equation 6)."""

    @staticmethod
    def activation(x: Tensor) -> Tensor:
        return F.gelu(x)


class MemoryOptimizedSwiGLU(SwiGLU):
    """The same function and the same parameters as :class:`SwiGLU`, saving less for backward.

    The operator reads the weights of the three projections. Where a call of a projection is more than that (a bias, an
    adapter, a quantized or any other class in its place, a hook), the projections are called as in :class:`SwiGLU`,
    which takes that class's memory.

    Args:
        hidden_size: Width of input and output.
        intermediate_size: Width between.
        checkpoint_level: What is saved, see :func:`lightning_llm.ops.memory_optimized_swiglu`.
        bias: Biases in all three projections. With them it computes and saves what :class:`SwiGLU` does.
        device: Of the parameters, as in ``nn.Linear``.
        dtype: Of the parameters, as in ``nn.Linear``.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        checkpoint_level: int = 0,
        *,
        bias: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, intermediate_size, bias=bias, device=device, dtype=dtype)
        self.checkpoint_level = checkpoint_level

    def forward(self, x: Tensor, norm: nn.Module | None = None) -> Tensor:
        """(…, hidden) -> (…, hidden).

        Args:
            x: The input.
            norm: Applied to ``x`` first. At level 2 an RMSNorm is part of the operator, which then saves ``x`` alone;
                any other module, or one with hooks, is called, and its output saved, as at level 1.
        """
        projections = self.gate_proj, self.up_proj, self.down_proj
        if not all(is_unmodified(projection, nn.Linear) and projection.bias is None for projection in projections):
            return super().forward(x if norm is None else norm(x))
        level = self.checkpoint_level
        norm_weight = None
        norm_eps = 1e-6
        if isinstance(norm, nn.RMSNorm) and _is_plain_norm(norm):
            norm_weight = norm.weight
            norm_eps = norm.eps or 0.0
        elif norm is not None:
            x = norm(x)
            level = min(level, 1)
        gate, up, down = (projection.weight for projection in projections)
        return memory_optimized_swiglu(
            x, gate, up, down, checkpoint_level=level, norm_weight=norm_weight, norm_eps=norm_eps
        )

    def extra_repr(self) -> str:
        """Shown by ``print(model)``."""
        return f"checkpoint_level={self.checkpoint_level}"


class MLP(nn.Module):
    """``down(f(up(x)))`` with ReLU, ReLU² or GELU, as in GPT-2.

    Args:
        hidden_size: Width of input and output.
        intermediate_size: Width between.
        activation: ``relu``, ``relu2``, ``gelu`` (the exact form, by the error function) or ``gelu_tanh`` (Hendrycks
            and Gimpel 2016, "Gaussian Error Linear Units", section 2: the approximation by a tanh, as in GPT-2).
        bias: Biases in both projections.
    """

    residual_outputs = ("down_proj",)

    def __init__(self, hidden_size: int, intermediate_size: int, *, activation: str, bias: bool = False) -> None:
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.activation = ACTIVATIONS[activation]()
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(…, hidden) -> (…, hidden)."""
        out: Tensor = self.down_proj(self.activation(self.up_proj(x)))
        return out


def _is_plain_norm(norm: nn.RMSNorm) -> bool:
    """With a weight and an epsilon, as the operator needs them."""
    return is_unmodified(norm, RMSNorm, nn.RMSNorm) and norm.elementwise_affine and norm.eps is not None


# ---- from a config


def _sizes(config: ModelConfig) -> tuple[int, int]:
    assert config.intermediate_size is not None
    return config.hidden_size, config.intermediate_size


def build_swiglu(config: ModelConfig) -> SwiGLU:
    """:class:`SwiGLU` with the sizes of a config."""
    return SwiGLU(*_sizes(config), bias=config.mlp_bias)


def build_geglu(config: ModelConfig) -> GeGLU:
    """:class:`GeGLU` with the sizes of a config."""
    return GeGLU(*_sizes(config), bias=config.mlp_bias)


def build_memory_optimized_swiglu(config: ModelConfig, layer: int) -> MemoryOptimizedSwiGLU:
    """:class:`MemoryOptimizedSwiGLU` with the sizes of a config and the layer's checkpoint level."""
    return MemoryOptimizedSwiGLU(*_sizes(config), config.checkpoint_levels[layer])


def build_plain(config: ModelConfig) -> MLP:
    """:class:`MLP` with the activation that the config names."""
    return MLP(*_sizes(config), activation=name_of(config.mlp), bias=config.mlp_bias)
