"""What both operators ask of their arguments."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

Backward = Callable[..., tuple[Tensor | None, ...]]


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products with ``x``: its own, or autocast's (which leaves float64 alone)."""
    device = x.device.type
    if x.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def match(name: str, tensor: Tensor, shape: tuple[int, ...], x: Tensor, dtype: torch.dtype, x_name: str = "x") -> None:
    """Refuses a weight that does not fit the input.

    Args:
        name: The argument's name.
        tensor: The weight.
        shape: What it should be.
        x: The input.
        dtype: The dtype of the products. Where it is not the input's own, autocast will cast.
        x_name: The input's name.

    Raises:
        ValueError: Another shape, another device, another dtype that nobody will cast, or no floating dtype.
    """
    if tensor.shape != shape:
        raise ValueError(
            f"{name} must have shape {shape} for {x_name} of shape {tuple(x.shape)}, got {tuple(tensor.shape)}"
        )
    if tensor.device != x.device:
        raise ValueError(
            f"{name} {shape} is on {tensor.device}, {x_name} {tuple(x.shape)} on {x.device}: move one of them"
        )
    if not x.is_floating_point():
        raise ValueError(f"{x_name} must be of a floating dtype, got {x.dtype} {tuple(x.shape)}")
    if tensor.dtype != x.dtype and (dtype == torch.float64 or not is_autocast(x) or not tensor.is_floating_point()):
        raise ValueError(
            f"{name} {shape} is {tensor.dtype}, {x_name} {tuple(x.shape)} {x.dtype}: use one dtype, or torch.autocast"
        )


def is_autocast(x: Tensor) -> bool:
    """Whether autocast is on for the input's device."""
    return torch.is_autocast_enabled(x.device.type)


def count(name: str, number: int | None, most: int, of: str) -> None:
    """Refuses a number of chunks that is no whole number from 1 to ``most``; ``None`` is left to the operator.

    Raises:
        ValueError: It is not.
    """
    if number is None:
        return
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= most:
        raise ValueError(f"{name} must be a whole number from 1 to {most} ({of}) or None, got {number!r}")


def refuse_transforms(name: str, instead: str) -> None:
    """Says clearly what does not work under ``torch.func``: operators with a backward of their own.

    Raises:
        NotImplementedError: One of its transforms is active.
    """
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(f"{name} does not work under the transforms of torch.func: use {instead} there")


def differentiable_once(backward: Backward) -> Backward:
    """For the backward of a Function whose gradients are no function of anything to autograd.

    torch's own ``once_differentiable`` looks at the incoming gradient only: where that is constant, gradients come out
    as if they were constants too, and a penalty on them is lost without a word.

    Raises:
        RuntimeError: Under ``create_graph=True``.
    """

    @wraps(backward)
    def only_once(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "this operator of lightning_llm cannot be differentiated twice (create_graph=True): "
                "use the plain form, swiglu_reference or torch.nn.functional.cross_entropy"
            )
        return backward(ctx, *grads)

    return only_once
