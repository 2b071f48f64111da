"""Clipping of gradients by their global norm, for many tensors at once and without waiting for the device.

Pascanu et al. 2013, "On the difficulty of training recurrent neural networks", algorithm 1.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_llm.optim.base import group_by, local_shard


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, eps: float = 1e-6, *, factor: Tensor | float = 1.0
) -> Tensor:
    """Scales the gradients in place by ``max_norm / (norm + eps)`` if their global 2-norm is above ``max_norm``.

    For sharded gradients (``DTensor``) it is the norm of the whole, at one number sent; each process scales its shard.

    Args:
        parameters: A tensor or any iterable of them, on one or several devices; those without a gradient are skipped.
        max_norm: The largest norm allowed, above 0; ``inf`` only measures.
        eps: Keeps the scaled norm below ``max_norm`` in spite of rounding.
        factor: Multiplies the gradients first, in the same pass over them; the norm is that of the product.

    Returns:
        The norm before clipping, a tensor without dimensions on the device of the first gradient, in at least float32.
        Nothing waits for it on CUDA: read it when it is needed. A norm that is NaN does not clip.

    Raises:
        ValueError: If ``max_norm`` is not above 0.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be above 0, got {max_norm!r}: use inf to measure without clipping")
    tensors = [parameters] if isinstance(parameters, Tensor) else parameters
    grads = [tensor.grad for tensor in tensors if tensor.grad is not None]
    with torch.no_grad():
        norm = _global_norm(grads)
        factor = factor.to(norm) if isinstance(factor, Tensor) else factor
        norm = norm * factor
        if norm.device.type == "cpu" and not norm > max_norm and factor == 1:  # reading costs nothing, and saves a pass
            return norm
        scale = torch.where(norm > max_norm, max_norm / (norm + eps), 1.0) * factor
        for (device, _), alike in group_by(map(local_shard, grads), _device_and_dtype).items():
            torch._foreach_mul_(alike, scale.to(device, non_blocking=device.type == "cuda"))
    return norm


def _global_norm(grads: list[Any]) -> Tensor:
    """Over all processes, which must have the same parameters sharded."""
    by_sharding = group_by(
        grads, lambda grad: (grad.device_mesh, tuple(grad.placements)) if hasattr(grad, "to_local") else None
    )
    if by_sharding.keys() <= {None}:
        return _norm(grads)
    parts = []
    for sharding, alike in by_sharding.items():
        norm = _norm([local_shard(grad) for grad in alike])
        parts.append(norm if sharding is None else _over_processes(norm, alike[0]))
    total: Tensor = torch.linalg.vector_norm(torch.stack([part.to(parts[0]) for part in parts]))
    return total


def _norm(grads: list[Tensor]) -> Tensor:
    if not grads:
        return torch.tensor(0.0)
    norms: list[Tensor] = []
    for (_, dtype), alike in group_by(grads, _device_and_dtype).items():
        # A norm in bfloat16 would have 8 bits of the sum.
        norms += torch._foreach_norm(alike, 2, dtype=torch.promote_types(dtype, torch.float32))
    widest = max((norm.dtype for norm in norms), key=lambda dtype: dtype.itemsize)
    device = norms[0].device
    flat = [norm.to(device, widest, non_blocking=device.type == "cuda") for norm in norms]  # else it is not there yet
    total: Tensor = torch.linalg.vector_norm(torch.stack(flat))
    return total


def _device_and_dtype(tensor: Tensor) -> tuple[torch.device, torch.dtype]:
    return tensor.device, tensor.dtype


def _over_processes(norm: Tensor, grad: Any) -> Tensor:
    """The norm of the whole, from those of the shards, of tensors that are sharded as ``grad`` is."""
    from torch.distributed.tensor import Partial, Replicate  # half a second, which only sharded runs wait for

    sums = [Partial() if placement.is_shard() else Replicate() for placement in grad.placements]
    squares = type(grad).from_local(norm.square(), grad.device_mesh, sums, run_check=False)
    root: Tensor = squares.full_tensor().sqrt()
    return root
