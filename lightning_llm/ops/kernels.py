"""Triton kernels of the operators. Everything between load and store is float32.

SwiGLU: the elementwise half in one pass, with the signatures of ``swiglu_tiles.py``. Each program takes one stretch of
one row. Offsets are 64-bit: a row index times a stride passes 2³¹ at 131,072 tokens of width 16,384.

Cross-entropy: from a chunk of logits to losses and dz (``loss_chunks.py``), one program per row. The first pass over
the row finds the maximum and the sum of exponentials together, rescaling the sum whenever the maximum grows (Milakov
and Gimelshein 2018, "Online normalizer calculation for softmax", algorithm 3). The second writes dz over the logits.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

ROW_BLOCK, VOCAB_BLOCK = 1024, 4096


@triton.jit  # type: ignore[untyped-decorator]
def _gate_forward(g_ptr, u_ptr, out_ptr, g_row, u_row, out_row, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    g = tl.load(g_ptr + row * g_row + column, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + row * u_row + column, mask=mask, other=0.0).to(tl.float32)
    a = g * tl.sigmoid(g) * u
    tl.store(out_ptr + row * out_row + column, a.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _gate_backward(  # type: ignore[no-untyped-def]
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


@triton.jit  # type: ignore[untyped-decorator]
def _losses_of_rows(  # type: ignore[no-untyped-def]
    z_ptr,
    bias_ptr,
    index_ptr,
    weight_ptr,
    loss_ptr,
    z_row,
    vocab,
    padded,
    z_loss,
    smoothing,
    tokens,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * z_row
    target = tl.load(index_ptr + row)
    known = (target >= 0) & (target < vocab)  # where it is not, the loss is NaN rather than a wrong number
    target_logit = tl.load(z_ptr + target, mask=known, other=float("nan")).to(tl.float32)
    if bias_ptr is not None:
        target_logit += tl.load(bias_ptr + target, mask=known, other=0.0)

    columns = tl.arange(0, BLOCK)
    largest = float("-inf")
    total = 0.0
    z_sum = 0.0
    for start in range(0, vocab, BLOCK):
        mask = start + columns < vocab
        z = tl.load(z_ptr + start + columns, mask=start + columns < padded).to(tl.float32)
        z = tl.where(mask, z, float("-inf"))
        if bias_ptr is not None:
            z += tl.load(bias_ptr + start + columns, mask=mask, other=0.0)
        larger = tl.maximum(largest, tl.max(z))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(z - larger))
        largest = larger
        if smoothing is not None:
            z_sum += tl.sum(tl.where(start + columns < tokens, z, 0.0))
    if smoothing is not None:
        target_logit += smoothing * (z_sum / tokens - target_logit)
    log_z = largest + tl.log(total)
    tl.store(loss_ptr + row, (largest - target_logit) + tl.log(total) + z_loss * log_z * log_z)

    if weight_ptr is not None:
        weight = tl.load(weight_ptr + row)
        factor = weight * (1.0 + 2.0 * z_loss * log_z)
        for start in range(0, vocab, BLOCK):
            mask = start + columns < vocab
            z = tl.load(z_ptr + start + columns, mask=start + columns < padded).to(tl.float32)
            z = tl.where(mask, z, float("-inf"))
            if bias_ptr is not None:
                z += tl.load(bias_ptr + start + columns, mask=mask, other=0.0)
            dz = factor * tl.exp(z - log_z)
            if smoothing is not None:
                share = tl.where(start + columns == target, 1.0 - smoothing, 0.0)
                dz -= weight * tl.where(start + columns < tokens, share + smoothing / tokens, 0.0)
            else:
                dz = tl.where(start + columns == target, dz - weight, dz)
            tl.store(z_ptr + start + columns, dz.to(z_ptr.dtype.element_ty), mask=start + columns < padded)


def losses_of_rows(
    z: Tensor,
    bias: Tensor | None,
    index: Tensor,
    weights: Tensor | None,
    z_loss: float,
    losses: Tensor,
    smoothing: float = 0.0,
    tokens: int | None = None,
    padded: int | None = None,
) -> None:
    """Compute like ``loss_chunks._losses_of_rows``, into ``losses`` (rows,), without the gradient of the bias.

    With ``smoothing``, the first ``tokens`` columns share it. The kernel may touch ``padded`` columns of each row: it
    reads 16 bytes at once if their number is a multiple of 16.
    """
    assert z.stride(1) == 1
    tensors = z, *(None if tensor is None else tensor.contiguous() for tensor in (bias, index, weights)), losses
    rows, vocab = z.shape
    block = min(VOCAB_BLOCK, triton.next_power_of_2(z.shape[1]))
    smoothed = (smoothing, tokens) if smoothing else (None, None)
    with torch.cuda.device_of(z):  # type: ignore[no-untyped-call]
        _losses_of_rows[(rows,)](
            *tensors, z.stride(0), vocab, padded or vocab, z_loss, *smoothed, BLOCK=block, num_warps=8
        )


def _launch_gate(kernel: triton.JITFunction, *tensors: Tensor) -> None:
    assert all(tensor.stride(1) == 1 for tensor in tensors)
    rows, columns = tensors[0].shape
    strides = (tensor.stride(0) for tensor in tensors)
    block = min(ROW_BLOCK, triton.next_power_of_2(columns))
    with torch.cuda.device_of(tensors[0]):  # type: ignore[no-untyped-call]
        kernel[rows, triton.cdiv(columns, block)](*tensors, *strides, columns, BLOCK=block)


# As ``swiglu_tiles.gate_forward`` and ``gate_backward``; columns must be contiguous.
gate_forward, gate_backward = partial(_launch_gate, _gate_forward), partial(_launch_gate, _gate_backward)
