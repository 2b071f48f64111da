"""Rotation of pairs of dimensions, forward and back by one Function (Su et al. 2021, "RoFormer", section 3.2.2).

With left and right halves l and r of a head, (l cos - r sin, r cos + l sin); the gradient turns by the opposite angle.
Each half is written in place, by two operators, and nothing but cosines and sines is saved. Written out, it takes three
operators a half with their results and ``cat``, and autograd as many again for the way back. For 96 heads × 256 × 64 on
one thread, that takes 4.7 ms in bf16 and 9.3 in float32, and this takes 1.7 and 3.9 (AMD Zen 4, torch 2.13).
"""

from typing import Any

import torch
from torch import Tensor

from lightning_llm.ops.traced import device_type


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns dimensions i and i + half of the last axis by the same angle; those after the two halves stay.

    Args:
        x: (…, size).
        cos: (…, half), of each angle.
        sin: As ``cos``.

    Returns:
        As ``x``: on CUDA with its strides, since the attention there reads (batch, seq, heads, size) as it is and
        writes its output alike; elsewhere contiguous, which its matmuls would copy to.
    """
    if torch.compiler.is_compiling():  # written out, it is merged with the operators around it
        half = cos.shape[-1]
        left = x[..., :half]
        right = x[..., half : 2 * half]
        rest = x[..., 2 * half :]
        return torch.cat((left * cos - right * sin, right * cos + left * sin, rest), dim=-1)
    out: Tensor = _Rotation.apply(x, cos, sin, 1)  # type: ignore[no-untyped-call]
    return out


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.sign = sign
        half = cos.shape[-1]
        out = torch.empty_like(x) if device_type(x) == "cuda" else x.new_empty(x.shape)
        first = out[..., :half]
        second = out[..., half : 2 * half]
        left = x[..., :half]
        right = x[..., half : 2 * half]
        torch.mul(left, cos, out=first).addcmul_(right, sin, value=-sign)
        torch.mul(right, cos, out=second).addcmul_(left, sin, value=sign)
        out[..., 2 * half :] = x[..., 2 * half :]
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        return _Rotation.apply(d_out, *ctx.saved_tensors, -ctx.sign), None, None, None  # type: ignore[no-untyped-call]
