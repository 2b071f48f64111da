"""Rotary position embedding (Su et al. 2021, "RoFormer", section 3.2.2), in the rotate-half form of Llama."""

import math
from typing import Any

import torch
from torch import Tensor

Rotation = tuple[Tensor, Tensor]


def rotation(
    positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype, scaling: dict[str, Any] | None = None
) -> Rotation:
    """Cosines and sines for the given positions: computed once per forward pass, used by every block.

    Args:
        positions: (seq,) or (batch, seq), token positions.
        head_dim: Width of a head; pair i (of dimensions i and i + head_dim / 2) rotates by ``theta^(-2i / head_dim)``
            per position.
        theta: Base of the frequencies.
        dtype: Of the result. The angles are computed in float32: bf16 cannot tell position 257 from 258.
        scaling: ``ModelConfig.rope_scaling``.

    Returns:
        Cosines and sines, each (seq, head_dim / 2) or (batch, 1, seq, head_dim / 2).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    periods = theta**exponents  # positions for one radian, (head_dim / 2)
    if scaling is not None:
        periods = _stretched(periods, scaling)
    angles = positions.float().unsqueeze(-1) / periods  # (…, seq, head_dim / 2)
    if angles.dim() == 3:
        angles = angles.unsqueeze(1)  # one rotation for all heads
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Rotate each pair of dimensions of every head by its position's angle.

    Args:
        x: (batch, heads, seq, head_dim).
        by: The result of :func:`rotation`.

    Returns:
        As ``x``.
    """
    cos, sin = by
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def _stretched(periods: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Periods of a model whose context was extended after pre-training: (head_dim / 2) -> (head_dim / 2).

    ``linear`` makes all of them longer by ``factor``. ``llama3`` does so with those that the first context did not see
    ``low_freq_factor`` times, leaves those that it saw ``high_freq_factor`` times, and blends between (the frequencies,
    linearly in the number of times): ``apply_scaling`` in Meta's llama-models, models/llama3/model.py.
    """
    factor = float(scaling["factor"])
    if scaling["rope_type"] == "linear":
        return periods * factor
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    times_seen = float(scaling["original_max_position_embeddings"]) / (2 * math.pi * periods)
    kept = ((times_seen - low) / (high - low)).clamp(0, 1)
    return periods / ((1 - kept) / factor + kept)
