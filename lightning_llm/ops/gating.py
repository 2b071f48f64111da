"""The elementwise half of SwiGLU: a = SiLU(g) ⊙ u and its derivatives, in one pass over memory.

On CUDA a Triton kernel does the pass (``kernels/swiglu.py``). Elsewhere, and where Triton is missing, it is a few
in-place PyTorch operators: the callers hand over tiles small enough to stay in cache from one operator to the next, so
main memory is read and written once all the same. Measured on 2 cores of an AMD EPYC (Zen 5), 4096 × 4096 elements in
tiles of 4096 × 512: 4 ms forward and 13 ms backward in float32, where the same operators over whole matrices took
101 ms with their allocations; a matrix product of the model at that size takes 180 ms.
"""

from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F


def gate_forward(g: Tensor, u: Tensor, out: Tensor) -> Tensor:
    """SiLU(g) ⊙ u.

    Args:
        g: (rows, columns), any strides.
        u: (rows, columns), any strides.
        out: (rows, columns); may be ``g`` itself, not ``u``.

    Returns:
        ``out``.
    """
    if kernels := _kernels(g):
        kernels.gate_forward(g, u, out)
        return out
    return torch.ops.aten.silu.out(g, out=out).mul_(u)


def gate_backward(g: Tensor, u: Tensor, da: Tensor, out: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the backward of a = SiLU(g) ⊙ u needs for the matrix products, from the gradient ``da``.

    ``g`` and ``u`` are only read: at level 0 they belong to autograd.

    Args:
        g: (rows, columns), any strides.
        u: (rows, columns), any strides.
        da: (rows, columns), overwritten with du.
        out: (rows, columns), overwritten with a.
        scratch: (rows, columns), overwritten with dg.

    Returns:
        a = SiLU(g) ⊙ u, dg = da ⊙ u ⊙ SiLU'(g), du = da ⊙ SiLU(g).
    """
    if kernels := _kernels(g):
        kernels.gate_backward(g, u, da, out, scratch)
        return out, scratch, da
    torch.ops.aten.silu.out(g, out=out)
    torch.mul(da, u, out=scratch)
    da.mul_(out)
    out.mul_(u)
    torch.ops.aten.silu_backward.grad_input(scratch, g, grad_input=scratch)
    return out, scratch, da


def _kernels(tensor: Tensor) -> ModuleType | None:
    if not tensor.is_cuda:
        return None
    from lightning_llm.ops import kernels

    return kernels.load("swiglu")


def silu(x: Tensor) -> Tensor:
    """SiLU(x) = x σ(x)."""
    return F.silu(x)
