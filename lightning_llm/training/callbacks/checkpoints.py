"""What a run keeps: its newest steps, and its best by validation loss.

    checkpoints/step-00000500.ckpt    the newest ``keep_last``, named by optimiser steps
    checkpoints/best.ckpt             the lowest ``val_loss`` so far

Every one is complete or absent (see ``training.archives``). Of a sharded model it is a folder
(``training.sharded_files``). ``best.ckpt`` is a hard link to the step it came from: it costs no second writing, and
lives on when that step is cleared away.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint

from lightning_llm.checkpoints.loop_state import step_is_complete, validation_follows
from lightning_llm.checkpoints.reading import BEST, read_outline, step_files, step_name, step_of
from lightning_llm.checkpoints.run_directory import CHECKPOINTS, run_dir_of, turn_of
from lightning_llm.io.atomic import link_path, remove_path, replace_path
from lightning_llm.training.callbacks.signals import Interrupted
from lightning_llm.training.checkpoint_io import AtomicCheckpointIO


class RunCheckpoints(Checkpoint):
    """Saves after every validation, every ``every_n_steps``, at the end and when the run is interrupted.

    Args:
        folder: Where the files go. Null: ``checkpoints`` in the run directory.
        keep_last: How many of the newest steps stay.
        every_n_steps: Optimiser steps between two savings beside those of the validation. Null: none.
        asynchronous: Hold training only while the state is copied to main memory, which then holds it twice; a thread
            writes it. One is written at a time; a kill in the middle loses that one. A write that failed ends the run
            at the next saving, or at its end.

    Attributes:
        best_loss: Lowest validation loss so far.
        best_step: The step it was reached at.
        newest: The checkpoint written last.
        validated_step: The step of the last validation.
    """

    def __init__(
        self,
        folder: str | None = None,
        keep_last: int = 2,
        every_n_steps: int | None = None,
        asynchronous: bool = False,
    ) -> None:
        for name, value in (("keep_last", keep_last), ("every_n_steps", every_n_steps)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self._given_folder = None if folder is None else Path(folder)
        self._folder: Path | None = None
        self._turn = 0  # of this start of the run: which files it has written, of steps that come again
        self._files: AtomicCheckpointIO | None = None
        self.keep_last, self.every_n_steps, self.asynchronous = keep_last, every_n_steps, asynchronous
        self.best_loss, self.best_step = float("inf"), -1
        self.newest: Path | None = None
        self.validated_step = -1
        self._has_begun = False

    @property
    def folder(self) -> Path | None:
        """Where the files go; known from the start of the run on. ``None``: nowhere, as under ``fast_dev_run``."""
        return self._folder

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the folder; every process must ask for the run directory.

        Raises:
            ValueError: Asynchronous, with somebody else's way to checkpoint files.
        """
        files = trainer.strategy.checkpoint_io
        self._files = files if isinstance(files, AtomicCheckpointIO) else None
        if self._files is not None:
            self._files.asynchronous = self.asynchronous
        elif self.asynchronous:
            raise ValueError(
                f"RunCheckpoints.asynchronous needs AtomicCheckpointIO, got {type(files).__name__} among "
                "trainer.plugins: leave one of the two out"
            )
        if stage != "fit":
            return
        run = run_dir_of(trainer)
        self._folder = None if run is None else self._given_folder or run / CHECKPOINTS
        self._turn = 0 if run is None else turn_of(run)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A run that goes on: clear up what the end of the one before may have left half done."""
        self._has_begun = True
        if trainer.is_global_zero and trainer.global_step and self._folder is not None and self._folder.is_dir():
            _clear_up(self._folder, trainer.global_step, self.best_step)
        trainer.strategy.barrier()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save where ``every_n_steps`` says so; where a validation follows, it will save, and know the loss."""
        due = self.every_n_steps and trainer.global_step % self.every_n_steps == 0
        if due and step_is_complete(trainer) and not validation_follows(trainer):
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
        if is_best and trainer.is_global_zero and self.newest is not None:
            self._then(partial(link_path, self.newest, self.newest.with_name(BEST)))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step, if it is not saved yet, and see that it is on the disk."""
        self._save_once(trainer)
        self._wait()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A run that went on from its last step begins nothing, but may have been killed before its best was kept."""
        if self._has_begun or not trainer.is_global_zero or not trainer.global_step:
            return
        if self._folder is not None and self._folder.is_dir():
            _clear_up(self._folder, trainer.global_step, self.best_step)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save a run that was interrupted between two steps; another exception leaves no state worth saving."""
        if isinstance(exception, Interrupted):
            self._save_once(trainer)
            self._wait()

    def save(self, trainer: Trainer) -> None:
        """Write this step and clear away the oldest beyond ``keep_last``. All processes must call it."""
        if self._folder is None:
            return
        newest = self._folder / step_name(trainer.global_step)
        for logger in trainer.loggers:  # to the disk: a kill must not leave the curves behind the checkpoint
            logger.save()
        trainer.save_checkpoint(newest)
        self.newest = newest
        if trainer.is_global_zero:
            self._then(partial(_clear_away, self._folder, self.keep_last))

    def state_dict(self) -> dict[str, Any]:
        """The best so far, the last validation, and the run's turn: in every file that is written beside ours too."""
        return {
            "best_loss": self.best_loss,
            "best_step": self.best_step,
            "validated_step": self.validated_step,
            "turn": self._turn,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on comparing with the best before."""
        self.best_loss, self.best_step = state_dict["best_loss"], state_dict["best_step"]
        self.validated_step = state_dict["validated_step"]

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """A validation that the run owed when it ended is made up for, whole; one that was done is not done again.

        Lightning takes one that had not begun for done, and one that had begun it would finish without its first
        batches. Said to have just begun, it starts over.
        """
        if trainer.state.fn != "fit":
            return
        owed = checkpoint["callbacks"].get(self.state_key, {}).get("validated_step") != checkpoint["global_step"]
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]
        for scope in ("total", "current"):
            progress[scope] = {"ready": int(owed), "started": int(owed), "processed": 0, "completed": 0}
        progress["is_last_batch"] = False

    def _save_once(self, trainer: Trainer) -> None:
        if self.newest is None or step_of(self.newest) != trainer.global_step:
            self.save(trainer)

    def _then(self, action: Callable[[], object]) -> None:
        """Once the newest is complete."""
        if self._files is None:
            action()
        else:
            self._files.then(action)

    def _wait(self) -> None:
        if self._files is not None:
            self._files.wait()


def refuse_names_of_ours(other: ModelCheckpoint) -> None:
    """Refuse Lightning's callback where it would give its files the names of the run's own, which come and go.

    Raises:
        ValueError: It would, in the same folder.
    """
    name = Path(other.format_checkpoint_name({"step": torch.tensor(7)})).name
    if name in (BEST, step_name(7)) and other.dirpath is None:
        raise ValueError(
            f"ModelCheckpoint.filename {other.filename!r} gives its files the names of the run's own checkpoints "
            f"(step-….ckpt, {BEST}): take another name, or a dirpath of its own"
        )


def _clear_up(folder: Path, step: int, best_step: int) -> None:
    """Temporary files go; checkpoints of steps to come again, damaged or left behind on purpose, step aside."""
    for temporary in folder.glob(".*.tmp"):
        remove_path(temporary)
    later = [path for path in step_files(folder) if step_of(path) > step]
    best, source = folder / BEST, folder / step_name(best_step)
    if best.exists() and later and _step_in(best) > step:
        later.append(best)
    for path in later:
        replace_path(path, path.with_suffix(".aside"))
    if source.exists():  # it may have ended between the saving and the linking
        link_path(source, best)


def _clear_away(folder: Path, keep_last: int) -> None:
    for old in step_files(folder)[:-keep_last]:
        remove_path(old)


def _step_in(path: Path) -> int:
    """The step in a checkpoint without one in its name; beyond every other if it cannot be read."""
    try:
        return int(read_outline(path)["global_step"])
    except (ValueError, KeyError):  # KeyError: of somebody else
        return 2**63
