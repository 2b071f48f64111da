"""Clipping of gradients by their global norm, for many tensors at once and without waiting for the device.

Pascanu et al. 2013, "On the difficulty of training recurrent neural networks", algorithm 1.
"""

from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor


def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float, eps: float = 1e-6) -> Tensor:
    """Scales the gradients in place by ``max_norm / (norm + eps)`` if their global 2-norm is above ``max_norm``.

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
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    with torch.no_grad():
        for tensor in tensors:
            if tensor.grad is not None:
                by_kind.setdefault((tensor.grad.device, tensor.grad.dtype), []).append(tensor.grad)
        norm = _global_norm(by_kind)
        if norm.device.type == "cpu" and not norm > max_norm:  # can be read for nothing, and spares a pass
            return norm
        scale = torch.where(norm > max_norm, max_norm / (norm + eps), 1.0)
        for (device, _), grads in by_kind.items():
            torch._foreach_mul_(grads, scale.to(device, non_blocking=True))
    return norm


def _global_norm(by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]]) -> Tensor:
    if not by_kind:
        return torch.tensor(0.0)
    # A norm in bfloat16 would keep 8 bits of the sum.
    norms = [
        torch._foreach_norm(grads, 2, dtype=torch.promote_types(dtype, torch.float32))
        for (_, dtype), grads in by_kind.items()
    ]
    first = norms[0][0].device
    widest = torch.float64 if any(dtype == torch.float64 for _, dtype in by_kind) else torch.float32
    flat = [norm.to(first, widest, non_blocking=True) for norm in chain.from_iterable(norms)]
    total: Tensor = torch.linalg.vector_norm(torch.stack(flat))
    return total
