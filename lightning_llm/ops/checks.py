"""Checks of the arguments of operators."""

import torch
from torch import Tensor


def check_weight(name: str, weight: Tensor | None, shape: tuple[int, ...], x: Tensor, x_name: str = "x") -> None:
    """Rejects a weight that does not have this shape, or does not fit the input ``x``; ``None`` always fits.

    Raises:
        ValueError: Another shape, another device, another dtype that autocast does not cast, or no floating dtype.
    """
    if weight is None:
        return
    found, size = tuple(weight.shape), tuple(x.shape)
    if found != shape:
        raise ValueError(f"{name} must have shape {shape} for {x_name} of shape {size}, got {found}")
    if weight.device != x.device:
        raise ValueError(f"{name} {shape} is on {weight.device}, {x_name} {size} on {x.device}: move one of them")
    if not x.is_floating_point():
        raise ValueError(f"{x_name} must be of a floating dtype, got {x.dtype} {size}")
    is_cast = torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64 and weight.is_floating_point()
    if weight.dtype != x.dtype and not is_cast:
        raise ValueError(
            f"{name} {shape} is {weight.dtype}, {x_name} {size} {x.dtype}: use one dtype, or torch.autocast"
        )


def check_chunks(num_chunks: int | None, most: int, of: str) -> None:
    """Rejects a number of chunks outside 1 to ``most``; the operator chooses one for ``None``.

    Raises:
        ValueError: It is outside, or not a whole number.
    """
    if num_chunks is not None and not (type(num_chunks) is int and 1 <= num_chunks <= most):
        raise ValueError(f"num_chunks must be a whole number from 1 to {most} ({of}) or None, got {num_chunks!r}")
