"""What a run keeps: its newest steps, and its best by validation loss.

    checkpoints/step-00000500.ckpt    the newest ``keep_last``, named by optimiser steps
    checkpoints/best.ckpt             the lowest ``val_loss`` so far

Every file is complete or absent (see ``training.checkpointing``). ``best.ckpt`` is a hard link to the step it came
from: it costs no second writing, and lives on when that step is cleared away.
"""

import os
import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from lightning_llm.training.callbacks.signals import Interrupted
from lightning_llm.training.checkpointing import BEST, step_files, step_of
from lightning_llm.training.position import step_is_complete


class RunCheckpoints(Checkpoint):
    """Saves after every validation, every ``every_n_steps``, at the end and when the run is interrupted.

    Args:
        folder: Where the files go. Null: ``checkpoints`` in the run directory.
        keep_last: How many of the newest steps stay.
        every_n_steps: Optimiser steps between two savings beside those of the validation. Null: none.

    Attributes:
        best_loss: Lowest validation loss so far.
        best_step: The step it was reached at.
        newest: The file written last.
        validated_step: The step of the last validation.
    """

    def __init__(self, folder: str | None = None, keep_last: int = 2, every_n_steps: int | None = None) -> None:
        for name, value in (("keep_last", keep_last), ("every_n_steps", every_n_steps)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self._given_folder = None if folder is None else Path(folder)
        self._folder: Path | None = None
        self.keep_last, self.every_n_steps = keep_last, every_n_steps
        self.best_loss, self.best_step = float("inf"), -1
        self.newest: Path | None = None
        self.validated_step = -1

    @property
    def folder(self) -> Path:
        """Where the files go; known from the start of the run on."""
        assert self._folder is not None
        return self._folder

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the folder; every process must ask for the run directory."""
        run = Path(trainer.log_dir or trainer.default_root_dir)
        self._folder = self._given_folder or run / "checkpoints"

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save where ``every_n_steps`` says so."""
        step = trainer.global_step
        if self.every_n_steps and step % self.every_n_steps == 0 and step_is_complete(trainer):
            self.save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save, and keep the checkpoint as the best one if it is."""
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        self.validated_step = trainer.global_step
        loss = float(trainer.callback_metrics.get("val_loss", float("inf")))
        is_best = loss < self.best_loss
        if is_best:  # noted first, so that the file itself knows
            self.best_loss, self.best_step = loss, trainer.global_step
        self.save(trainer)
        if is_best and trainer.is_global_zero:
            self._keep_as_best()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step, if it is not saved yet."""
        self._save_once(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save a run that was interrupted between two steps; another exception leaves no state worth saving."""
        if isinstance(exception, Interrupted):
            if trainer.validating:  # a resumed run must not finish this validation: its sums are gone
                trainer.fit_loop.epoch_loop.val_loop.batch_progress.reset()
            self._save_once(trainer)

    def save(self, trainer: Trainer) -> None:
        """Write this step's file and clear away the oldest beyond ``keep_last``. All processes must call it."""
        self.newest = self.folder / f"step-{trainer.global_step:08d}.ckpt"
        trainer.save_checkpoint(self.newest)
        if trainer.is_global_zero:
            for old in step_files(self.folder)[: -self.keep_last]:
                old.unlink(missing_ok=True)

    def state_dict(self) -> dict[str, Any]:
        """The best so far."""
        return {"best_loss": self.best_loss, "best_step": self.best_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on comparing with the best before."""
        self.best_loss, self.best_step = state_dict["best_loss"], state_dict["best_step"]

    def _save_once(self, trainer: Trainer) -> None:
        if self.newest is None or step_of(self.newest) != trainer.global_step:
            self.save(trainer)

    def _keep_as_best(self) -> None:
        assert self.newest is not None
        temporary = self.folder / f".{BEST}.tmp"
        temporary.unlink(missing_ok=True)
        try:
            os.link(self.newest, temporary)
        except OSError:  # a file system without hard links
            shutil.copyfile(self.newest, temporary)
        os.replace(temporary, self.folder / BEST)
