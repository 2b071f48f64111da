"""The loss of a linear head and its gradients, a chunk of tokens at a time.

For one token with hidden state h, logits z = W h + b, probabilities p = softmax(z), target t and log Z = log Σ exp(z),

    loss = log Z - z_t + λ log² Z                       λ: the z-loss
    dz   = c (p (1 + 2 λ log Z) - onehot(t))            c: 1/count for the mean, 1 for the sum, 0 if t is ignored
    dh   = dz W,    dW += dz hᵀ,    db += dz

Three matrix products of the whole size, as in the plain form. Of all the logits only one chunk is alive, and its buffer
also takes dz. The elementwise work (``softmax_rows.py``) goes over it in groups of rows that stay in cache. The sums dW
and db are taken in float32 at least.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_llm.ops import sizes
from lightning_llm.ops.softmax_rows import losses_of_rows


class Head(NamedTuple):
    """The parameters: weight (vocab, hidden) and bias (vocab,) or ``None``."""

    weight: Tensor
    bias: Tensor | None


class LossOptions(NamedTuple):
    """What is no tensor. ``dtype`` is that of the matrix products."""

    ignore_index: int
    num_chunks: int | None
    z_loss: float
    reduction: str
    dtype: torch.dtype


def loss_and_gradients(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    options: LossOptions,
    needed: tuple[bool, ...],
    d_losses: Tensor | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """The loss, and its gradients with respect to hidden, weight and bias, ``None`` where not needed.

    The gradients come in the dtype of their tensors, but in float32 if the products are in float16: they are yet to be
    multiplied by the gradient of the loss, and without the factor of a loss scaler float16 would round them to zero.

    Args:
        hidden: (…, hidden).
        head: The parameters.
        targets: (…).
        options: How.
        needed: Which of the three gradients are wanted.
        d_losses: (…), the gradients of the single losses, where ``options.reduction`` is ``none``.

    Returns:
        The loss, scalar or (…) by ``options.reduction``, in float32 at least; the three gradients.
    """
    losses = hidden.new_empty(targets.shape, dtype=torch.promote_types(options.dtype, torch.float32))
    flat_losses, flat_targets = losses.view(-1), targets.reshape(-1)
    counted = flat_targets != options.ignore_index
    work = _Chunks(hidden, head, options, needed)
    weights = counted.to(work.wide)  # of the losses in the result
    if options.reduction == "mean":
        weights /= counted.sum().clamp_(min=1)
    if d_losses is not None:
        weights *= d_losses.reshape(-1)
    # In float16 dz of a mean would underflow as well. Then it is that of the sum, and the gradients are divided later.
    divide_late = options.reduction == "mean" and options.dtype == torch.float16
    index = flat_targets.where(counted, 0).long()
    for rows in sizes.slices(targets.numel(), work.rows):
        flat_losses[rows] = work.add(rows, index[rows], (counted if divide_late else weights)[rows])
    gradients = work.gradients(weights.amax() if divide_late else None)
    flat_losses.masked_fill_(~counted, 0)
    return losses if options.reduction == "none" else flat_losses.mul_(weights).sum(), gradients


class _Chunks:
    """The gradients so far, and the buffers of a chunk."""

    def __init__(self, hidden: Tensor, head: Head, options: LossOptions, needed: tuple[bool, ...]) -> None:
        tokens, vocab = math.prod(hidden.shape[:-1]), head.weight.shape[0]
        self.hidden = hidden.reshape(tokens, hidden.shape[-1])
        self.options, self.needs_gradients = options, any(needed)
        self.wide = torch.promote_types(options.dtype, torch.float32)
        self.weight = head.weight.to(options.dtype)
        self.bias = None if head.bias is None else head.bias.to(self.wide)
        self.rows = sizes.loss_rows(tokens, vocab, options.dtype.itemsize, hidden.device.type, options.num_chunks)
        self.logits = hidden.new_empty(min(self.rows, tokens), vocab, dtype=options.dtype)
        self.block = sizes.vocab_block(hidden.device.type)
        need_hidden, need_weight, need_bias = needed
        half = options.dtype == torch.float16
        self.dtypes = [self.wide if half or t is None else t.dtype for t in (hidden, *head)]  # of the results
        self.d_hidden = hidden.new_empty(hidden.shape, dtype=self.dtypes[0]) if need_hidden else None
        self.d_weight = hidden.new_zeros(head.weight.shape, dtype=self.wide) if need_weight else None
        self.d_bias = hidden.new_zeros(vocab, dtype=self.wide) if need_bias else None

    def add(self, rows: slice, index: Tensor, weights: Tensor) -> Tensor:
        """The losses of the tokens in ``rows``; what they contribute to the gradients is added.

        Args:
            rows: Of ``hidden``.
            index: (rows,), the targets, 0 for those that do not count.
            weights: (rows,), of the losses in the result, 0 for those that do not count.

        Returns:
            (rows,).
        """
        h = self.hidden[rows].to(self.options.dtype)
        z = self.logits[: h.shape[0]]
        for columns in self._columns():
            torch.mm(h, self.weight[columns].t(), out=z[:, columns])
        losses = losses_of_rows(
            z,
            self.bias,
            index,
            weights.to(self.wide) if self.needs_gradients else None,
            self.options.z_loss,
            self.d_bias,
        )
        if self.d_hidden is not None:
            d_hidden = self.d_hidden.view(self.hidden.shape)[rows]
            if d_hidden.dtype == z.dtype:
                torch.mm(z, self.weight, out=d_hidden)
            else:
                d_hidden.copy_(torch.mm(z, self.weight))
        if self.d_weight is not None:
            for columns in self._columns():
                part = z[:, columns].t()
                if self.wide == z.dtype:
                    self.d_weight[columns].addmm_(part, h)
                else:
                    self.d_weight[columns] += torch.mm(part, h)
        return losses

    def gradients(self, factor: Tensor | None) -> list[Tensor | None]:
        """Of hidden, weight and bias, after the last chunk, times ``factor``."""
        gradients: tuple[Tensor | None, ...] = (self.d_hidden, self.d_weight, self.d_bias)
        if factor is not None:
            gradients = tuple(None if grad is None else grad.mul_(factor) for grad in gradients)
        return [None if grad is None else grad.to(d) for grad, d in zip(gradients, self.dtypes, strict=True)]

    def _columns(self) -> Iterator[slice]:
        return sizes.slices(self.weight.shape[0], self.block)
