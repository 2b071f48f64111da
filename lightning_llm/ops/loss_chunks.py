"""The loss of a linear head and its gradients, a chunk of tokens at a time.

For one token with hidden state h, logits z = W h + b, probabilities p = softmax(z), target t and log Z = log Σ exp(z),

    loss = log Z - (1 - ε) z_t - ε mean(z) + λ log² Z              ε: label smoothing, λ: z-loss
    dz   = c (p (1 + 2 λ log Z) - (1 - ε) onehot(t) - ε / vocab)   c: the token's weight, over their sum for the mean
    dh   = dz W,    dW += dz hᵀ,    db += dz

The weight of a token is 1 unless it is given, and 0 if its target is ignored.

Three matmuls of the whole size, as in the plain form. Of all the logits only one chunk is alive, and its buffer also
takes dz. The sums dW and db are in float32 at least.

The elementwise work on a chunk is one Triton kernel on CUDA (``kernels.py``). Elsewhere it is a few
operators on groups of rows small enough to stay in cache between them, in float32 at least. With m = max(z) the
largest probability is exp(m - m) / Σ exp(z - m), so that log Z = m - log max(p): softmax, which is one fused operator,
gives it without a pass of its own. 4,096 tokens of a vocabulary of 50,257 in float32 take 84 ms so, 117 ms by exp and
sum, 207 ms by logsumexp (2 cores of an AMD EPYC, Zen 5), where the three matmuls take 5 s.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_llm.ops import sizes
from lightning_llm.ops.dispatch import kernels_for, matmul_into
from lightning_llm.ops.traced import device_type


class LossOptions(NamedTuple):
    """Options of ``linear_cross_entropy``, and the dtype of its matmuls before ``vocab_size``."""

    ignore_index: int
    num_chunks: int | None
    z_loss: float
    reduction: str
    dtype: torch.dtype
    vocab_size: int | None
    label_smoothing: float


def loss_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    token_weights: Tensor | None,
    options: LossOptions,
    needed: Sequence[bool],
    d_losses: Tensor | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """The loss, and its gradients with respect to hidden, weight and bias, ``None`` where not needed.

    The gradients come in the dtype of their tensors, but in float32 if the matmuls are in float16: they are yet to be
    multiplied by the gradient of the loss, and without the factor of a loss scaler float16 would round them to zero.

    Args:
        hidden: (…, hidden).
        weight: (vocab, hidden).
        bias: (vocab,) or ``None``.
        targets: (…).
        token_weights: (…) or ``None``.
        options: See :class:`LossOptions`.
        needed: Which of the three gradients are needed.
        d_losses: (…), the gradients of the single losses. Where ``options.reduction`` is ``none``, there are no
            gradients without them.
    """
    if options.reduction == "none" and d_losses is None:
        needed = (False, False, False)
    dtype = options.dtype
    wide = torch.promote_types(dtype, torch.float32)
    tokens = targets.numel()
    vocab = weight.shape[0]
    losses = hidden.new_empty(targets.shape, dtype=wide)
    flat_losses = losses.view(-1)
    flat_targets = targets.reshape(-1)
    flat_hidden = hidden.reshape(tokens, hidden.shape[-1])

    dtypes = [wide if dtype == torch.float16 or t is None else t.dtype for t in (hidden, weight, bias)]  # of gradients
    weight = weight.to(dtype)
    bias = None if bias is None else bias.to(wide)
    rows = sizes.loss_rows(tokens, vocab, dtype.itemsize, device_type(hidden), options.num_chunks)
    logits = hidden.new_empty(min(rows, tokens), sizes.logits_stride(vocab, device_type(hidden)), dtype=dtype)
    columns = list(sizes.slices(vocab, sizes.vocab_block(device_type(hidden))))
    d_hidden = hidden.new_empty(hidden.shape, dtype=dtypes[0]) if needed[0] else None
    # the first chunk writes it; without tokens there is none
    d_weight = (hidden.new_empty if tokens else hidden.new_zeros)(weight.shape, dtype=wide) if needed[1] else None
    d_bias = hidden.new_zeros(vocab, dtype=wide) if needed[2] else None
    scales = _scales(flat_targets, token_weights, d_losses, options)
    index = flat_targets.where(scales.counted, 0).long()

    for chunk in sizes.slices(tokens, rows):
        h = flat_hidden[chunk].to(dtype)
        z = logits[: h.shape[0], :vocab]
        for block in columns:
            torch.mm(h, weight[block].t(), out=z[:, block])
        if options.vocab_size is not None and options.vocab_size < vocab:
            z[:, options.vocab_size :] = float("-inf")  # of rows for no token: no probability, and dz is 0
        chunk_scale = scales.of_dz[chunk] if any(needed) else None
        flat_losses[chunk] = _losses_of_rows(z, bias, index[chunk], chunk_scale, options, d_bias)
        if d_hidden is not None:
            matmul_into(d_hidden.view(flat_hidden.shape)[chunk], z, weight, accumulate=False)
        if d_weight is not None:
            for block in columns:
                matmul_into(d_weight[block], z[:, block].t(), h, accumulate=chunk.start > 0)
        del h, chunk_scale  # before those of the next chunk are made
    gradients = [d_hidden, d_weight, d_bias]
    if scales.divide_late:
        gradients = [None if grad is None else grad.div_(scales.total) for grad in gradients]
    flat_losses.masked_fill_(~scales.counted, 0).mul_(scales.of_loss)
    loss = losses if options.reduction == "none" else flat_losses.sum()
    return loss, [None if grad is None else grad.to(d) for grad, d in zip(gradients, dtypes, strict=True)]


class _Scales(NamedTuple):
    """Factors of the tokens in loss and gradients.

    Attributes:
        counted: (tokens,), whether a target is not ignored.
        of_loss: (tokens,), the factor of each loss in the result.
        of_dz: (tokens,), that of each gradient with respect to logits.
        total: Scalar, the sum of the tokens' weights, or 1 where that is 0.
        divide_late: Whether the gradients are divided by the total at the end.
    """

    counted: Tensor
    of_loss: Tensor
    of_dz: Tensor
    total: Tensor
    divide_late: bool


def _scales(targets: Tensor, token_weights: Tensor | None, d_losses: Tensor | None, options: LossOptions) -> _Scales:
    """From (tokens,) targets, and what :func:`loss_and_gradients` gets."""
    counted = targets != options.ignore_index
    of_loss = counted.to(torch.promote_types(options.dtype, torch.float32))
    if token_weights is not None:
        of_loss *= token_weights.reshape(-1)
    is_mean = options.reduction == "mean"
    # In float16 dz of a mean would underflow as well. Then it is that of the sum, and the gradients are divided later.
    divide_late = is_mean and options.dtype == torch.float16
    of_dz = of_loss.clone() if divide_late else of_loss
    total = of_loss.sum()
    total = total.where(total > 0, 1)
    if is_mean:
        of_loss /= total
    if d_losses is not None:
        of_loss *= d_losses.reshape(-1)
    return _Scales(counted, of_loss, of_dz, total, divide_late)


def _losses_of_rows(
    z: Tensor, bias: Tensor | None, index: Tensor, weights: Tensor | None, options: LossOptions, d_bias: Tensor | None
) -> Tensor:
    """The losses of tokens and, in the buffer of their logits, dz.

    Args:
        z: (rows, vocab), the logits without bias. Overwritten: with dz if ``weights`` are given. Its rows may have a
            rest, up to their stride, whose content does not matter.
        bias: (vocab,), in float32 at least.
        index: (rows,), the targets.
        weights: (rows,), the weight of each loss in the result, or ``None`` where no gradient is needed.
        options: With λ, ε and how many of the logits are of tokens.
        d_bias: (vocab,), to which the rows' share of the bias's gradient is added, or ``None``.
    """
    wide = torch.promote_types(z.dtype, torch.float32)
    losses = z.new_empty(z.shape[0], dtype=wide)
    vocab = z.shape[1] if options.vocab_size is None else options.vocab_size
    z_loss, smoothing = options.z_loss, options.label_smoothing
    if fused := kernels_for(z):
        fused.losses_of_rows(z, bias, index, weights, z_loss, losses, smoothing, vocab, z.stride(0))
        if d_bias is not None:
            d_bias += z.sum(dim=0, dtype=wide)
        return losses
    size = sizes.softmax_rows(z.shape[1], wide.itemsize)
    buffer = None if z.dtype == wide else z.new_empty(min(size, z.shape[0]), z.shape[1], dtype=wide)
    for rows in sizes.slices(z.shape[0], size):
        p = z[rows] if buffer is None else buffer[: rows.stop - rows.start].copy_(z[rows])
        if bias is not None:
            p += bias
        target = index[rows].unsqueeze(-1)
        largest = p.amax(dim=-1, keepdim=True)
        target_logit = p.gather(-1, target)
        if smoothing:
            target_logit.lerp_(p[:, :vocab].mean(dim=-1, keepdim=True), smoothing)
        torch.softmax(p, dim=-1, out=p)
        log_sum = p.amax(dim=-1, keepdim=True).log_().neg_()
        log_z = largest + log_sum
        # not log_z - target_logit: a small loss of large logits would be their rounding error
        losses[rows] = (largest - target_logit).add_(log_sum).add_(log_z.square(), alpha=z_loss).squeeze(-1)
        if weights is None:
            continue
        weight = weights[rows].unsqueeze(-1)
        p.mul_(log_z.mul_(2 * z_loss).add_(1).mul_(weight)).scatter_add_(-1, target, weight * (smoothing - 1))
        if smoothing:
            p[:, :vocab].sub_(weight * (smoothing / vocab))
        if d_bias is not None:
            d_bias += p.sum(dim=0)
        if buffer is not None:
            z[rows] = p
    return losses
