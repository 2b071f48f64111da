"""Cross-entropy of a language model: the plain form first, the form that never holds all logits second.

For one token with logits z and target t the loss is -log softmax(z)_t. With m = max(z), log and exp cancel:

    loss = log Σ_j exp(z_j - m) - (z_t - m)

so nothing overflows and no probability is rounded to zero before its logarithm is taken.

``linear_cross_entropy`` computes the logits z = h Wᵀ + b of a chunk of tokens at a time. From them it also computes the
gradients (``loss_chunks.py``), then overwrites them; backward only scales the gradients of forward. The optional z-loss
(Chowdhery et al. 2022, "PaLM: Scaling Language Modeling with Pathways", section 5) adds ``z_loss`` · log² Z per token,
with log Z = log Σ_j exp(z_j), which stops the logits from drifting. With label smoothing ε (Szegedy et al. 2016,
"Rethinking the Inception Architecture for Computer Vision", section 7), the target has the probability 1 - ε, and all
tokens share the rest.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from lightning_llm.ops import traced
from lightning_llm.ops.autograd import custom_op, differentiable_once, reject_transforms
from lightning_llm.ops.checks import check_chunks, check_weight
from lightning_llm.ops.dispatch import matmul_dtype
from lightning_llm.ops.loss_chunks import LossOptions, loss_and_gradients
from lightning_llm.ops.traced import device_type

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
        ValueError: The leading dimensions of ``logits`` are not ``targets``' shape, or a target is not a token id.
    """
    _check_targets(targets, "logits", logits, logits.shape[-1], None)
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
    vocab_size: int | None = None,
    label_smoothing: float = 0.0,
    token_weights: Tensor | None = None,
) -> Tensor:
    """Cross-entropy in nats of the logits ``hidden @ weight.T + bias``, a chunk of tokens at a time.

    The gradients are computed in forward, unless nothing requires them, and saved until backward; a second backward
    (``retain_graph``) and ``reduction="none"`` compute them again. Under autocast the matmuls are in autocast's dtype.
    Can be differentiated once, by autograd: not under ``torch.func``.

    Args:
        hidden: (…, hidden).
        weight: (vocab, hidden); may be the embedding's.
        targets: (…), token ids; ``ignore_index`` for tokens that do not count.
        bias: (vocab,).
        ignore_index: The target of tokens that do not count.
        num_chunks: Into how many chunks the tokens are cut, at most. ``None`` chooses by vocabulary and dtype.
        reduction: ``mean`` over the tokens that count, by their weights (0 without any), ``sum``, or ``none``.
        z_loss: Weight of log² Z, 1e-4 in PaLM.
        vocab_size: How many of ``weight``'s rows are tokens. The rows after them, which make matmuls faster, have no
            probability and a gradient of zero. ``None``: all.
        label_smoothing: The probability that all tokens share in the target distribution, from 0 to below 1.
        token_weights: (…), at least 0; each multiplies its token's loss, and gets no gradient. ``None``: 1.

    Returns:
        Scalar, or (…) for ``none``; float32 (float64 for float64 inputs).

    Raises:
        ValueError: A shape, dtype, device, target, weight, option, number of chunks or of tokens that does not fit;
            the message says which.
        NotImplementedError: Under a transform of ``torch.func``.
    """
    tensors = (hidden, weight, bias)
    dtype = matmul_dtype(hidden)
    options = LossOptions(ignore_index, num_chunks, z_loss, reduction, dtype, vocab_size, label_smoothing)
    _check(*tensors, targets, options)
    check_token_weights(token_weights, targets)
    reject_transforms("linear_cross_entropy", "torch.nn.functional.cross_entropy")
    needed = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in tensors)
    if torch.compiler.is_compiling():
        loss: Tensor = _operator(*tensors, targets, token_weights, list(needed), None, *options)[0]
    elif not any(needed):
        loss = loss_and_gradients(*tensors, targets, token_weights, options, needed)[0]
    else:
        loss = _LinearCrossEntropy.apply(*tensors, targets, token_weights, options)  # type: ignore[no-untyped-call]
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        token_weights: Tensor | None,
        options: LossOptions,
    ) -> Tensor:
        inputs = hidden, weight, bias, targets, token_weights
        loss, ctx.gradients = loss_and_gradients(*inputs, options, ctx.needs_input_grad[:3])
        ctx.save_for_backward(*inputs)
        ctx.options = options
        return loss

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, [None] * 3  # handed over, so that scaling them needs no second copy
        inputs: tuple[Any, Any, Any, Any, Any] = ctx.saved_tensors  # hidden, weight, bias, targets, token_weights
        is_single = ctx.options.reduction == "none"
        if all(grad is None for grad in gradients):
            d_losses = d_loss if is_single else None
            _, gradients = loss_and_gradients(*inputs, ctx.options, ctx.needs_input_grad[:3], d_losses)
        is_cpu = device_type(d_loss) == "cpu"
        if not is_single and not (is_cpu and (traced.current() is not None or d_loss.item() == 1)):
            # on a GPU a tensor without dimensions would be rounded to the gradient's dtype before the multiplication
            factor = d_loss if is_cpu else d_loss.view(1)
            gradients = [None if grad is None else grad.mul_(factor) for grad in gradients]
        pairs = zip(gradients, inputs[:3], strict=True)
        return *(None if grad is None else grad.to(tensor.dtype) for grad, tensor in pairs), None, None, None


def check_token_weights(weights: Tensor | None, targets: Tensor, name: str = "token_weights") -> None:
    """Rejects weights that do not fit the targets; their values are looked at on a CPU alone, as elsewhere it waits.

    Raises:
        ValueError: They have another shape or device, are negative or NaN, or require a gradient.
    """
    if weights is None:
        return
    if weights.shape != targets.shape or weights.is_complex():
        got = f"{weights.dtype} {tuple(weights.shape)}"
        raise ValueError(f"{name} must be real numbers of shape {tuple(targets.shape)}, got {got}")
    if weights.device != targets.device:
        raise ValueError(f"{name} are on {weights.device}, targets on {targets.device}: move one of them")
    if weights.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} get no gradient, and require one: detach them")
    if device_type(weights) == "cpu" and not torch.compiler.is_compiling() and not (weights >= 0).all():
        raise ValueError(f"{name} must be at least 0, got {weights[~(weights >= 0)][0].item()}")


def _check(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: LossOptions) -> None:
    if hidden.dim() == 0 or weight.dim() != 2:
        found = f"{tuple(weight.shape)} for hidden {tuple(hidden.shape)}"
        raise ValueError(f"weight must be (vocab, hidden) for hidden (…, hidden), got {found}")
    rows = weight.shape[0]
    vocab = rows if options.vocab_size is None else options.vocab_size
    if not min(1, rows) <= vocab <= rows:
        raise ValueError(f"vocab_size must be from 1 to the {rows} rows of weight or None, got {vocab}")
    check_weight("weight", weight, (rows, hidden.shape[-1]), hidden, "hidden")
    check_weight("bias", bias, (rows,), hidden, "hidden")
    _check_targets(targets, "hidden", hidden, vocab, options.ignore_index)
    check_chunks(options.num_chunks, max(1, targets.numel()), "the number of tokens")
    if options.reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {options.reduction!r}")
    if not options.z_loss >= 0:
        raise ValueError(f"z_loss must be at least 0, got {options.z_loss}")
    if not 0 <= options.label_smoothing < 1:
        raise ValueError(f"label_smoothing must be at least 0 and below 1, got {options.label_smoothing}")


def _check_targets(targets: Tensor, name: str, other: Tensor, vocab: int, ignore_index: int | None) -> None:
    if other.shape[:-1] != targets.shape:
        expected, of, got = (tuple(shape) for shape in (other.shape[:-1], other.shape, targets.shape))
        raise ValueError(f"targets must have shape {expected} for {name} of shape {of}, got {got}")
    if targets.is_floating_point() or targets.dtype == torch.bool:
        raise ValueError(f"targets must be token ids of an integer dtype, got {targets.dtype} {tuple(targets.shape)}")
    if targets.device != other.device:
        raise ValueError(f"targets are on {targets.device}, the other arguments on {other.device}: move one of them")
    if device_type(targets) != "cpu" or traced.current() is not None or torch.compiler.is_compiling():
        return  # looking would wait for the device; there the loss is NaN, or the operator reports it
    wrong = (targets < 0) | (targets >= vocab)
    if ignore_index is not None:
        wrong &= targets != ignore_index
    if wrong.any():
        ignored = "" if ignore_index is None else f" or ignore_index {ignore_index}"
        raise ValueError(f"targets must be below the vocabulary {vocab}{ignored}, got {targets[wrong][0].item()}")


def _run(*inputs: Any) -> list[Tensor]:
    hidden, weight, bias, targets, token_weights, needed, d_losses, *options = inputs
    tensors = hidden, weight, bias, targets, token_weights
    loss, gradients = loss_and_gradients(*tensors, LossOptions(*options), needed, d_losses)
    return [loss, *(gradient for gradient in gradients if gradient is not None)]


def _empty_results(*inputs: Any) -> list[Tensor]:
    hidden, weight, bias, targets, _token_weights, needed, d_losses, *values = inputs
    options = LossOptions(*values)
    is_single = options.reduction == "none"
    wide = torch.promote_types(options.dtype, torch.float32)
    loss = hidden.new_empty(targets.shape if is_single else (), dtype=wide)
    if is_single and d_losses is None:
        return [loss]
    half = wide if options.dtype == torch.float16 else None
    needing = [t for t, need in zip((hidden, weight, bias), needed, strict=True) if need]
    return [loss, *(t.new_empty(t.shape, dtype=half or t.dtype) for t in needing)]


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    hidden, weight, bias, targets, token_weights, _needed, _d_losses, *options = inputs
    ctx.options = LossOptions(*options)
    is_single = ctx.options.reduction == "none"
    ctx.save_for_backward(*((hidden, weight, bias, targets, token_weights) if is_single else output[1:]))
    ctx.dtypes = [None if t is None else t.dtype for t in (hidden, weight, bias)]


def _scale_gradients(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    needed = list(ctx.needs_input_grad[:3])
    if ctx.options.reduction == "none":
        _, *found = _operator(*ctx.saved_tensors, needed, grads[0], *ctx.options)
    else:
        found = [grad * grads[0] for grad in ctx.saved_tensors]
    left = iter(found)
    scaled = (next(left).to(dtype) if need else None for need, dtype in zip(needed, ctx.dtypes, strict=True))
    return *scaled, *[None for _ in ctx.needs_input_grad[3:]]


_INPUTS = (  # the last seven are the fields of LossOptions
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, Tensor? token_weights, bool[] needed, "
    "Tensor? d_losses, SymInt ignore_index, SymInt? num_chunks, float z_loss, str reduction, ScalarType dtype, "
    "SymInt? vocab_size, float label_smoothing"
)
_operator = custom_op(
    "linear_cross_entropy", _INPUTS, _run, _empty_results, save=_save_gradients, gradients=_scale_gradients
)
