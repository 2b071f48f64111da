"""Clipping of gradients by their global norm, for many tensors at once and without waiting for the device.

Pascanu et al. 2013, "On the difficulty of training recurrent neural networks", algorithm 1.
"""

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

Kind = tuple[torch.device, torch.dtype]


def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float, eps: float = 1e-6) -> Tensor:
    """Scales the gradients in place by ``max_norm / (norm + eps)`` if their global 2-norm is above ``max_norm``.

    Of sharded gradients (``DTensor``) the norm is that of the whole, for one number sent; each process scales its part.

    Args:
        parameters: A tensor or any iterable of them, on one or several devices; those without a gradient are skipped.
        max_norm: The largest norm allowed, above 0; ``inf`` only measures.
        eps: Keeps the scaled norm below ``max_norm`` in spite of rounding.

    Returns:
        The norm before clipping, a tensor without dimensions on the device of the first gradient, in at least float32.
        Nothing waits for it on CUDA: read it when it is needed. A norm that is not a number leaves the gradients alone.

    Raises:
        ValueError: If ``max_norm`` is not above 0.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be above 0, got {max_norm!r}: use inf to measure without clipping")
    tensors = [parameters] if isinstance(parameters, Tensor) else parameters
    grads_of = [tensor.grad for tensor in tensors if tensor.grad is not None]
    by_kind: dict[Kind, list[Tensor]] = {}
    with torch.no_grad():
        for grad in grads_of:
            local = _local(grad)
            by_kind.setdefault((local.device, local.dtype), []).append(local)
        norm = _global_norm(grads_of)
        if norm.device.type == "cpu" and not norm > max_norm:  # can be read for nothing, and spares a pass
            return norm
        scale = torch.where(norm > max_norm, max_norm / (norm + eps), 1.0)
        for (device, _), grads in by_kind.items():
            torch._foreach_mul_(grads, scale.to(device, non_blocking=True))
    return norm


def _global_norm(grads: list[Any]) -> Tensor:
    """Over all processes, which must have the same parameters sharded."""
    by_spread: dict[Any, list[Any]] = {}
    for grad in grads:
        spread = (grad.device_mesh, tuple(grad.placements)) if hasattr(grad, "to_local") else None
        by_spread.setdefault(spread, []).append(grad)
    if by_spread.keys() <= {None}:
        return _norm(grads)
    parts = []
    for spread, alike in by_spread.items():
        norm = _norm([_local(grad) for grad in alike])
        parts.append(norm if spread is None else _over_processes(norm, alike[0]))
    total: Tensor = torch.linalg.vector_norm(torch.stack([part.to(parts[0]) for part in parts]))
    return total


def _norm(grads: list[Tensor]) -> Tensor:
    if not grads:
        return torch.tensor(0.0)
    by_kind: dict[Kind, list[Tensor]] = {}
    for grad in grads:
        by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
    # A norm in bfloat16 would keep 8 bits of the sum.
    norms = [
        torch._foreach_norm(alike, 2, dtype=torch.promote_types(dtype, torch.float32))
        for (_, dtype), alike in by_kind.items()
    ]
    first = norms[0][0].device
    widest = torch.float64 if any(dtype == torch.float64 for _, dtype in by_kind) else torch.float32
    flat = [norm.to(first, widest, non_blocking=True) for norm in chain.from_iterable(norms)]
    total: Tensor = torch.linalg.vector_norm(torch.stack(flat))
    return total


def _over_processes(norm: Tensor, grad: Any) -> Tensor:
    """The norm of the whole, from those of the parts, of tensors that are spread as ``grad`` is."""
    from torch.distributed.tensor import Partial, Replicate  # half a second, which only sharded runs wait for

    sums = [Partial() if placement.is_shard() else Replicate() for placement in grad.placements]
    squares = type(grad).from_local(norm.square(), grad.device_mesh, sums, run_check=False)
    root: Tensor = squares.full_tensor().sqrt()
    return root


def _local(tensor: Any) -> Tensor:
    """This process's part of a ``DTensor``, or the tensor."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local
