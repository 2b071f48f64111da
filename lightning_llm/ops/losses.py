"""Cross-entropy of a language model: the plain form first, the form that never holds all logits second.

For one token with logits z and target t the loss is -log softmax(z)_t. With m = max(z), log and exp cancel:

    loss = log Σ_j exp(z_j - m) - (z_t - m)

so nothing overflows and no probability is rounded to zero before its logarithm is taken.

``linear_cross_entropy`` computes the logits z = h Wᵀ + b for a chunk of tokens at a time. While the chunk is there it
also computes the gradients, dz = (softmax(z) - onehot(t)) / count, dh = dz W, dW += dzᵀ h, and throws the logits away;
backward only scales what forward has found. The optional z-loss (Chowdhery et al. 2022, "PaLM", section 5) adds
``z_loss`` times (log Σ_j exp z_j)² per token, whose gradient is 2 ``z_loss`` (log Σ_j exp z_j) softmax(z).
"""

from typing import Any, Literal

import torch
from torch import Tensor

Reduction = Literal["mean", "sum", "none"]
TOKENS_PER_CHUNK = 256


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats.

    Args:
        logits: (…, vocab), any floating dtype; computed in float32 at least.
        targets: (…), token ids.

    Returns:
        Scalar, float32 (float64 for float64 logits): the mean over all leading dimensions.

    Raises:
        ValueError: The leading dimensions of ``logits`` are not the shape of ``targets``.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(f"targets must have shape {tuple(logits.shape[:-1])}, got {tuple(targets.shape)}")
    z = logits if logits.dtype == torch.float64 else logits.float()
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

    Args:
        hidden: (…, hidden).
        weight: (vocab, hidden).
        targets: (…), token ids; ``ignore_index`` where there is nothing to predict.
        bias: (vocab,).
        ignore_index: The target that does not count.
        num_chunks: Number of chunks over the tokens; ``None`` chooses.
        reduction: ``mean`` over the tokens that count, ``sum``, or ``none``.
        z_loss: Weight of the squared log-partition.

    Returns:
        Scalar, or (…) for ``none``; float32 (float64 for float64 inputs).

    Raises:
        ValueError: A shape, dtype, device, chunk count or reduction that does not fit.
    """
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(f"targets must have shape {tuple(hidden.shape[:-1])}, got {tuple(targets.shape)}")
    if hidden.shape[-1] != weight.shape[-1]:
        raise ValueError(f"weight must have shape (vocab, {hidden.shape[-1]}), got {tuple(weight.shape)}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    flat = hidden.reshape(-1, hidden.shape[-1])
    if torch.is_autocast_enabled(hidden.device.type):
        flat = flat.to(torch.get_autocast_dtype(hidden.device.type))
        weight = weight.to(flat.dtype)
        bias = None if bias is None else bias.to(flat.dtype)
    chunks = num_chunks or max(1, -(-flat.shape[0] // TOKENS_PER_CHUNK))
    losses: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        flat, weight, bias, targets.reshape(-1).long(), ignore_index, chunks, reduction, z_loss, torch.is_grad_enabled()
    )
    return losses.reshape(targets.shape) if reduction == "none" else losses


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        ignore_index: int,
        chunks: int,
        reduction: Reduction,
        z_loss: float,
        grad: bool,
    ) -> Tensor:
        ctx.reduction = reduction
        if reduction == "none":
            ctx.save_for_backward(hidden, weight, bias, targets)
            ctx.options = (ignore_index, chunks, z_loss)
            return _chunked(hidden, weight, bias, targets, ignore_index, chunks, z_loss, None)[0]
        scale = torch.ones((), dtype=_accumulator(hidden.dtype), device=hidden.device)
        if reduction == "mean":
            scale = scale / (targets != ignore_index).sum().clamp_(min=1)
        needs = grad and any(ctx.needs_input_grad[:3])
        coefficients = scale.expand(targets.shape[0]) if needs else None
        losses, grads = _chunked(hidden, weight, bias, targets, ignore_index, chunks, z_loss, coefficients)
        ctx.save_for_backward(*grads)
        return losses.sum() * scale

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.saved_tensors
        if ctx.reduction == "none":
            ignore_index, chunks, z_loss = ctx.options
            grads = _chunked(*ctx.saved_tensors, ignore_index, chunks, z_loss, dloss)[1]
        else:
            grads = [None if g is None else g * dloss.to(g.dtype) for g in grads]
        return *grads, None, None, None, None, None, None


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _chunked(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    ignore_index: int,
    chunks: int,
    z_loss: float,
    coefficients: Tensor | None,
) -> tuple[Tensor, list[Tensor | None]]:
    """Losses per token and, where ``coefficients`` (their weight in the total) are given, the three gradients."""
    dtype = _accumulator(hidden.dtype)
    losses = torch.zeros(targets.shape[0], dtype=dtype, device=hidden.device)
    d_hidden = torch.empty_like(hidden)
    d_weight = torch.zeros(weight.shape, dtype=dtype, device=weight.device) if coefficients is not None else None
    d_bias = torch.zeros(bias.shape, dtype=dtype, device=bias.device) if bias is not None else None
    size = max(1, -(-targets.shape[0] // chunks))
    for start in range(0, targets.shape[0], size):
        rows = slice(start, start + size)
        h, t = hidden[rows], targets[rows]
        counts = t != ignore_index
        index = t.where(counts, 0).unsqueeze(-1)
        z = (h @ weight.T if bias is None else torch.addmm(bias, h, weight.T)).to(dtype)
        peak = z.amax(dim=-1, keepdim=True)
        picked = z.gather(-1, index)
        total = z.sub_(peak).exp_().sum(dim=-1, keepdim=True)
        log_partition = total.log() + peak
        loss = log_partition - picked + z_loss * log_partition.square()
        losses[rows] = torch.where(counts, loss.squeeze(-1), 0)
        if coefficients is not None and d_weight is not None:
            c = (coefficients[rows] * counts).to(dtype).unsqueeze(-1)
            dz = z.mul_(c * (1 + 2 * z_loss * log_partition) / total).scatter_add_(-1, index, -c)
            if d_bias is not None:
                d_bias += dz.sum(dim=0)
            dz = dz.to(hidden.dtype)
            d_hidden[rows] = dz @ weight
            d_weight += dz.T @ h
    if coefficients is None or d_weight is None:
        return losses, []
    return losses, [
        d_hidden,
        d_weight.to(weight.dtype),
        d_bias if bias is None or d_bias is None else d_bias.to(bias.dtype),
    ]
