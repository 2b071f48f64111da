"""A loss that is NaN or infinite ends the run before its weights are saved.

Nothing is read from the device between two log steps: the losses stay on the device as scalars. They are checked
together when the log reads the device anyway, and before every checkpoint.
"""

import math
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_llm.checkpoints.archives import write_atomically
from lightning_llm.checkpoints.loop_state import is_log_step, loss_in, micro_batch_of_step, step_is_complete
from lightning_llm.optim.base import local_shard
from lightning_llm.runs.directory import run_dir_of, step_files
from lightning_llm.training import metrics
from lightning_llm.training.callbacks.run_checkpoints import RunCheckpoints

KEPT = 8192  # values to look back on; a run with a NaN never recovers, so none is missed


class NonFinite(RuntimeError):
    """Training has become meaningless: a loss, a gradient or a weight is NaN or infinite."""


class StopOnNonFinite(Callback):
    """Raises :class:`NonFinite` at the next log step or checkpoint, and writes the batch that caused it to a file.

    The file ``non-finite-step-<step>.pt`` in the run directory holds ``step``, ``process``, ``input_ids`` and
    ``targets``; ``torch.load(…, weights_only=True)`` reads it.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._values: deque[tuple[str, int, range, Tensor]] = deque(maxlen=KEPT)  # name, step, its micro-batches, value

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Ask for the run directory here, because asking is a broadcast and only one process may find a NaN."""
        self._folder = run_dir_of(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Collect the loss; at a log step, check all since the last one."""
        complete = step_is_complete(trainer)
        norm = getattr(pl_module, "grad_norm", None)
        step = trainer.global_step + (not complete)
        micro = micro_batch_of_step(trainer)
        if (loss := loss_in(outputs)) is not None:
            self._values.append((metrics.TRAIN_LOSS, step, range(micro, micro + 1), loss))
        # under 16-mixed an infinite gradient is normal: the scaler skips the step and lowers the scale
        if complete and norm is not None and trainer.precision != "16-mixed":
            self._values.append((metrics.GRAD_NORM, step, range(trainer.accumulate_grad_batches), norm.detach()))
        if complete and is_log_step(trainer):
            self._check(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop before a checkpoint with a NaN validation loss is saved."""
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        self._check(trainer)
        loss = float(trainer.callback_metrics.get(metrics.VAL_LOSS, 0.0))
        if not math.isfinite(loss):
            self._stop(trainer, f"val_loss is {loss} after step {trainer.global_step}")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Stop before weights that are NaN or infinite are saved."""
        if trainer.state.fn == "fit":
            self._check(trainer, pl_module.parameters())

    def _check(self, trainer: Trainer, weights: Iterable[Tensor] = ()) -> None:
        values = [value.float() for *_, value in self._values]
        values += [local_shard(weight.detach()).sum(dtype=torch.float32) for weight in weights]
        if not values:
            return
        is_non_finite = not bool(torch.stack(values).isfinite().all())
        if trainer.world_size > 1:
            is_non_finite = trainer.strategy.reduce_boolean_decision(is_non_finite, all=False)
        if is_non_finite:
            self._report(trainer)
        self._values.clear()

    def _report(self, trainer: Trainer) -> None:
        for name in (metrics.TRAIN_LOSS, metrics.GRAD_NORM):
            for _, step, micro_batches, value in (each for each in self._values if each[0] == name):
                if not value.isfinite():
                    micro = f", micro-batch {micro_batches[0]}" if name == metrics.TRAIN_LOSS else ""
                    file = self._write(trainer, step, micro_batches)
                    self._stop(trainer, f"{name} is {value.item()} in step {step}{micro}{file}")
        step = trainer.global_step
        self._stop(trainer, f"a weight, or the loss of another process, is NaN or infinite at step {step}")

    def _write(self, trainer: Trainer, step: int, micro_batches: Iterable[int]) -> str:
        """Write a batch to a file. Batches are a function of the step, so the loader can produce it again."""
        loader: Any = trainer.train_dataloader
        if self._folder is None or not hasattr(loader, "__getitem__"):
            return ""
        parts = [loader[(step - 1) * trainer.accumulate_grad_batches + micro] for micro in micro_batches]
        rank = f"-process-{trainer.global_rank}" if trainer.world_size > 1 else ""
        path = self._folder / f"non-finite-step-{step:08d}{rank}.pt"
        batch = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        write_atomically({"step": step, "process": trainer.global_rank, **batch}, path)
        return f"; its batch is in {path}"

    def _stop(self, trainer: Trainer, finding: str) -> None:
        callbacks = trainer.checkpoint_callbacks
        folder = next((each.folder for each in callbacks if isinstance(each, RunCheckpoints)), None)
        saved = [] if folder is None else step_files(folder)[-1:]
        last = f"the last good checkpoint is {saved[0]}" if saved else "there is no checkpoint before it"
        raise NonFinite(f"{finding}; nothing was saved after it, {last}: lower the learning rate or check the data")
