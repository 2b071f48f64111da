"""Matmuls of the operators: in which dtype they are, and how they are summed in a wider one."""

import torch
from torch import Tensor


def matmul_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matmuls with ``x``: its own, or autocast's (which leaves float64 alone)."""
    device = x.device.type
    if x.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def matmul_into(out: Tensor, left: Tensor, right: Tensor, *, accumulate: bool) -> None:
    """Computes ``out = left @ right``, or ``out += left @ right`` to accumulate.

    Args:
        out: (rows, columns), of the factors' dtype or, so that no bits of a sum are lost, of a wider one.
        left: (rows, inner).
        right: (inner, columns).
        accumulate: Whether to add to what ``out`` holds.
    """
    if out.dtype == left.dtype:
        out.addmm_(left, right) if accumulate else torch.mm(left, right, out=out)
    else:
        product = torch.mm(left, right)
        out.add_(product) if accumulate else out.copy_(product)
