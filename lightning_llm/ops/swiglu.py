"""SwiGLU: the plain reference first, the memory-optimised operator second.

With weights written as in the paper (Shazeer 2020, "GLU Variants Improve Transformer", equation 6), for ``tokens``
rows x, W and V of shape (hidden, intermediate) and U of shape (intermediate, hidden):

    F(x) = (SiLU(xW) ⊙ xV) U,    SiLU(z) = z σ(z),    SiLU'(z) = σ(z) (1 + z (1 - σ(z)))

Name the parts g = xW, u = xV, a = SiLU(g) ⊙ u, y = aU. Let dy be the gradient of a scalar loss with respect to y,
of shape (tokens, hidden). For a product y = aU the rule is da = dy Uᵀ and dU = aᵀ dy; applied from the output back:

    da = dy Uᵀ                      (tokens, intermediate)
    du = da ⊙ SiLU(g)               (tokens, intermediate)
    dg = da ⊙ u ⊙ SiLU'(g)          (tokens, intermediate)

and the gradients that leave the function, with the weights' own shapes:

    1. dU = aᵀ dy                   (intermediate, hidden)
    2. dV = xᵀ du                   (hidden, intermediate)
    3. dW = xᵀ dg                   (hidden, intermediate)
    4. dx through the up path:      du Vᵀ    (tokens, hidden)
    5. dx through the gate path:    dg Wᵀ    (tokens, hidden);    dx is the sum of 4 and 5

Forward takes three matrix products, backward six. Backward needs x, g, u and the weights: silu, a, and the
derivatives follow from g and u elementwise. Autograd keeps SiLU(g) and a as well: twice as much. The levels keep

    0: x, g, u        1: x; g and u are computed again        2: the same, with x before its RMSNorm

``swiglu_tiles.py`` says how the work is cut so that no buffer of the full intermediate width exists for all tokens.
With few tokens such buffers are smaller than the weight gradients; ``swiglu_whole.py`` is the form for these.
In the code the weights are (out, in), as in ``nn.Linear``: ``gate_weight`` is Wᵀ, ``up_weight`` Vᵀ, ``down_weight`` Uᵀ.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_llm.ops import checks, compiled, sizes
from lightning_llm.ops.norm import rms_norm
from lightning_llm.ops.swiglu_tiles import Options, Weights, swiglu_backward, swiglu_forward
from lightning_llm.ops.swiglu_whole import whole_swiglu

CHECKPOINT_LEVELS = (0, 1, 2)


def swiglu_reference(x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> Tensor:
    """SwiGLU as three linear layers, differentiated by autograd.

    Args:
        x: (…, hidden).
        gate_weight: (intermediate, hidden), the transpose of the paper's W.
        up_weight: (intermediate, hidden), the transpose of V.
        down_weight: (hidden, intermediate), the transpose of U.

    Returns:
        (…, hidden), in the dtype of ``x`` or of autocast.
    """
    return F.linear(F.silu(F.linear(x, gate_weight)) * F.linear(x, up_weight), down_weight)


def memory_optimized_swiglu(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    *,
    checkpoint_level: int = 0,
    num_chunks: int | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> Tensor:
    """SwiGLU that keeps less for backward than autograd does. Without gradients it keeps nothing.

    Under autocast the products are in autocast's dtype, the weights are cast inside and not kept twice, and gradients
    come in the dtype of their tensors. Can be differentiated once, by autograd: not under ``torch.func``.

    Args:
        x: (…, hidden).
        gate_weight: (intermediate, hidden).
        up_weight: (intermediate, hidden).
        down_weight: (hidden, intermediate).
        checkpoint_level: 0 keeps x and two matrices (tokens, intermediate), half of what autograd keeps, and computes
            no matrix product twice. 1 keeps x only and computes two of nine products again. 2 also includes the norm
            in front, so that nothing is kept but its input, the residual stream.
        num_chunks: Into how many chunks backward cuts the intermediate width, at most: more make smaller buffers and
            smaller products. ``None`` chooses by shape and dtype.
        norm_weight: (hidden,). The function becomes SwiGLU(RMSNorm(x)): needed at level 2, possible at all levels.
        norm_eps: Added to the mean square in the norm.

    Returns:
        (…, hidden), in the dtype of ``x`` or of autocast.

    Raises:
        ValueError: A shape, dtype, device, level or number of chunks that does not fit; the message says which.
        NotImplementedError: Under a transform of ``torch.func``.
    """
    weights = Weights(gate_weight, up_weight, down_weight, norm_weight)
    dtype = checks.product_dtype(x)
    _check(x, weights, dtype, checkpoint_level, num_chunks)
    checks.refuse_transforms("memory_optimized_swiglu", "swiglu_reference")
    is_empty = 0 in (x.numel(), gate_weight.numel())
    if norm_weight is not None and (checkpoint_level < 2 or is_empty):
        x, weights = rms_norm(x, norm_weight, norm_eps), weights._replace(norm=None)
    if is_empty:
        return swiglu_reference(x, *weights[:3])
    options = Options(norm_eps, num_chunks, dtype)
    return _apply(x, weights, options, keep=checkpoint_level == 0)


def _apply(x: Tensor, weights: Weights, options: Options, *, keep: bool) -> Tensor:
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *weights))
    if torch.compiler.is_compiling():
        return compiled.swiglu(x, weights, options, keep=keep and needs_grad)
    if not needs_grad:
        return swiglu_forward(x, weights, options, keep=False)[0]
    hidden, width = x.shape[-1], weights.gate.shape[0]
    shape = x.numel() // hidden, hidden, width, options.dtype.itemsize, weights.gate.dtype.itemsize, x.device.type
    has_norm = weights.norm is not None
    if options.num_chunks is None and sizes.are_few(*shape, keep=keep, has_norm=has_norm):
        return whole_swiglu(x, weights, options, keep=keep)
    y: Tensor = _SwiGLU.apply(x, *weights, options, keep)  # type: ignore[no-untyped-call]
    return y


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, norm: Tensor | None, options: Options, keep: bool
    ) -> Tensor:
        y, *kept = swiglu_forward(x, Weights(gate, up, down, norm), options, keep=keep)
        ctx.save_for_backward(x, gate, up, down, norm, *kept)
        ctx.options = options
        return y

    @staticmethod
    @checks.differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, down, norm, *kept = ctx.saved_tensors
        weights = Weights(gate, up, down, norm)
        grads = swiglu_backward(dy, x, weights, tuple(kept), ctx.options, ctx.needs_input_grad[:5])
        return *grads, None, None


def _check(x: Tensor, weights: Weights, dtype: torch.dtype, level: int, num_chunks: int | None) -> None:
    if isinstance(level, bool) or level not in CHECKPOINT_LEVELS:
        raise ValueError(f"checkpoint_level must be one of {', '.join(map(str, CHECKPOINT_LEVELS))}, got {level!r}")
    if level == 2 and weights.norm is None:
        raise ValueError("checkpoint_level 2 computes the norm in front of the MLP: give norm_weight, or use level 1")
    if x.dim() == 0 or weights.gate.dim() != 2:
        gate_shape = tuple(weights.gate.shape)
        raise ValueError(
            f"gate_weight must be (intermediate, hidden) for x (…, hidden), got {gate_shape} for x {tuple(x.shape)}"
        )
    hidden, width = x.shape[-1], weights.gate.shape[0]
    expected = {"gate_weight": (width, hidden), "up_weight": (width, hidden), "down_weight": (hidden, width)}
    for (name, shape), weight in zip({**expected, "norm_weight": (hidden,)}.items(), weights, strict=True):
        if weight is not None:
            checks.match(name, weight, shape, x, dtype)
    checks.count("num_chunks", num_chunks, width, "the intermediate width")
