"""What runs: the dtype of matmuls, how they are added up, and whether Triton kernels do the elementwise work."""

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor


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
