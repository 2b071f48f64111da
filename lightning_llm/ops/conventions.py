"""What all operators do alike: checks of arguments, matmuls, kernels, and their place in autograd and torch.compile."""

import os
from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, library

Backward = Callable[..., tuple[Tensor | None, ...]]


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


def reject_transforms(name: str, instead: str) -> None:
    """Reports that an operator with a backward of its own does not work under ``torch.func``.

    Raises:
        NotImplementedError: One of its transforms is active.
    """
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(f"{name} does not work under the transforms of torch.func: use {instead} there")


def matmul_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matmuls with ``x``: its own, or autocast's (which leaves float64 alone)."""
    is_cast = x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type)
    return torch.get_autocast_dtype(x.device.type) if is_cast else x.dtype


def matmul_into(out: Tensor, left: Tensor, right: Tensor, *, accumulate: bool) -> None:
    """Computes ``out = left @ right``, or ``out += left @ right`` to accumulate.

    ``out`` has the dtype of the factors or, so that no bits of a sum are lost, a wider one. On CUDA the matmul itself
    gives that; elsewhere each product is rounded to the dtype of the factors first.
    """
    if out.dtype == left.dtype:
        out.addmm_(left, right) if accumulate else torch.mm(left, right, out=out)
    elif left.is_cuda and torch.version.hip is None:
        out.add_(torch.mm(left, right, out.dtype)) if accumulate else torch.mm(left, right, out.dtype, out=out)
    else:
        product = torch.mm(left, right)
        out.add_(product) if accumulate else out.copy_(product)


def kernels_for(tensor: Tensor) -> ModuleType | None:
    """The Triton kernels (``kernels.py``), or ``None`` where PyTorch's operators must do the work.

    That is outside CUDA (unless ``TRITON_INTERPRET=1`` runs kernels anywhere), in float64, and without Triton.
    """
    if not tensor.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return None
    return None if tensor.element_size() == 8 else _import_kernels()


@cache
def _import_kernels() -> ModuleType | None:
    return import_module("lightning_llm.ops.kernels") if find_spec("triton") else None


def differentiable_once(backward: Backward) -> Backward:
    """Decorates the backward of a Function that autograd cannot differentiate again.

    torch's own ``once_differentiable`` looks at the incoming gradient only: where that is constant, gradients come out
    as if they were constants too, and a penalty on them is silently lost.

    Raises:
        RuntimeError: Under ``create_graph=True``.
    """

    @wraps(backward)
    def only_once(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "this operator of lightning_llm cannot be differentiated twice (create_graph=True): "
                "use the plain form, swiglu_reference or that of torch.nn.functional"
            )
        return backward(ctx, *grads)

    return only_once


def opaque(
    name: str,
    arguments: str,
    run: Callable[..., list[Tensor]],
    shapes: Callable[..., list[Tensor]],
    *,
    save: Callable[..., None] | None = None,
    gradients: Callable[..., tuple[Any, ...]] | None = None,
) -> Callable[..., list[Tensor]]:
    """An operator that ``torch.compile`` does not trace into, so that it saves for backward what it says.

    If the compiler traced into it, it would merge recomputation in backward with the forward pass (it removes common
    subexpressions), and the memory would be back. The kernels inside are the same as in eager mode.

    Args:
        name: In this package's namespace of torch's library.
        arguments: Its schema's arguments; it returns a list of tensors.
        run: Its implementation.
        shapes: Returns empty tensors of the results' shapes and dtypes.
        save: Saves inputs and results for backward: called with a context, the inputs and the results.
        gradients: Its backward, called with that context and the gradients of the results.
    """
    schema = f"({arguments}) -> Tensor[]"
    operator = library.custom_op(f"lightning_llm::{name}", run, mutates_args=(), schema=schema)
    operator.register_fake(shapes)
    if gradients is not None:
        operator.register_autograd(gradients, setup_context=save)
    return operator
