"""The loss of an optimizer step: a sum over the targets of its global batch, divided by their count.

A mean of the means of micro-batches would weigh a target by how few others there are in its micro-batch. The gradient
of a step is that of Σ loss · count / Σ count, over all micro-batches of all processes. Σ count is known only after the
last one. So each micro-batch is multiplied by its count / unit, where the unit is a constant, and when gradients are
clipped, they are multiplied by micro-batches · unit / Σ count; Lightning and the strategy divide by the number of
micro-batches. With full batches, both factors are exactly 1. What MLPs add is weighted in the same way: it shares its
gradient with the loss, and a factor of its own would have to know Σ count.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_llm.checkpoints.loop_state import micro_batch_of_step
from lightning_llm.data.batches import IGNORED
from lightning_llm.optim.clipping import clip_grad_norm_


class LossDenominator(NamedTuple):
    """Count that the loss of a micro-batch, as Lightning reports it, is the mean over.

    Attributes:
        scale: Times this, the loss is the sum over the targets.
        weight: The number of targets, or the sum of their weights, on the device.
    """

    scale: Tensor | float
    weight: Tensor


class StepLoss:
    """Makes the loss of a step a mean over the targets of its global batch, however that is cut.

    Attributes:
        denominator: Of the last micro-batch; ``None`` before the first.
    """

    def __init__(self) -> None:
        self.denominator: LossDenominator | None = None
        self._total: Tensor | None = None  # count of the step so far; None: nothing is left to divide by it
        self._unit = 0.0

    def weighted(self, loss: Tensor, batch: Any, count: Tensor | None, trainer: Trainer) -> Tensor:
        """The mean loss of a micro-batch, multiplied by its share of the step: 1 if all have as many targets.

        Args:
            loss: Scalar.
            batch: The micro-batch.
            count: What ``loss`` is the mean over; ``None`` for a loss of the user's own: the number of its targets.
            trainer: In a training step.
        """
        targets = batch.get("targets") if isinstance(batch, Mapping) else None
        if count is None:
            count = torch.ones_like(loss) if targets is None else (targets != IGNORED).sum()
        count = count.detach().to(torch.float32 if loss.device.type == "mps" else torch.float64)
        if _micro_batches(trainer) == 1:
            self._total = None
            self.denominator = LossDenominator(scale=count, weight=count)
            return loss
        if micro_batch_of_step(trainer) == 0:
            self._total = None
            size = 1.0 if targets is None else float(max(1, targets.numel()))
            if trainer.world_size == 1:
                self._unit = size
            elif not self._unit:  # the same in all processes
                self._unit = trainer.strategy.broadcast(size)
        self._total = count if self._total is None else self._total + count
        self.denominator = LossDenominator(scale=self._unit * trainer.accumulate_grad_batches, weight=count)
        return loss * (count / self._unit).to(loss.dtype)

    def finish(
        self, optimizer: Optimizer, clip_value: float | None, clip_algorithm: str | None, trainer: Any
    ) -> Tensor:
        """Divide the gradients by the count of the step, and clip them, in one pass.

        Args:
            optimizer: Of all parameters.
            clip_value: ``trainer.gradient_clip_val``; 0 clips nothing, as ``None``.
            clip_algorithm: ``norm``, which ``None`` means, or ``value``.
            trainer: At the end of a step; one without ``weighted`` losses needs none.

        Returns:
            The norm of the gradients before clipping, scalar, on the device.
        """
        factor: Tensor | float = 1.0
        if self._total is not None:
            total = self._total.clone()
            if trainer.world_size > 1:
                dist.all_reduce(total)
            factor = (_micro_batches(trainer) * self._unit / total).where(total > 0, 1)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        by_value = clip_algorithm == "value" and bool(clip_value)
        max_norm = float("inf") if by_value else clip_value or float("inf")
        norm = clip_grad_norm_(parameters, max_norm, factor=factor)
        if by_value:
            torch.nn.utils.clip_grad_value_(parameters, clip_value)  # type: ignore[arg-type]
        return norm


def _micro_batches(trainer: Trainer) -> int:
    """Number of micro-batches in a step, on all processes."""
    return trainer.accumulate_grad_batches * trainer.world_size
