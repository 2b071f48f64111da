"""The elementwise half of SwiGLU in one pass: see ``ops/swiglu_tiles.py``, whose signatures these functions share.

Each program takes one stretch of one row. Everything between load and store is float32. Offsets are 64-bit: a row
index times a stride passes 2³¹ at 131,072 tokens of width 16,384.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _forward(g_ptr, u_ptr, out_ptr, g_row, u_row, out_row, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    g = tl.load(g_ptr + row * g_row + column, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + row * u_row + column, mask=mask, other=0.0).to(tl.float32)
    a = g * tl.sigmoid(g) * u
    tl.store(out_ptr + row * out_row + column, a.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _backward(  # type: ignore[no-untyped-def]
    g_ptr, u_ptr, da_ptr, out_ptr, scratch_ptr, g_row, u_row, da_row, out_row, scratch_row, columns, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    g = tl.load(g_ptr + row * g_row + column, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + row * u_row + column, mask=mask, other=0.0).to(tl.float32)
    da = tl.load(da_ptr + row * da_row + column, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(g)
    silu = g * sigmoid
    dg = da * u * sigmoid * (1.0 + g * (1.0 - sigmoid))
    tl.store(out_ptr + row * out_row + column, (silu * u).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(scratch_ptr + row * scratch_row + column, dg.to(scratch_ptr.dtype.element_ty), mask=mask)
    tl.store(da_ptr + row * da_row + column, (da * silu).to(da_ptr.dtype.element_ty), mask=mask)


def gate_forward(g: Tensor, u: Tensor, out: Tensor) -> None:
    """As ``swiglu_tiles.gate_forward``; columns must be contiguous."""
    _launch(_forward, g, u, out)


def gate_backward(g: Tensor, u: Tensor, da: Tensor, out: Tensor, scratch: Tensor) -> None:
    """As ``swiglu_tiles.gate_backward``; columns must be contiguous."""
    _launch(_backward, g, u, da, out, scratch)


def _launch(kernel: triton.JITFunction, *tensors: Tensor) -> None:
    assert all(tensor.stride(1) == 1 for tensor in tensors)
    rows, columns = tensors[0].shape
    block = min(BLOCK, triton.next_power_of_2(columns))
    with torch.cuda.device_of(tensors[0]):  # type: ignore[no-untyped-call]
        kernel[rows, triton.cdiv(columns, block)](
            *tensors, *(tensor.stride(0) for tensor in tensors), columns, BLOCK=block
        )
