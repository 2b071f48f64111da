"""SwiGLU: the plain reference first, the memory-optimized operator second.

With weights written as in the paper (Shazeer 2020, "GLU Variants Improve Transformer", equation 6), for ``tokens``
rows x, W and V of shape (hidden, intermediate) and U of shape (intermediate, hidden):

    F(x) = (SiLU(xW) ⊙ xV) U,    SiLU(z) = z σ(z),    SiLU'(z) = σ(z) (1 + z (1 - σ(z)))

Name the parts g = xW, u = xV, a = SiLU(g) ⊙ u, y = aU. Let dy be the gradient of a scalar loss with respect to y,
of shape (tokens, hidden). For a matmul y = aU the rule is da = dy Uᵀ and dU = aᵀ dy; applied from the output back:

    da = dy Uᵀ                      (tokens, intermediate)
    du = da ⊙ SiLU(g)               (tokens, intermediate)
    dg = da ⊙ u ⊙ SiLU'(g)          (tokens, intermediate)

and the gradients that leave the function, with the weights' own shapes:

    1. dU = aᵀ dy                   (intermediate, hidden)
    2. dV = xᵀ du                   (hidden, intermediate)
    3. dW = xᵀ dg                   (hidden, intermediate)
    4. dx through the up path:      du Vᵀ    (tokens, hidden)
    5. dx through the gate path:    dg Wᵀ    (tokens, hidden);    dx is the sum of 4 and 5

Forward takes three matmuls, backward six. Backward needs x, g, u and the weights: silu, a, and the derivatives follow
from g and u elementwise. Autograd saves SiLU(g) and a as well: twice as much. The levels save

    0: x, g, u        1: x; g and u are recomputed        2: the same, with x before its RMSNorm

``swiglu_tiles.py`` says how the work is cut so that no buffer of the full intermediate width exists for all tokens.
With few tokens such buffers are smaller than the weight gradients. Tiles would hold all three of these, and their
buffers, at once. So with few tokens each matmul is a node of autograd's graph, as with plain linear layers: a gradient
is computed, handed to its weight and, where gradients accumulate, freed before the next one is computed. Casts are
nodes too, so that a gradient is cast when the matmul's own tensors are freed.

    x ─[normalize]─▶ h ─┬─project─▶ g ─┐
                        └─project─▶ u ─┴─gate and down─▶ y

What is saved is the same: no node saves h, a or a cast weight, and at levels 1 and 2 none saves g and u, which the last
node recomputes from x.
In the code the weights are (out, in), as in ``nn.Linear``: ``gate_weight`` is Wᵀ, ``up_weight`` Vᵀ, ``down_weight`` Uᵀ.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_llm.ops import sizes
from lightning_llm.ops import swiglu_tiles as tiles
from lightning_llm.ops.autograd import autograd_function, custom_op, differentiable_once, reject_transforms
from lightning_llm.ops.checks import check_chunks, check_weight
from lightning_llm.ops.dispatch import matmul_dtype
from lightning_llm.ops.norm import rms_norm, rms_norm_function
from lightning_llm.ops.swiglu_tiles import Options, Weights
from lightning_llm.ops.traced import device_type


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
    """SwiGLU that saves less for backward than autograd does. Without gradients it saves nothing.

    Under autocast the matmuls are in autocast's dtype, the weights are cast inside and not saved twice, and gradients
    come in the dtype of their tensors. Can be differentiated once, by autograd: not under ``torch.func``.

    Args:
        x: (…, hidden).
        gate_weight: (intermediate, hidden).
        up_weight: (intermediate, hidden).
        down_weight: (hidden, intermediate).
        checkpoint_level: 0 saves x and two matrices (tokens, intermediate), half of what autograd saves, and recomputes
            no matmul. 1 saves x only and recomputes two of nine matmuls. 2 also includes the norm before the MLP, so
            that nothing is saved but its input, the residual stream.
        num_chunks: Into how many chunks backward cuts the intermediate width, at most: more make smaller buffers and
            smaller matmuls. ``None`` chooses by shape and dtype.
        norm_weight: (hidden,). The function becomes SwiGLU(RMSNorm(x)): needed at level 2, possible at all levels.
        norm_eps: Added to the mean square in the norm.

    Returns:
        (…, hidden), in the dtype of ``x`` or of autocast.

    Raises:
        ValueError: A shape, dtype, device, level or number of chunks that does not fit; the message says which.
        NotImplementedError: Under a transform of ``torch.func``.
    """
    weights = Weights(gate_weight, up_weight, down_weight, norm_weight)
    _check(x, weights, checkpoint_level, num_chunks)
    reject_transforms("memory_optimized_swiglu", "swiglu_reference")
    is_empty = 0 in (x.numel(), gate_weight.numel())
    options = Options(norm_eps, num_chunks, matmul_dtype(x))
    if norm_weight is not None and (checkpoint_level < 2 or is_empty):
        x = rms_norm(x, norm_weight, norm_eps)
        weights = weights._replace(norm=None)
    if is_empty:
        return swiglu_reference(x, *weights[:3])
    saves = checkpoint_level == 0
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *weights))
    if torch.compiler.is_compiling():
        y: Tensor = _operator(x, *weights, saves and needs_grad, *options)[0]
    elif not needs_grad:
        y = tiles.swiglu_forward(x, weights, options, saves=False)[0]
    elif _prefers_whole(x, weights, options, saves=saves):
        y = _swiglu_of_few_tokens(x, weights, options, saves=saves)
    else:
        y = _function(x, *weights, saves, *options)
    return y


def _prefers_whole(x: Tensor, weights: Weights, options: Options, *, saves: bool) -> bool:
    width, hidden = weights.gate.shape
    sizes_of = (options.dtype.itemsize, weights.gate.dtype.itemsize)
    shape = x.numel() // hidden, hidden, width, *sizes_of, device_type(x)
    return options.num_chunks is None and sizes.prefers_whole(*shape, saves=saves, has_norm=weights.norm is not None)


def _swiglu_of_few_tokens(x: Tensor, weights: Weights, options: Options, *, saves: bool) -> Tensor:
    gate, up, down, norm = weights
    dtype = options.dtype
    h = x.to(dtype) if norm is None else rms_norm_function(x, norm, options.norm_eps, dtype, save_scale=False)
    g = _Project.apply(h, gate.to(dtype), x, gate, norm, options)  # type: ignore[no-untyped-call]
    u = _Project.apply(h, up.to(dtype), x, up, norm, options)  # type: ignore[no-untyped-call]
    del h
    y: Tensor = _GateAndDown.apply(g, u, down.to(dtype), x, weights, options, saves)  # type: ignore[no-untyped-call]
    return y


class _Project(torch.autograd.Function):
    """h (…, hidden) and a cast weight -> (tokens, intermediate); saves the tensors from which these two were made."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, cast: Tensor, x: Tensor, weight: Tensor, norm: Tensor | None, options: Options
    ) -> Tensor:
        ctx.save_for_backward(x, weight, norm)
        ctx.options = options
        return torch.mm(tiles.flat(h), cast.t())

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dg: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, norm = ctx.saved_tensors
        need_h, need_weight, *_ = ctx.needs_input_grad
        dh = torch.mm(dg, weight.to(dg.dtype)).view(x.shape) if need_h else None
        d_weight = torch.mm(dg.t(), tiles.normalized(tiles.flat(x), norm, ctx.options)) if need_weight else None
        return dh, d_weight, None, None, None, None


class _GateAndDown(torch.autograd.Function):
    """g and u (tokens, intermediate) and down, cast -> (…, hidden) as x; saves g and u, or what they are made from."""

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, u: Tensor, cast: Tensor, x: Tensor, weights: Weights, options: Options, saves: bool
    ) -> Tensor:
        gate, up, down, norm = weights
        ctx.save_for_backward(down, *((g, u) if saves else (x, gate, up, norm)))
        ctx.options = options
        ctx.saves = saves
        y = x.new_empty(x.shape, dtype=options.dtype)  # no view, see tiles.swiglu_forward
        torch.mm(tiles.gate_forward(g, u, torch.empty_like(g)), cast.t(), out=tiles.flat(y))
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        need_g, need_u, need_down, *_ = ctx.needs_input_grad
        down, *saved = ctx.saved_tensors
        dy = tiles.flat(dy.to(ctx.options.dtype))
        g, u = saved if ctx.saves else _recompute(saved, ctx.options)
        del saved
        a = torch.empty_like(g)
        dg = None
        du = None
        if need_g or need_u:
            dg = torch.empty_like(g)
            du = torch.mm(dy, down.to(dy.dtype))
            tiles.gate_backward(g, u, du, a, dg)
        else:
            tiles.gate_forward(g, u, a)
        del g, u
        return dg, du, torch.mm(dy.t(), a) if need_down else None, None, None, None, None


def _recompute(saved: list[Any], options: Options) -> list[Tensor]:
    x, gate, up, norm = saved
    h = tiles.normalized(tiles.flat(x), norm, options)
    return [torch.mm(h, weight.to(h.dtype).t()) for weight in (gate, up)]


def _check(x: Tensor, weights: Weights, level: int, num_chunks: int | None) -> None:
    levels = sizes.CHECKPOINT_LEVELS
    if isinstance(level, bool) or level not in levels:
        raise ValueError(f"checkpoint_level must be one of {', '.join(map(str, levels))}, got {level!r}")
    if level == 2 and weights.norm is None:
        raise ValueError("checkpoint_level 2 includes the norm before the MLP: give norm_weight, or use level 1")
    if x.dim() == 0 or weights.gate.dim() != 2:
        found = f"{tuple(weights.gate.shape)} for x {tuple(x.shape)}"
        raise ValueError(f"gate_weight must be (intermediate, hidden) for x (…, hidden), got {found}")
    hidden = x.shape[-1]
    width = weights.gate.shape[0]
    expected = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width), "norm": (hidden,)}
    for (name, shape), weight in zip(expected.items(), weights, strict=True):
        check_weight(f"{name}_weight", weight, shape, x)
    check_chunks(num_chunks, width, "the intermediate width")


def _run(*inputs: Any) -> list[Tensor]:
    x, gate, up, down, norm, saves, *options = inputs
    return tiles.swiglu_forward(x, Weights(gate, up, down, norm), Options(*options), saves=saves)


def _empty_results(*inputs: Any) -> list[Tensor]:
    x, gate, _up, _down, _norm, saves, *options = inputs
    saved = [(x.numel() // x.shape[-1], gate.shape[0])] * 2 if saves else []
    return [x.new_empty(shape, dtype=Options(*options).dtype) for shape in (x.shape, *saved)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, gate, up, down, norm, _saves, *options = inputs
    ctx.save_for_backward(x, gate, up, down, norm, *output[1:])
    ctx.options = Options(*options)


def _gradients(ctx: Any, grads: list[Tensor], run: Callable[..., list[Tensor]] | None = None) -> tuple[Any, ...]:
    x, gate, up, down, norm, *saved = ctx.saved_tensors  # read once: checkpoint allows no more
    inputs = x, gate, up, down, norm, saved, list(ctx.needs_input_grad[:5]), *ctx.options
    found = iter((run or _operator_backward)(grads[0], *inputs))
    return tuple(next(found) if need else None for need in ctx.needs_input_grad)


def _run_backward(dy: Tensor, *inputs: Any) -> list[Tensor]:
    x, gate, up, down, norm, saved, needed, *values = inputs
    weights = Weights(gate, up, down, norm)
    options = Options(*values)
    if device_type(x) == "cuda" and _prefers_whole(x, weights, options, saves=bool(saved)):
        options = options._replace(num_chunks=1)  # compiled: matmuls of the whole width, as without the compiler
    grads = tiles.swiglu_backward(dy, x, weights, saved, options, tuple(needed))
    return [grad for grad in grads if grad is not None]


def _empty_gradients(dy: Tensor, *inputs: Any) -> list[Tensor]:
    x, gate, up, down, norm, _saved, needed, *_options = inputs
    return [t.new_empty(t.shape) for t, need in zip((x, gate, up, down, norm), needed, strict=True) if need]


_INPUTS = "Tensor x, Tensor gate, Tensor up, Tensor down, Tensor? norm"
_OPTIONS = "float norm_eps, SymInt? num_chunks, ScalarType dtype"  # the fields of Options
_function = autograd_function("_SwiGLU", _run, _gradients, _run_backward, save=_save)
_operator = custom_op(
    "swiglu", f"{_INPUTS}, bool saves, {_OPTIONS}", _run, _empty_results, save=_save, gradients=_gradients
)
_operator_backward = custom_op(
    "swiglu_backward",
    f"Tensor dy, {_INPUTS}, Tensor[] saved, bool[] needed, {_OPTIONS}",
    _run_backward,
    _empty_gradients,
)
