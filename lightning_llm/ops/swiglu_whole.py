"""The memory-optimised SwiGLU for few tokens: whole matrices, each freed as soon as it is used.

With few tokens the weight gradients are the largest tensors of a backward pass. Tiles (``swiglu_tiles.py``) hold all
three of them, and their buffers, at once. Here each matrix product is a node of autograd's graph, as with plain linear
layers: a gradient is made, handed to its weight and, where gradients accumulate, freed before the next one is made.
Casts are nodes too, so that a gradient is cast when the products' own tensors are freed.

    x ─[normalize]─▶ h ─┬─project─▶ g ─┐
                        └─project─▶ u ─┴─gate and down─▶ y

What is kept is that of the levels all the same: no node keeps h, a or a cast weight, and at levels 1 and 2 none keeps g
and u, which the last node computes again from x.
"""

from typing import Any

import torch
from torch import Tensor

from lightning_llm.ops import checks
from lightning_llm.ops.gating import gate_backward, gate_forward
from lightning_llm.ops.norm import inverse_rms, normalize, normalize_backward
from lightning_llm.ops.swiglu_tiles import Options, Weights, flat, normalized


def whole_swiglu(x: Tensor, weights: Weights, options: Options, *, keep: bool) -> Tensor:
    """The output, differentiable.

    Args:
        x: (…, hidden).
        weights: The parameters.
        options: Without chunks.
        keep: Whether g and u are kept for backward.

    Returns:
        y (…, hidden) in the dtype of the products.
    """
    gate, up, down, norm = weights
    dtype = options.dtype
    h: Tensor = x.to(dtype) if norm is None else _Normalize.apply(x, norm, options)  # type: ignore[no-untyped-call]
    g = _Project.apply(h, gate.to(dtype), x, gate, norm, options)  # type: ignore[no-untyped-call]
    u = _Project.apply(h, up.to(dtype), x, up, norm, options)  # type: ignore[no-untyped-call]
    del h
    y: Tensor = _GateAndDown.apply(g, u, down.to(dtype), x, weights, options, keep)  # type: ignore[no-untyped-call]
    return y


class _Normalize(torch.autograd.Function):
    """(…, hidden) -> (…, hidden); keeps x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Tensor, options: Options) -> Tensor:
        ctx.save_for_backward(x, norm)
        ctx.eps = options.norm_eps
        return normalize(x, norm, options.norm_eps, options.dtype)[0]

    @staticmethod
    @checks.differentiable_once
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        x, norm = ctx.saved_tensors
        scale = inverse_rms(x, ctx.eps)
        d_x = x.new_empty(x.shape) if ctx.needs_input_grad[0] else None
        d_norm = x.new_zeros(norm.shape, dtype=scale.dtype) if ctx.needs_input_grad[1] else None
        normalize_backward(dh, x, norm, scale, d_x, d_norm)
        return d_x, None if d_norm is None else d_norm.to(norm.dtype), None


class _Project(torch.autograd.Function):
    """h (…, hidden) and a weight, cast -> (tokens, intermediate); keeps what these two were made of."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, cast: Tensor, x: Tensor, weight: Tensor, norm: Tensor | None, options: Options
    ) -> Tensor:
        ctx.save_for_backward(x, weight, norm)
        ctx.options = options
        return torch.mm(flat(h), cast.t())

    @staticmethod
    @checks.differentiable_once
    def backward(ctx: Any, dg: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, norm = ctx.saved_tensors
        need_h, need_weight, *_ = ctx.needs_input_grad
        dh = torch.mm(dg, weight.to(dg.dtype)).view(x.shape) if need_h else None
        d_weight = torch.mm(dg.t(), normalized(flat(x), norm, ctx.options)) if need_weight else None
        return dh, d_weight, None, None, None, None


class _GateAndDown(torch.autograd.Function):
    """g and u (tokens, intermediate) and down, cast -> (…, hidden) as x; keeps g and u, or what they are made of."""

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, u: Tensor, cast: Tensor, x: Tensor, weights: Weights, options: Options, keep: bool
    ) -> Tensor:
        gate, up, down, norm = weights
        if keep:
            ctx.save_for_backward(down, g, u)
        else:
            ctx.save_for_backward(down, x, gate, up, norm)
        ctx.options, ctx.keep = options, keep
        y = x.new_empty(x.shape, dtype=options.dtype)  # no view, see swiglu_forward
        torch.mm(gate_forward(g, u, torch.empty_like(g)), cast.t(), out=flat(y))
        return y

    @staticmethod
    @checks.differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        need_g, need_u, need_down, *_ = ctx.needs_input_grad
        down, *kept = ctx.saved_tensors
        dy = flat(dy.to(ctx.options.dtype))
        g, u = kept if ctx.keep else _projected_again(kept, ctx.options)
        del kept
        dg = du = d_down = None
        if need_g or need_u:
            da = torch.mm(dy, down.to(dy.dtype))
            a, dg, du = gate_backward(g, u, da, torch.empty_like(g), torch.empty_like(g))
            del da
        else:
            a = gate_forward(g, u, torch.empty_like(g))
        del g, u
        if need_down:
            d_down = torch.mm(dy.t(), a)
        return dg if need_g else None, du if need_u else None, d_down, None, None, None, None


def _projected_again(kept: list[Any], options: Options) -> list[Tensor]:
    x, gate, up, norm = kept
    h = normalized(flat(x), norm, options)
    return [torch.mm(h, weight.to(h.dtype).t()) for weight in (gate, up)]
