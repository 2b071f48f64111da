"""Rotary position embedding (Su et al. 2021, "RoFormer", section 3.2.2), in the rotate-half form of Llama."""

import torch
from torch import Tensor

Rotation = tuple[Tensor, Tensor]


def rotation(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    """Cosines and sines for the given positions: computed once per forward pass, used by every block.

    Args:
        positions: (seq,) or (batch, seq), token positions.
        head_dim: Width of a head; pair i (of dimensions i and i + head_dim / 2) turns by ``theta^(-2i / head_dim)``
            per position.
        theta: Base of the frequencies.
        dtype: Of the result. The angles are computed in float32: bf16 cannot tell position 257 from 258.

    Returns:
        Cosines and sines, each (seq, head_dim / 2) or (batch, 1, seq, head_dim / 2).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions.float().unsqueeze(-1) / theta**exponents  # (…, seq, head_dim / 2)
    if angles.dim() == 3:
        angles = angles.unsqueeze(1)  # one rotation for all heads
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Turn each pair of dimensions of every head by its position's angle.

    Args:
        x: (batch, heads, seq, head_dim).
        by: What :func:`rotation` gave.

    Returns:
        As ``x``.
    """
    cos, sin = by
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
