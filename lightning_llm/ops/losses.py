"""Cross-entropy of a language model: the plain form first, the form that never holds all logits second.

For one token with logits z and target t the loss is -log softmax(z)_t. With m = max(z), log and exp cancel:

    loss = log Σ_j exp(z_j - m) - (z_t - m)

so nothing overflows and no probability is rounded to zero before its logarithm is taken.

``linear_cross_entropy`` computes the logits z = h Wᵀ + b of a chunk of tokens at a time. While they are there it also
computes the gradients (``loss_chunks.py``) and throws them away; backward only scales what forward has found. The
optional z-loss (Chowdhery et al. 2022, "PaLM: Scaling Language Modeling with Pathways", section 5) adds
``z_loss`` · log² Z per token, with log Z = log Σ_j exp(z_j), which keeps the logits from drifting.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from lightning_llm.ops import checks, compiled
from lightning_llm.ops.loss_chunks import Head, LossOptions, loss_and_gradients

Reduction = Literal["mean", "sum", "none"]
REDUCTIONS = ("mean", "sum", "none")


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats.

    Args:
        logits: (…, vocab), any floating dtype; computed in float32 at least.
        targets: (…), token ids.

    Returns:
        Scalar, float32 (float64 for float64 logits): the mean over all leading dimensions.

    Raises:
        ValueError: The leading dimensions of ``logits`` are not the shape of ``targets``, or a target is no token id.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets must have shape {tuple(logits.shape[:-1])} for logits of shape {tuple(logits.shape)}, "
            f"got {tuple(targets.shape)}"
        )
    _check_targets(targets, logits, logits.shape[-1], None)
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    z = z - z.detach().amax(dim=-1, keepdim=True)
    target_logits = z.gather(-1, targets.unsqueeze(-1).long()).squeeze(-1)
    return (z.exp().sum(dim=-1).log() - target_logits).mean()


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    num_chunks: int | None = None,
    reduction: Reduction = "mean",
    z_loss: float = 0.0,
) -> Tensor:
    """Cross-entropy in nats of the logits ``hidden @ weight.T + bias``, a chunk of tokens at a time.

    The gradients are computed in forward, unless nothing requires them, and held until backward; a second backward
    (``retain_graph``) and ``reduction="none"`` compute them again. Under autocast the products are in autocast's dtype.
    Can be differentiated once, by autograd: not under ``torch.func``.

    Args:
        hidden: (…, hidden).
        weight: (vocab, hidden); may be the embedding's.
        targets: (…), token ids; ``ignore_index`` where there is nothing to predict.
        bias: (vocab,).
        ignore_index: The target that does not count.
        num_chunks: Into how many chunks the tokens are cut, at most. ``None`` chooses by vocabulary and dtype.
        reduction: ``mean`` over the tokens that count (0 if there is none), ``sum``, or ``none``.
        z_loss: Weight of log² Z, 1e-4 in PaLM.

    Returns:
        Scalar, or (…) for ``none``; float32 (float64 for float64 inputs).

    Raises:
        ValueError: A shape, dtype, device, target, reduction or number of chunks that does not fit; the message says
            which.
        NotImplementedError: Under a transform of ``torch.func``.
    """
    head, dtype = Head(weight, bias), checks.product_dtype(hidden)
    _check(hidden, head, targets, dtype, num_chunks, ignore_index)
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    if not z_loss >= 0:
        raise ValueError(f"z_loss must be at least 0, got {z_loss}")
    checks.refuse_transforms("linear_cross_entropy", "torch.nn.functional.cross_entropy")
    options = LossOptions(ignore_index, num_chunks, z_loss, reduction, dtype)
    return _apply(hidden, head, targets, options)


def _apply(hidden: Tensor, head: Head, targets: Tensor, options: LossOptions) -> Tensor:
    tensors = (hidden, head.weight, head.bias)
    needed = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in tensors)
    if torch.compiler.is_compiling():
        return compiled.linear_cross_entropy(hidden, head, targets, options, needed)
    if not any(needed):
        return loss_and_gradients(hidden, head, targets, options, needed)[0]
    loss: Tensor = _LinearCrossEntropy.apply(hidden, *head, targets, options)  # type: ignore[no-untyped-call]
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: LossOptions
    ) -> Tensor:
        needed = ctx.needs_input_grad[:3] if options.reduction != "none" else (False, False, False)
        loss, ctx.held = loss_and_gradients(hidden, Head(weight, bias), targets, options, needed)
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.options = options
        return loss

    @staticmethod
    @checks.differentiable_once
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        held, ctx.held = ctx.held, [None, None, None]  # handed over, so that scaling them needs no second copy
        hidden, weight, bias, targets = ctx.saved_tensors
        if not any(grad is not None for grad in held):
            needed, d_losses = ctx.needs_input_grad[:3], d_loss if ctx.options.reduction == "none" else None
            _, held = loss_and_gradients(hidden, Head(weight, bias), targets, ctx.options, needed, d_losses)
        if ctx.options.reduction != "none" and not (d_loss.device.type == "cpu" and d_loss.item() == 1):
            # a number without dimensions would be rounded to the gradient's dtype before it is multiplied on a GPU
            factor = d_loss if d_loss.device.type == "cpu" else d_loss.view(1)
            held = [None if grad is None else grad.mul_(factor) for grad in held]
        tensors = (hidden, weight, bias)
        return *(None if g is None else g.to(t.dtype) for g, t in zip(held, tensors, strict=True)), None, None


def _check(
    hidden: Tensor, head: Head, targets: Tensor, dtype: torch.dtype, num_chunks: int | None, ignore_index: int
) -> None:
    if hidden.dim() == 0 or head.weight.dim() != 2:
        raise ValueError(
            f"weight must be (vocab, hidden) for hidden (…, hidden), got {tuple(head.weight.shape)} "
            f"for hidden {tuple(hidden.shape)}"
        )
    vocab = head.weight.shape[0]
    checks.match("weight", head.weight, (vocab, hidden.shape[-1]), hidden, dtype, "hidden")
    if head.bias is not None:
        checks.match("bias", head.bias, (vocab,), hidden, dtype, "hidden")
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets must have shape {tuple(hidden.shape[:-1])} for hidden of shape {tuple(hidden.shape)}, "
            f"got {tuple(targets.shape)}"
        )
    _check_targets(targets, hidden, vocab, ignore_index)
    checks.count("num_chunks", num_chunks, max(1, targets.numel()), "the number of tokens")


def _check_targets(targets: Tensor, other: Tensor, vocab: int, ignore_index: int | None) -> None:
    if targets.is_floating_point() or targets.dtype == torch.bool:
        raise ValueError(f"targets must be token ids of an integer dtype, got {targets.dtype} {tuple(targets.shape)}")
    if targets.device != other.device:
        raise ValueError(f"targets are on {targets.device}, the other arguments on {other.device}: move one of them")
    if targets.device.type != "cpu" or torch.compiler.is_compiling():
        return  # looking would wait for the device; there the loss is no number, or the operator refuses
    wrong = (targets < 0) | (targets >= vocab)
    if ignore_index is not None:
        wrong &= targets != ignore_index
    if wrong.any():
        ignored = "" if ignore_index is None else f" or ignore_index {ignore_index}"
        raise ValueError(f"targets must be below the vocabulary {vocab}{ignored}, got {targets[wrong][0].item()}")
