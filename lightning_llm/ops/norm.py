"""RMSNorm in one Function (Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", equation 4).

With r = 1 / √(mean(x²) + ε) per row, x̂ = r x and y = w ⊙ x̂, for a given dy:

    dw = Σ_rows dy ⊙ x̂,    dx = r (w ⊙ dy - x̂ · mean(w ⊙ dy ⊙ x̂))

Saved for backward: x in its own dtype, and r, one number per row. Computed in float32 at least, with the weight as it
is; the result has the dtype of autocast, so that the projections after it need not cast it one by one. On CUDA torch's
own kernel does this for x and w of one dtype. Autocast would have it run on, and save, a float32 copy of x (4 bytes per
element of queries and keys after bf16 projections, and of the residual stream under FSDP2), so autocast is off around
it. torch's CPU form saves more and is slower: at 2048 × 128 its backward took 536 µs in float32 and 1,888 in bf16,
where this takes 143 and 175 (AMD Zen 5, 2 cores, torch 2.13). The rows go through in blocks that stay in cache from one
operator to the next: 16,384 × 384 with a result in bf16 takes 3.2 + 7.4 ms so, all rows at once 4.9 + 14.8; 2048 × 128,
one block, 0.13 more for the cutting.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_llm.ops import sizes
from lightning_llm.ops.autograd import differentiable_once
from lightning_llm.ops.dispatch import matmul_dtype
from lightning_llm.ops.traced import device_type


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalizes the last dimension by its root mean square.

    Args:
        x: (…, size).
        weight: (size,).
        eps: Added to the mean square.

    Returns:
        As ``x``, in autocast's dtype where autocast is on.
    """
    dtype = matmul_dtype(x)
    if torch.compiler.is_compiling():  # written out, it is merged with the operators around it
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(dtype)
    if device_type(x) == "cuda" and x.dtype == weight.dtype:
        with torch.autocast("cuda", enabled=False):
            normalized: Tensor = F.rms_norm(x, weight.shape, weight, eps)
        return normalized.to(dtype)
    return rms_norm_function(x, weight, eps, dtype, save_scale=True)


def rms_norm_function(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, *, save_scale: bool) -> Tensor:
    """RMSNorm in ``dtype`` that saves x, and r unless backward is to recompute it."""
    out: Tensor = _RMSNorm.apply(x, weight, eps, dtype, save_scale)  # type: ignore[no-untyped-call]
    return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, save_scale: bool) -> Tensor:
        out, scale = normalize(x, weight, eps, dtype)
        ctx.save_for_backward(x, weight, scale if save_scale else None)
        ctx.eps = eps
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        scale = inverse_rms(x, ctx.eps) if scale is None else scale
        d_x = x.new_empty(x.shape) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=scale.dtype) if ctx.needs_input_grad[1] else None
        normalize_backward(dy, x, weight, scale, d_x, d_weight)
        return d_x, None if d_weight is None else d_weight.to(weight.dtype), None, None, None


def normalize(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """RMSNorm without autograd: w ⊙ x̂ (…, size) in ``dtype``, and r (…, 1) in float32 at least."""
    out = x.new_empty(x.shape, dtype=dtype)
    scale = x.new_empty(*x.shape[:-1], 1, dtype=torch.promote_types(x.dtype, torch.float32))
    blocks, longest = _in_blocks(x, out, scale)
    buffer = None if dtype == scale.dtype else x.new_empty(longest, x.shape[-1], dtype=scale.dtype)
    for part, y, r in blocks:
        inverse_rms(part, eps, out=r)
        wide = y if buffer is None else buffer[: len(part)]
        torch.mul(part, r, out=wide).mul_(weight)
        if buffer is not None:
            y.copy_(wide)
    return out, scale


def inverse_rms(x: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """The factor r of each row: (…, size) -> (…, 1), in float32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide, out=out)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def normalize_backward(
    dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor, d_x: Tensor | None, d_weight: Tensor | None
) -> None:
    """The gradients of RMSNorm.

    Args:
        dy: (…, size), the gradient of the result.
        x: (…, size), the input.
        weight: (size,).
        scale: (…, 1), r.
        d_x: (…, size), contiguous, overwritten with the gradient of ``x``; ``None`` where it is not needed.
        d_weight: (size,), the gradient of ``weight`` is added to it; ``None`` where it is not needed.
    """
    blocks, longest = _in_blocks(x, dy, scale, x if d_x is None else d_x)
    wide_weight = weight.to(scale.dtype)
    size = x.shape[-1]
    normalized_buffer, product_buffer = (x.new_empty(longest, size, dtype=scale.dtype) for _ in range(2))
    g_buffer = None if dy.dtype == scale.dtype else x.new_empty(longest, size, dtype=scale.dtype)
    for part, g, r, d_part in blocks:
        normalized, product = normalized_buffer[: len(part)], product_buffer[: len(part)]
        wide = g if g_buffer is None else g_buffer[: len(part)].copy_(g)
        torch.mul(part, r, out=normalized)
        torch.mul(wide, normalized, out=product)
        if d_weight is not None:
            d_weight += product.sum(dim=0)
        if d_x is not None:
            mean = torch.mv(product, wide_weight, out=scale.new_empty(len(part)))  # autocast leaves ``out=`` alone
            mean = mean.div_(size).unsqueeze(-1)
            torch.mul(wide, wide_weight, out=product).addcmul_(normalized, mean, value=-1)
            if d_x.dtype == product.dtype:
                torch.mul(product, r, out=d_part)
            else:
                d_part.copy_(product.mul_(r))


def _in_blocks(*tensors: Tensor) -> tuple[Iterator[tuple[Tensor, ...]], int]:
    """The same rows of each tensor (…, size), block by block, and how many rows the longest block has."""
    rows = [tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors]
    size = sizes.norm_rows(rows[0].shape[1], device_type(rows[0]))
    blocks = (tuple(tensor[part] for tensor in rows) for part in sizes.slices(len(rows[0]), size))
    return blocks, min(size, len(rows[0]))
