"""The operators as ``torch.compile`` sees them: opaque, so that what is kept is what they say.

Traced into, their recomputation would be merged with the forward pass (the compiler removes common subexpressions) and
the memory would be back. The kernels inside are the same as in eager mode.
"""

from typing import Any

import torch
from torch import Tensor, library

from lightning_llm.ops.attention_blocks import attention_backward, attention_forward, kept_shapes
from lightning_llm.ops.loss_chunks import Head, LossOptions, loss_and_gradients
from lightning_llm.ops.swiglu_tiles import Options, Weights, swiglu_backward, swiglu_forward


def _named(operator: str) -> str:
    """The operator's name for torch's library: this package is its namespace."""
    return "::".join((__name__.partition(".")[0], operator))


def swiglu(x: Tensor, weights: Weights, options: Options, *, keep: bool) -> Tensor:
    """As ``swiglu_tiles.swiglu_forward``, differentiable."""
    y: Tensor = _swiglu(x, *weights, *options, keep)[0]
    return y


@library.custom_op(_named("swiglu"), mutates_args=())
def _swiglu(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    norm: Tensor | None,
    norm_eps: float,
    num_chunks: int | None,
    dtype: torch.dtype,
    keep: bool,
) -> list[Tensor]:
    return list(swiglu_forward(x, Weights(gate, up, down, norm), Options(norm_eps, num_chunks, dtype), keep=keep))


@_swiglu.register_fake
def _(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    norm: Tensor | None,
    norm_eps: float,
    num_chunks: int | None,
    dtype: torch.dtype,
    keep: bool,
) -> list[Tensor]:
    tokens, width = x.numel() // x.shape[-1], gate.shape[0]
    shapes = (x.shape, (tokens, width), (tokens, width)) if keep else (x.shape,)
    return [x.new_empty(shape, dtype=dtype) for shape in shapes]


def _save_for_swiglu(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.save_for_backward(*inputs[:5], *output[1:])
    ctx.options = inputs[5:8]


def _backward_of_swiglu(ctx: Any, grads: list[Tensor]) -> tuple[Tensor | None, ...]:
    x, gate, up, down, norm, *kept = ctx.saved_tensors
    needed = list(ctx.needs_input_grad[:5])
    found = iter(_swiglu_backward(grads[0], x, gate, up, down, norm, kept, *ctx.options, needed))
    return *(next(found) if need else None for need in needed), None, None, None, None


_swiglu.register_autograd(_backward_of_swiglu, setup_context=_save_for_swiglu)


@library.custom_op(_named("swiglu_backward"), mutates_args=())
def _swiglu_backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    norm: Tensor | None,
    kept: list[Tensor],
    norm_eps: float,
    num_chunks: int | None,
    dtype: torch.dtype,
    needed: list[bool],
) -> list[Tensor]:
    weights, options = Weights(gate, up, down, norm), Options(norm_eps, num_chunks, dtype)
    grads = swiglu_backward(dy, x, weights, tuple(kept), options, tuple(needed))
    return [grad for grad in grads if grad is not None]


@_swiglu_backward.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    norm: Tensor | None,
    kept: list[Tensor],
    norm_eps: float,
    num_chunks: int | None,
    dtype: torch.dtype,
    needed: list[bool],
) -> list[Tensor]:
    tensors = (x, gate, up, down, norm)
    return [t.new_empty(t.shape) for t, need in zip(tensors, needed, strict=True) if need and t is not None]


def linear_cross_entropy(
    hidden: Tensor, head: Head, targets: Tensor, options: LossOptions, needed: tuple[bool, ...]
) -> Tensor:
    """As ``loss_chunks.loss_and_gradients``, differentiable."""
    loss: Tensor = _loss(hidden, *head, targets, *options, list(needed), None)[0]
    return loss


@library.custom_op(_named("linear_cross_entropy"), mutates_args=())
def _loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    ignore_index: int,
    num_chunks: int | None,
    z_loss: float,
    reduction: str,
    dtype: torch.dtype,
    needed: list[bool],
    d_losses: Tensor | None,
) -> list[Tensor]:
    """The loss and, unless the reduction is ``none`` and there are no ``d_losses``, the gradients needed."""
    options = LossOptions(ignore_index, num_chunks, z_loss, reduction, dtype)
    if reduction == "none" and d_losses is None:
        needed = [False] * 3
    loss, gradients = loss_and_gradients(hidden, Head(weight, bias), targets, options, tuple(needed), d_losses)
    return [loss, *(gradient for gradient in gradients if gradient is not None)]


@_loss.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    ignore_index: int,
    num_chunks: int | None,
    z_loss: float,
    reduction: str,
    dtype: torch.dtype,
    needed: list[bool],
    d_losses: Tensor | None,
) -> list[Tensor]:
    wide = torch.promote_types(dtype, torch.float32)
    loss = hidden.new_empty(targets.shape if reduction == "none" else (), dtype=wide)
    if reduction == "none" and d_losses is None:
        return [loss]
    tensors = zip((hidden, weight, bias), needed, strict=True)
    held = wide if dtype == torch.float16 else None
    return [loss, *(t.new_empty(t.shape, dtype=held or t.dtype) for t, need in tensors if need and t is not None)]


def _save_for_loss(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.options = inputs[4:9]
    ctx.save_for_backward(*(inputs[:4] if ctx.options[3] == "none" else output[1:]))
    ctx.dtypes = [None if t is None else t.dtype for t in inputs[:3]]


def _backward_of_loss(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    needed = list(ctx.needs_input_grad[:3])
    if ctx.options[3] == "none":
        _, *found = _loss(*ctx.saved_tensors, *ctx.options, needed, grads[0])
    else:
        found = [grad * grads[0] for grad in ctx.saved_tensors]
    left = iter(found)
    scaled = (next(left).to(dtype) if need else None for need, dtype in zip(needed, ctx.dtypes, strict=True))
    return *scaled, *[None] * 8


_loss.register_autograd(_backward_of_loss, setup_context=_save_for_loss)


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """As ``attention_blocks.attention_forward``, differentiable."""
    out: Tensor = _attention(query, key, value)[0]
    return out


@library.custom_op(_named("causal_attention"), mutates_args=())
def _attention(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """The result, and the probabilities of each block of queries."""
    out, probabilities = attention_forward(query, key, value)
    return [out, *probabilities]


@_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    return [torch.empty_like(query), *(query.new_empty(shape) for shape in kept_shapes(query))]


def _save_for_attention(ctx: Any, inputs: tuple[Tensor, ...], output: list[Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output[1:])


def _backward_of_attention(ctx: Any, grads: list[Tensor]) -> tuple[Tensor, ...]:
    query, key, value, *probabilities = ctx.saved_tensors
    d_query, d_key, d_value = _attention_backward(grads[0], query, key, value, probabilities)
    return d_query, d_key, d_value


_attention.register_autograd(_backward_of_attention, setup_context=_save_for_attention)


@library.custom_op(_named("causal_attention_backward"), mutates_args=())
def _attention_backward(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, probabilities: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    return attention_backward(d_out, query, key, value, probabilities)


@_attention_backward.register_fake
def _(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, probabilities: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
