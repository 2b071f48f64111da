"""The training curve and the speed, off the hot path.

Between two log steps the only work is one addition on the device and a few readings of the clock. ``self.log`` in every
step would cost 0.75 ms of it (measured with Lightning 2.6 on a 2-core CPU), and reading the loss in every step would
make the host wait for a GPU.
"""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_llm.checkpoints.loop_state import is_log_step, step_is_complete
from lightning_llm.measure.timer import PhaseClock
from lightning_llm.training.scalar_names import (
    GRAD_NORM,
    LEARNING_RATE,
    THROUGHPUT,
    TIME_OF_PHASE,
    TOKENS_PER_SECOND,
    TRAIN_LOSS,
)
from lightning_llm.training.utilisation import Utilisation, utilisation_of

_BETWEEN = "between"  # the end of one micro-batch and the beginning of the next
_PARTS = ("forward", "backward", "optimizer")


class TrainingLog(Callback):
    """Every ``trainer.log_every_n_steps`` optimiser steps: loss, learning rate, gradient norm, speed.

    ``train_loss`` is the mean over all steps since the last entry. ``throughput/…``: ``tokens_per_second`` of all
    processes, ``step_s``, ``data_stall_percent`` (share of the time that went into waiting for data), ``mfu_percent``
    and ``hfu_percent`` (model and hardware FLOPs against the device's peak, Chowdhery et al. 2022, "PaLM", appendix B).
    ``time/…_s``: seconds per step in ``data``, ``forward``, ``backward``, ``optimizer`` (with clipping) and ``other``
    (callbacks, logging, Lightning). Validation and the saving of checkpoints count nowhere. The x axis is the number of
    optimiser steps.

    Args:
        peak_tflops: Peak of one device in 10^12 FLOP per second, for MFU and HFU. Null: from the table of devices; a
            device that is not in it gets none.

    Attributes:
        utilisation: What MFU and HFU are taken against, or why there are none; known from the start of training on.
    """

    def __init__(self, peak_tflops: float | None = None) -> None:
        if peak_tflops is not None and not peak_tflops > 0:
            raise ValueError(f"peak_tflops must be above 0, got {peak_tflops}")
        self.peak_tflops = peak_tflops
        self.utilisation: Utilisation | None = None
        self._loss: torch.Tensor | None = None
        self._tokens = 0
        self._steps = 0  # that the loss was added up over
        self._timed_steps = 0
        self._waited = 0.0
        self._has_saved = False
        self._clock = PhaseClock()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock; what a checkpoint knew of the entry it was written in comes first."""
        if self._loss is not None:
            self._loss = self._loss.to(pl_module.device)
        self.utilisation = utilisation_of(trainer, getattr(pl_module, "architecture", None), self.peak_tflops)
        self._clock = PhaseClock(pl_module.device)
        self._tokens, self._timed_steps, self._waited = 0, 0, 0.0
        self._clock.start()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """The batch is there."""
        if self._has_saved:
            self._clock.start()
        else:
            self._clock.mark(_BETWEEN)
        self._has_saved = False

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """The loss is there."""
        self._clock.mark("forward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The gradients are there."""
        self._clock.mark("backward")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add up; log when it is time."""
        self._clock.mark("optimizer")
        loss = outputs["loss"].detach()  # already divided by the number of micro-batches in a step
        self._loss = loss if self._loss is None else self._loss + loss
        self._tokens += batch["input_ids"].numel()
        if not step_is_complete(trainer):
            return
        self._steps += 1
        self._timed_steps += 1
        if is_log_step(trainer):
            self._write(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock."""
        self._clock.mark(_BETWEEN)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let it go on."""
        self._clock.start()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """The entry at hand, so that the curve of a resumed run is that of an uninterrupted one."""
        self._has_saved = True
        if self._loss is not None:
            loss = trainer.strategy.reduce(self._loss.clone(), reduce_op="mean")
            checkpoint["callbacks"][self.state_key] = {"loss": loss, "steps": self._steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the entry at hand."""
        self._loss, self._steps = state_dict["loss"], state_dict["steps"]

    def _write(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._loss is not None
        loss = trainer.strategy.reduce(self._loss, reduce_op="mean") if trainer.world_size > 1 else self._loss
        metrics = {TRAIN_LOSS: loss.item() / self._steps}  # reading it, the host has waited for the device
        metrics[LEARNING_RATE] = trainer.optimizers[0].param_groups[0]["lr"]
        grad_norm = getattr(pl_module, "grad_norm", None)
        if grad_norm is not None:
            metrics[GRAD_NORM] = grad_norm.item()
        speed = self._speed(trainer)
        self._loss, self._tokens, self._steps, self._timed_steps = None, 0, 0, 0
        # What the bar shows and what a callback may wait for. `log_dict` would end in the same dict, 1.8 ms later.
        watched = {**metrics, TOKENS_PER_SECOND: speed[TOKENS_PER_SECOND]}
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in watched.items()})
        metrics |= speed
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)

    def _speed(self, trainer: Trainer) -> dict[str, float]:
        """``throughput/…`` and ``time/…`` since the last entry."""
        assert self.utilisation is not None
        seconds = self._clock.take()
        total, steps = sum(seconds.values()), self._timed_steps
        waited = float(getattr(trainer.train_dataloader, "waited_s", 0.0))
        between = seconds.get(_BETWEEN, 0.0)
        data, self._waited = min(waited - self._waited, between), waited
        parts = {"data": data, **{part: seconds.get(part, 0.0) for part in _PARTS}, "other": between - data}
        speed = {
            "tokens_per_second": self._tokens * trainer.world_size / total,
            "step_s": total / steps,
            "data_stall_percent": 100 * data / total,
            **self.utilisation.percent(total / steps),
        }
        return {
            **{THROUGHPUT + name: value for name, value in speed.items()},
            **{f"{TIME_OF_PHASE}{part}_s": value / steps for part, value in parts.items()},
        }
