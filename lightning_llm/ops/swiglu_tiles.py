"""How the memory-optimized SwiGLU cuts its work into tiles. ``swiglu.py`` derives the formulas.

Forward iterates over blocks of tokens at the full intermediate width: each row of the output is then one matmul, and
no sum crosses blocks. Backward iterates over chunks of the intermediate width: each weight gradient is then written
once, and only dx is a sum over chunks. Long inputs are cut into blocks of tokens as well, and the weight gradients
become sums over blocks. All these sums are in float32 at least, since bf16 would lose their last bits. Buffers are
allocated once for all tiles, so that their size does not grow with the number of tokens.

The elementwise part takes one pass over memory. On CUDA a Triton kernel does it (``kernels.py``). Elsewhere, and
without Triton, it is a few in-place PyTorch operators: tiles are small enough to stay in cache from one operator to the
next, so that host memory is still read and written once. Measured on 2 cores of an AMD EPYC (Zen 5) for 4096 × 4096
elements in tiles of 4096 × 512: 4 ms forward and 13 ms backward in float32, where the operators that autograd calls
took 101 ms with their allocations.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_llm.ops import sizes
from lightning_llm.ops.dispatch import kernels_for, matmul_into
from lightning_llm.ops.norm import inverse_rms, normalize, normalize_backward
from lightning_llm.ops.traced import device_type


class Weights(NamedTuple):
    """The parameters: gate and up (intermediate, hidden), down (hidden, intermediate), norm (hidden,) or ``None``."""

    gate: Tensor
    up: Tensor
    down: Tensor
    norm: Tensor | None


class Options(NamedTuple):
    """The norm's epsilon, the chunks of the intermediate width, the dtype of the matmuls."""

    norm_eps: float
    num_chunks: int | None
    dtype: torch.dtype


def swiglu_forward(x: Tensor, weights: Weights, options: Options, *, saves: bool) -> list[Tensor]:
    """The output y (…, hidden), and if ``saves`` g and u (tokens, intermediate), all in the dtype of the matmuls.

    ``y`` is no view: FSDP2 attaches its hooks to what a module returns, and a view would lose them under ``y += x``.
    """
    y = x.new_empty(x.shape, dtype=options.dtype)
    x, flat_y = flat(x), flat(y)
    tokens = x.shape[0]
    width = weights.gate.shape[0]
    gate, up, down = (weight.to(options.dtype) for weight in weights[:3])
    rows = sizes.forward_rows(tokens, width, options.dtype.itemsize, device_type(x))
    g, u = (x.new_empty(tokens if saves else rows, width, dtype=options.dtype) for _ in range(2))
    a = x.new_empty(rows, width, dtype=options.dtype) if saves else g  # without saving, a overwrites g
    for block in sizes.slices(tokens, rows):
        size = block.stop - block.start
        target = block if saves else slice(0, size)
        h = normalized(_part(x, block), weights.norm, options)
        of_gate = torch.mm(h, gate.t(), out=_part(g, target))
        of_up = torch.mm(h, up.t(), out=_part(u, target))
        torch.mm(gate_forward(of_gate, of_up, _part(a, slice(0, size))), down.t(), out=_part(flat_y, block))
    return [y, g, u] if saves else [y]


def swiglu_backward(
    dy: Tensor, x: Tensor, weights: Weights, saved: list[Tensor], options: Options, needed: tuple[bool, ...]
) -> list[Tensor | None]:
    """The gradients of x, gate, up, down and norm, each in the dtype of its tensor.

    Args:
        dy: (…, hidden), the gradient of the output.
        x: (…, hidden), the input.
        weights: The parameters.
        saved: g and u, or nothing: then they are recomputed.
        options: As in forward.
        needed: Which of the gradients are needed; the others are ``None``, and no matmul is spent on them.
    """
    need_x, *need_weights, need_norm = needed
    dtype = options.dtype
    device = device_type(x)
    dx = x.new_empty(x.shape) if need_x else None
    flat_dx = None if dx is None else flat(dx)
    x = flat(x)
    dy = flat(dy.to(dtype))
    tokens, hidden = x.shape
    width = weights.gate.shape[0]
    rows = sizes.backward_rows(tokens, width, dtype.itemsize, device, weights.gate.dtype.itemsize)
    columns = sizes.chunk_columns(rows, width, dtype.itemsize, device, options.num_chunks)
    wide = torch.promote_types(dtype, torch.float32)
    d_weights = [
        x.new_empty(weight.shape, dtype=weight.dtype if rows >= tokens else wide) if need else None
        for weight, need in zip(weights[:3], need_weights, strict=True)
    ]
    d_norm = x.new_zeros(hidden, dtype=wide) if need_norm else None
    # the gradient of the normalized input: of one chunk, or a sum over chunks
    dh_dtype = dtype if columns >= width and weights.norm is None else wide
    size = rows * columns
    first_size = max(size, rows * hidden) if dh_dtype != dtype else size  # holds a, then dh of one chunk
    buffers = [x.new_empty(n, dtype=dtype) for n in (first_size, *[size] * (2 if saved else 4))]
    work = _Work(flat_dx, d_weights, d_norm, dh_dtype if need_x or need_norm else None, columns, buffers)
    for block in sizes.slices(tokens, rows):
        _add_block(block, x, dy, weights, saved, options, work)
    pairs = zip((*d_weights, d_norm), weights, strict=True)
    return [dx, *(None if d is None or weight is None else d.to(weight.dtype) for d, weight in pairs)]


class _Work(NamedTuple):
    """Tensors that the tiles write: the gradients, ``None`` where not needed, and buffers.

    Attributes:
        dx: (tokens, hidden); each block of tokens writes its rows.
        d_weights: Of gate, up and down.
        d_norm: (hidden,).
        dh_dtype: Of the gradient of the normalized input, which is a sum over chunks.
        columns: Of a chunk of the intermediate width.
        buffers: Of one tile each: a, da, dg, and g and u where they are recomputed.
    """

    dx: Tensor | None
    d_weights: list[Tensor | None]
    d_norm: Tensor | None
    dh_dtype: torch.dtype | None
    columns: int
    buffers: list[Tensor]


def _add_block(
    block: slice, x: Tensor, dy: Tensor, weights: Weights, saved: list[Tensor], options: Options, work: _Work
) -> None:
    """Add one block of tokens to the gradients, a chunk of the intermediate width at a time.

    Args:
        block: Its tokens.
        x: (tokens, hidden), the input.
        dy: (tokens, hidden), the gradient of the output.
        weights: The parameters.
        saved: g and u, or nothing.
        options: As in forward.
        work: The gradients and buffers.
    """
    dtype, norm = options.dtype, weights.norm
    need_gating = work.dh_dtype is not None or work.d_weights[0] is not None or work.d_weights[1] is not None
    x = _part(x, block)
    dy = _part(dy, block).contiguous()
    dx = None if work.dx is None else _part(work.dx, block)
    h = normalized(x, norm, options)
    dh = None
    if work.dh_dtype is not None:  # it is dx itself where that is no further sum and has its dtype
        is_dx = dx is not None and norm is None and dx.dtype == work.dh_dtype
        dh = dx if is_dx else x.new_empty(x.shape, dtype=work.dh_dtype)
    for chunk in sizes.slices(weights.gate.shape[0], work.columns):
        gate, up = (_part(weight, chunk).to(dtype) for weight in weights[:2])
        shape = x.shape[0], chunk.stop - chunk.start
        a, da, dg, *gu = (_part(buffer, slice(0, shape[0] * shape[1])).view(shape) for buffer in work.buffers)
        if saved:
            g, u = (_columns(_part(tensor, block), chunk) for tensor in saved)
        else:
            g, u = torch.mm(h, gate.t(), out=gu[0]), torch.mm(h, up.t(), out=gu[1])
        if need_gating:
            torch.mm(dy, _columns(weights.down, chunk).to(dtype), out=da)
            gate_backward(g, u, da, a, dg)
        else:
            gate_forward(g, u, a)
        du = da  # in the same buffer
        pairs = ((dg.t(), h), (du.t(), h), (dy.t(), a))
        for d_weight, (left, right), by_columns in zip(work.d_weights, pairs, (False, False, True), strict=True):
            if d_weight is not None:
                part = _columns(d_weight, chunk) if by_columns else _part(d_weight, chunk)
                matmul_into(part, left, right, accumulate=block.start > 0)
        if dh is not None:
            _add_chunk(dh, dg, du, gate, up, work.buffers[0], accumulate=chunk.start > 0)  # a is not needed anymore
    if dh is not None and norm is not None:
        normalize_backward(dh, x, norm, inverse_rms(x, options.norm_eps), dx, work.d_norm)
    elif dh is not None and dx is not None and dh is not dx:
        dx.copy_(dh)


def _add_chunk(
    dh: Tensor, dg: Tensor, du: Tensor, gate: Tensor, up: Tensor, buffer: Tensor, *, accumulate: bool
) -> None:
    """Add a chunk's part of the gradient of the normalized input; the buffer holds it where the sum is wider."""
    if dh.dtype == dg.dtype:
        matmul_into(dh, dg, gate, accumulate=accumulate)
        dh.addmm_(du, up)
        return
    of_chunk = buffer[: dh.numel()].view(dh.shape)
    torch.mm(dg, gate, out=of_chunk).addmm_(du, up)
    dh.add_(of_chunk) if accumulate else dh.copy_(of_chunk)


def gate_forward(g: Tensor, u: Tensor, out: Tensor) -> Tensor:
    """Computes SiLU(g) ⊙ u, (rows, columns) with any strides, into ``out``: ``g`` itself may be it, ``u`` may not."""
    if fused := kernels_for(g):
        fused.gate_forward(g, u, out)
        return out
    torch.ops.aten.silu.out(g, out=out)
    return out.mul_(u)


def gate_backward(g: Tensor, u: Tensor, da: Tensor, a: Tensor, dg: Tensor) -> None:
    """The factors of backward's matmuls, from the gradient ``da`` of a = SiLU(g) ⊙ u.

    ``g`` and ``u`` are only read: at level 0 they belong to autograd. Results are rounded where autograd rounds them.

    Args:
        g: (rows, columns), any strides.
        u: As ``g``.
        da: (rows, columns), overwritten with du = da ⊙ SiLU(g).
        a: (rows, columns), overwritten with SiLU(g) ⊙ u.
        dg: (rows, columns), overwritten with da ⊙ u ⊙ SiLU'(g).
    """
    if fused := kernels_for(g):
        fused.gate_backward(g, u, da, a, dg)
        return
    torch.ops.aten.silu.out(g, out=a)
    torch.mul(da, u, out=dg)
    da.mul_(a)
    a.mul_(u)
    torch.ops.aten.silu_backward.grad_input(dg, g, grad_input=dg)


def normalized(x: Tensor, norm: Tensor | None, options: Options) -> Tensor:
    """(rows, hidden): the input of the matmuls."""
    return x.to(options.dtype) if norm is None else normalize(x, norm, options.norm_eps, options.dtype)[0]


def _part(tensor: Tensor, rows: slice) -> Tensor:
    """The rows of a tensor; the tensor itself where it has no others, since a small step waits for each view."""
    return tensor if rows.stop - rows.start == tensor.shape[0] else tensor[rows]


def _columns(matrix: Tensor, columns: slice) -> Tensor:
    return matrix if columns.stop - columns.start == matrix.shape[1] else matrix[:, columns]


def flat(tensor: Tensor) -> Tensor:
    """(…, hidden) -> (tokens, hidden), a view where the strides allow it."""
    return tensor.reshape(-1, tensor.shape[-1])
