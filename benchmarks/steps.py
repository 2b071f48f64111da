"""The whole training step of a plain loop, as several benchmarks time it."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

Clip = Callable[[Iterable[Tensor], float], object]


def plain_step(
    loss: Callable[[], Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    device: str,
    dtype: str = "float32",
    clip: Clip = nn.utils.clip_grad_norm_,
) -> None:
    """Forward under autocast, backward, clipping at 1, and the optimizer; the gradients are still there afterwards.

    Args:
        loss: Computes the loss of a batch.
        model: Whose gradients are clipped.
        optimizer: Of its parameters.
        device: ``cpu`` or ``cuda``.
        dtype: ``bfloat16`` for autocast, else ``float32``.
        clip: How gradients are clipped.
    """
    with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
        value = loss()
    torch.autograd.backward(value)
    clip(model.parameters(), 1.0)
    optimizer.step()
