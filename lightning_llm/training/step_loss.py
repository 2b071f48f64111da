"""The loss of an optimizer step: a sum over the targets of its global batch, divided by their count.

A mean of the means of micro-batches would weigh a target by how few others there are in its micro-batch. The gradient
of a step is that of Σ loss · count / Σ count, over all micro-batches of all processes. Σ count is known only after the
last one. So each micro-batch is multiplied by its count / unit, where the unit is a constant, and when gradients are
clipped, they are multiplied by micro-batches · unit / Σ count; Lightning and the strategy divide by the number of
micro-batches. With full batches, both factors are exactly 1. What MLPs add is weighted in the same way: it shares its
gradient with the loss, and a factor of its own would have to know Σ count.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_llm.checkpoints.loop_state import micro_batch_of_step
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.loss import IGNORED, CrossEntropy
from lightning_llm.model.transformer import Transformer
from lightning_llm.optim.clipping import clip_grad_norm_
from lightning_llm.training.environment import seed_dropout
from lightning_llm.training.preflight import check_batch

Batch = dict[str, Tensor]


class SummedLoss(LightningModule):
    """A language model whose training loss is a mean over the targets of the global batch, however it is cut.

    Attributes:
        grad_norm: Norm of the last step's gradients before clipping, scalar, on the device.
        auxiliary_loss: What MLPs added to the loss of the last micro-batch, scalar, on the device.
        counted: Of the last micro-batch: what makes a sum over its targets of the loss that Lightning reports, and
            their count or the sum of their weights, on the device.
    """

    transformer: Transformer
    architecture: ModelConfig
    loss_chunks: int | None
    grad_norm: Tensor | None = None
    auxiliary_loss: Tensor | None = None
    counted: tuple[Tensor | float, Tensor] | None = None
    _count: Tensor | None = None  # of the last batch that `loss` has seen
    _total: Tensor | None = None  # of the step so far; None where the unit is the count itself
    _unit = 0.0

    def loss(self, batch: Batch) -> Tensor:
        """What training minimizes, of one batch: the mean of ``architecture.loss`` and what MLPs add, in float32.

        Args:
            batch: ``input_ids`` and ``targets``, both (batch, seq); ``documents``, likewise, keeps attention inside;
                ``weights``, likewise, of the targets.
        """
        loss, self._count = self._mean(self.transformer.objective, batch, weighted=True)
        added = self.transformer.auxiliary_loss() if self.training else None
        if added is None:
            return loss
        self.auxiliary_loss = added.detach()
        return loss + added

    def cross_entropy(self, batch: Batch) -> Tensor:
        """Mean cross-entropy of a batch in nats per token, float32, whatever the model was trained for."""
        return self._mean(CrossEntropy(self.architecture), batch)[0]

    def token_losses(self, batch: Batch) -> Tensor:
        """Cross-entropy of each target in nats, (batch, seq), float32; 0 where it does not count. For evaluation."""
        check_batch(batch)
        hidden = self.transformer(batch["input_ids"], documents=batch.get("documents"))
        objective, head = CrossEntropy(self.architecture), self.transformer.lm_head
        return objective.each(hidden, head, batch["targets"], self.loss_chunks)

    def _mean(self, objective: nn.Module, batch: Batch, weighted: bool = False) -> tuple[Tensor, Tensor]:
        check_batch(batch)
        hidden = self.transformer(batch["input_ids"], documents=batch.get("documents"))
        options = {"weights": batch.get("weights") if weighted else None, "num_chunks": self.loss_chunks}
        total, count = objective(hidden, self.transformer.lm_head, batch["targets"], **options)
        return total / count.where(count > 0, 1), count

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of one micro-batch, multiplied by its share of the step: 1 if all have as many targets."""
        trainer = self.trainer
        if self.architecture.dropout:
            seed_dropout(trainer)
        self._count = None
        loss = self.loss(batch)
        targets = batch.get("targets") if isinstance(batch, Mapping) else None
        count = self._count
        if count is None:  # a loss of the user's own
            count = torch.ones_like(loss) if targets is None else (targets != IGNORED).sum()
        count = count.detach().to(torch.float32 if loss.device.type == "mps" else torch.float64)
        if self._micro_batches == 1:
            self._total, self.counted = None, (count, count)
            return loss
        if micro_batch_of_step(trainer) == 0:
            self._total, size = None, 1.0 if targets is None else float(max(1, targets.numel()))
            if trainer.world_size == 1:
                self._unit = size
            elif not self._unit:  # the same in all processes
                self._unit = trainer.strategy.broadcast(size)
        self._total = count if self._total is None else self._total + count
        self.counted = self._unit * trainer.accumulate_grad_batches, count
        return loss * (count / self._unit).to(loss.dtype)

    @property
    def _micro_batches(self) -> int:
        """Of a step, on all processes."""
        return self.trainer.accumulate_grad_batches * self.trainer.world_size

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: Any = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Divide the gradients by the count of the step, and clip; fused optimizers under autocast too.

        Saves their norm before clipping for the log.
        """
        factor: Tensor | float = 1.0
        if self._total is not None:
            total = self._total.clone()
            if self.trainer.world_size > 1:
                dist.all_reduce(total)
            factor = (self._micro_batches * self._unit / total).where(total > 0, 1)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        by_value = gradient_clip_algorithm == "value" and gradient_clip_val is not None
        max_norm = float("inf") if by_value else gradient_clip_val or float("inf")
        self.grad_norm = clip_grad_norm_(parameters, max_norm, factor=factor)
        if by_value:
            torch.nn.utils.clip_grad_value_(parameters, gradient_clip_val)
