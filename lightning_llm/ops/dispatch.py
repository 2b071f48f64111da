"""Choice of what runs: dtype of matmuls, how they are added up, and whether Triton kernels do the elementwise work."""

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from lightning_llm.ops import traced


def matmul_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matmuls with ``x``: its own, or autocast's (which leaves float64 alone)."""
    is_cast = x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type)
    return torch.get_autocast_dtype(x.device.type) if is_cast else x.dtype


def matmul_into(out: Tensor, left: Tensor, right: Tensor, *, accumulate: bool) -> None:
    """Computes ``out = left @ right``, or ``out += left @ right`` to accumulate.

    ``out`` has the dtype of the factors or, so that no bits of a sum are lost, a wider one. On CUDA the matmul itself
    gives that, and adds to ``out`` where it can; elsewhere each product is rounded to the dtype of the factors first.
    """
    if out.dtype == left.dtype:
        out.addmm_(left, right) if accumulate else torch.mm(left, right, out=out)
    elif traced.current() is not None and traced.device_type(left) == "cuda":
        if accumulate:  # whether the matmul can add is known to a GPU alone
            out.add_(out.new_empty(out.shape))
    elif left.is_cuda and torch.version.hip is None:
        if not accumulate:
            torch.mm(left, right, out.dtype, out=out)
        elif _has_values() and adds_in_matmul(left.dtype, left.device):
            torch.addmm(out, left, right, out.dtype, out=out)
        else:
            out.add_(torch.mm(left, right, out.dtype))
    else:
        product = torch.mm(left, right)
        out.add_(product) if accumulate else out.copy_(product)


def _has_values() -> bool:
    """Whether a matmul may be tried: not where a mode handles the operators, such as that of tensors without values."""
    return _get_current_dispatch_mode() is None


@cache
def adds_in_matmul(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a matmul of ``dtype`` can add to a float32 sum itself, with the bits of an addition after it; tried once.

    Some versions of torch and some devices cannot (https://github.com/pytorch/pytorch/issues/154086).
    """
    generator = torch.Generator(device).manual_seed(0)
    left, right, total = (torch.randn(768, 768, device=device, generator=generator) for _ in range(3))
    left, right = left.to(dtype), right.to(dtype)
    try:
        expected = total + torch.mm(left, right, torch.float32)
        torch.addmm(total, left, right, torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return torch.equal(total, expected)


class _TracedKernels:
    """Stands for ``kernels.py`` in a trace: the kernels write into what they are given, and allocate nothing."""

    @staticmethod
    def losses_of_rows(*args: Any) -> None:
        """Stand-in for ``kernels.losses_of_rows``."""

    @staticmethod
    def gate_forward(*args: Any) -> None:
        """Stand-in for ``kernels.gate_forward``."""

    @staticmethod
    def gate_backward(*args: Any) -> None:
        """Stand-in for ``kernels.gate_backward``."""


def kernels_for(tensor: Tensor) -> Any:
    """The Triton kernels (``kernels.py``), or ``None`` where PyTorch's operators must do the work.

    That is outside CUDA (unless ``TRITON_INTERPRET=1`` runs kernels anywhere), in float64, and without Triton.
    """
    if traced.current() is not None:
        return _TracedKernels if traced.device_type(tensor) == "cuda" and tensor.element_size() < 8 else None
    if not tensor.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return None
    return None if tensor.element_size() == 8 else _import_kernels()


@cache
def _import_kernels() -> ModuleType | None:
    return import_module("lightning_llm.ops.kernels") if find_spec("triton") else None
