"""A loss that is no number ends the run before its weights are saved.

Nothing is read from the device between two log steps: the losses of the steps are kept where they are, as scalars, and
looked at together when the log reads the device anyway, and before every checkpoint.
"""

import math
from collections import deque
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_llm.checkpoints.archives import write_atomically
from lightning_llm.checkpoints.loop_state import is_log_step, step_is_complete
from lightning_llm.checkpoints.reading import step_files
from lightning_llm.checkpoints.run_directory import run_dir_of
from lightning_llm.training.callbacks.checkpoints import RunCheckpoints

KEPT = 4096  # micro-batches that are looked back on; a poisoned run stays poisoned, so none is missed


class NonFinite(RuntimeError):
    """Training has become meaningless: a loss, a gradient or a weight is NaN or infinite."""


class StopOnNonFinite(Callback):
    """Raises :class:`NonFinite` at the next log step or checkpoint, and writes the batch where it began to a file.

    The file ``non-finite-step-<step>.pt`` in the run directory holds ``step``, ``process``, ``input_ids`` and
    ``targets``; ``torch.load(…, weights_only=True)`` reads it.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._losses: deque[tuple[int, int, Tensor]] = deque(maxlen=KEPT)  # step, micro-batch in it, loss
        self._norms: deque[tuple[int, Tensor]] = deque(maxlen=KEPT)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Note the run directory: asking for it is a broadcast, and only one process may find a fault."""
        self._folder = run_dir_of(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the loss; at a log step look at all since the last one."""
        complete = step_is_complete(trainer)
        step = trainer.global_step if complete else trainer.global_step + 1
        micro = (trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1) % trainer.accumulate_grad_batches
        self._losses.append((step, micro, outputs["loss"].detach()))
        norm = getattr(pl_module, "grad_norm", None)
        # under 16-mixed an infinite gradient is everyday business: the scaler skips the step and lowers the scale
        if complete and norm is not None and trainer.precision != "16-mixed":
            self._norms.append((step, norm.detach()))
        if complete and is_log_step(trainer):
            self._look(trainer, weights=None)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A validation loss that is no number must not be saved, let alone as the best."""
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        self._look(trainer, weights=None)
        loss = trainer.callback_metrics.get("val_loss")
        if loss is not None and not math.isfinite(float(loss)):
            self._stop(trainer, f"val_loss is {float(loss)} after step {trainer.global_step}")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Refuse to save what cannot be gone on from."""
        if trainer.state.fn == "fit":
            self._look(trainer, weights=pl_module)

    def _look(self, trainer: Trainer, *, weights: LightningModule | None) -> None:
        values = [loss.float() for _, _, loss in self._losses] + [norm.float() for _, norm in self._norms]
        if weights is not None:
            values += [_local(p.detach()).sum(dtype=torch.float32) for p in weights.parameters()]
        if not values:
            return
        poisoned = not bool(torch.stack(values).isfinite().all())
        if trainer.world_size > 1:
            poisoned = trainer.strategy.reduce_boolean_decision(poisoned, all=False)
        if poisoned:
            self._locate(trainer)
        self._losses.clear()
        self._norms.clear()

    def _locate(self, trainer: Trainer) -> None:
        for step, micro, loss in self._losses:
            if not loss.isfinite():
                file = self._write(trainer, step, [micro])
                self._stop(trainer, f"train_loss is {loss.item()} in step {step}, micro-batch {micro}{file}")
        for step, norm in self._norms:
            if not norm.isfinite():
                file = self._write(trainer, step, range(trainer.accumulate_grad_batches))
                self._stop(trainer, f"grad_norm is {norm.item()} in step {step}{file}")
        self._stop(trainer, f"a weight, or the loss of another process, is no number at step {trainer.global_step}")

    def _write(self, trainer: Trainer, step: int, micro_batches: Any) -> str:
        """The batch to a file; which batch a step has is a function of its number, so none is kept for this."""
        loader: Any = trainer.train_dataloader
        if self._folder is None or not hasattr(loader, "__getitem__"):
            return ""
        first = (step - 1) * trainer.accumulate_grad_batches
        parts = [loader[first + micro] for micro in micro_batches]
        rank = f"-process-{trainer.global_rank}" if trainer.world_size > 1 else ""
        path = self._folder / f"non-finite-step-{step:08d}{rank}.pt"
        batch = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        write_atomically({"step": step, "process": trainer.global_rank, **batch}, path)
        return f"; its batch is in {path}"

    def _stop(self, trainer: Trainer, finding: str) -> None:
        checkpoints = next((c for c in trainer.callbacks if isinstance(c, RunCheckpoints)), None)  # type: ignore[attr-defined]
        folder = None if checkpoints is None else checkpoints.folder
        kept = [] if folder is None else step_files(folder)[-1:]
        last = f"the last good checkpoint is {kept[0]}" if kept else "there is no checkpoint before it"
        raise NonFinite(f"{finding}; nothing was saved after it, {last}: lower the learning rate or look at the data")


def _local(tensor: Tensor) -> Tensor:
    """This process's part of a sharded tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
