"""Save the newest checkpoints and the best one by validation loss.

    checkpoints/step-00000500.ckpt    the newest ``keep_last``, named by optimizer steps
    checkpoints/best.ckpt             the lowest ``val_loss`` so far

Each of them is complete or absent (see ``io.atomic``). For a sharded model it is a folder
(``checkpoints.sharded``). ``best.ckpt`` is a hard link to the checkpoint of its step, so it takes no extra space and
survives when that step is deleted.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint

from lightning_llm.checkpoints.loop_state import (
    begin_next_epoch,
    set_validation_due,
    step_is_complete,
    validation_follows,
)
from lightning_llm.checkpoints.reading import read_outline
from lightning_llm.data.datamodule import TokenDataModule
from lightning_llm.data.validated import LIMIT, asked_limit, is_whole
from lightning_llm.io.atomic import link_path, remove_path, replace_path
from lightning_llm.runs.directory import BEST, CHECKPOINTS, run_dir_of, start_number_of, step_files, step_name, step_of
from lightning_llm.training.callbacks.inputs import InputHashes
from lightning_llm.training.callbacks.signals import Interrupted
from lightning_llm.training.checkpoint_io import AtomicCheckpointIO
from lightning_llm.training.metrics import VAL_LOSS

_STATE = ("best_loss", "best_step", "validated_step")
_WINDOWS = "validation_batches"  # in the state: the hash of the windows that the best loss is of
_FIRST_ONES = "the first ones"  # no hash equals it
OTHER_WINDOWS = (
    "The checkpoint validated other windows of text than this run: its best loss {:.4f} of step {} is not compared, "
    "and the best checkpoint is chosen again."
)


class RunCheckpoints(Checkpoint):
    """Saves after every validation, every ``every_n_steps``, at the end and when the run is interrupted.

    Args:
        folder: Where the files go. Null: ``checkpoints`` in the run directory.
        keep_last: Number of newest checkpoints to keep.
        every_n_steps: Also save every N optimizer steps. Null: only with validations.
        asynchronous: Training waits only while the state is copied to host memory, so that a thread can write the copy
            to the disk. Only one write is in flight; a kill during a write loses only that checkpoint. A failed write
            ends the run at the next save, or at its end. Null: on CUDA, unless another plugin writes the files.

    Attributes:
        folder: Where the files go, known from ``setup`` on. ``None``: nowhere, as under ``fast_dev_run``.
        best_loss: Lowest validation loss so far.
        best_step: The step of that loss.
        newest: The last checkpoint that was written.
        validated_step: The step of the last validation.
    """

    def __init__(
        self,
        folder: str | None = None,
        keep_last: int = 2,
        every_n_steps: int | None = None,
        asynchronous: bool | None = None,
    ) -> None:
        for name, value in (("keep_last", keep_last), ("every_n_steps", every_n_steps)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.folder = self._given_folder = None if folder is None else Path(folder)
        self.keep_last = keep_last
        self.every_n_steps = every_n_steps
        self.asynchronous = asynchronous
        self.best_loss = float("inf")
        self.best_step = -1
        self.validated_step = -1
        self.newest: Path | None = None
        self._windows: str | None = None
        self._is_first = True
        self._start_number = 0  # number of this start of the run: tells which files it has written, of repeated steps
        self._files = AtomicCheckpointIO()  # takes the place of another plugin, which writes at once
        self._has_begun = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the folder; every process must ask for the run directory.

        Raises:
            ValueError: ``asynchronous``, with another plugin for checkpoint files.
        """
        files = trainer.strategy.checkpoint_io
        if isinstance(files, AtomicCheckpointIO):
            is_cuda = trainer.strategy.root_device.type == "cuda"
            self._files = files
            files.asynchronous = is_cuda if self.asynchronous is None else self.asynchronous
        elif self.asynchronous:
            raise ValueError(
                f"RunCheckpoints.asynchronous needs AtomicCheckpointIO, got {type(files).__name__} among "
                "trainer.plugins: leave one of the two out"
            )
        if stage == "fit":
            run = run_dir_of(trainer)
            self.folder = None if run is None else self._given_folder or run / CHECKPOINTS
            self._start_number = 0 if run is None else start_number_of(run)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """In a resumed run, finish what the previous process may have left unfinished."""
        self._has_begun = self._is_first = True
        begin_next_epoch(trainer)
        self._clean_up(trainer)
        trainer.strategy.barrier()

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Save as ``every_n_steps`` asks, unless a validation follows: it will save, and know the loss."""
        due = self.every_n_steps and trainer.global_step % self.every_n_steps == 0
        if due and step_is_complete(trainer) and not validation_follows(trainer):
            self.save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save, and link the checkpoint as the best one if it is."""
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        self.validated_step = trainer.global_step
        self._start_again_on_other_windows(trainer)
        loss = float(trainer.callback_metrics.get(VAL_LOSS, float("inf")))
        is_best = loss < self.best_loss
        if is_best:  # set first, so that the file itself contains it
            self.best_loss = loss
            self.best_step = trainer.global_step
        self.save(trainer)
        if is_best and trainer.is_global_zero and self.newest is not None:
            self._files.then(partial(link_path, self.newest, self.newest.with_name(BEST)))

    def _start_again_on_other_windows(self, trainer: Trainer) -> None:
        """At the first validation since the start: a best loss of other windows is no loss to compare with."""
        if not self._is_first:
            return
        self._is_first = False
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        hashes = next((callback for callback in callbacks if isinstance(callback, InputHashes)), None)
        windows = None if hashes is None else hashes.validation_batches
        if self.best_step >= 0 and self._windows is not None and windows != self._windows:
            if trainer.is_global_zero:
                print(OTHER_WINDOWS.format(self.best_loss, self.best_step), flush=True)
            self.best_loss = float("inf")
            self.best_step = -1
        self._windows = windows

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step if it is not saved yet, and wait until it is on the disk."""
        if self.newest is None or step_of(self.newest) != trainer.global_step:
            self.save(trainer)
        self._files.wait()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A run resumed from its last step trains nothing, but may have been killed before its best was linked."""
        if not self._has_begun:
            self._clean_up(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save if the run was interrupted between two steps; other exceptions leave no state worth saving."""
        if isinstance(exception, Interrupted):
            self.on_train_end(trainer, pl_module)

    def save(self, trainer: Trainer) -> None:
        """Write this step and delete the oldest beyond ``keep_last``. All processes must call it."""
        if self.folder is None:
            return
        newest = self.folder / step_name(trainer.global_step)
        for logger in trainer.loggers:  # to the disk: after a kill, the curves must reach at least the checkpoint
            logger.save()
        trainer.save_checkpoint(newest)
        self.newest = newest
        if trainer.is_global_zero:
            self._files.then(self._delete_oldest)

    def state_dict(self) -> dict[str, Any]:
        """The best so far, the last validation, and the number of the start; ModelCheckpoint's files hold it too."""
        return {
            **{name: getattr(self, name) for name in _STATE},
            _WINDOWS: self._windows,
            "start_number": self._start_number,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name in _STATE:
            setattr(self, name, state_dict[name])
        self._windows = state_dict.get(_WINDOWS)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """If the run stopped before or during a validation, that validation runs first: see ``loop_state``."""
        if trainer.state.fn != "fit":
            return
        state = checkpoint["callbacks"].get(self.state_key, {})
        set_validation_due(checkpoint, state.get("validated_step") != checkpoint["global_step"])
        if state and _WINDOWS not in state and _had_first_windows(trainer, checkpoint):
            state[_WINDOWS] = _FIRST_ONES

    def _delete_oldest(self) -> None:
        assert self.folder is not None
        for old in step_files(self.folder)[: -self.keep_last]:
            remove_path(old)

    def _clean_up(self, trainer: Trainer) -> None:
        """Delete temporary files. Rename checkpoints of later steps, which are damaged or were left on purpose."""
        folder, step = self.folder, trainer.global_step
        if not trainer.is_global_zero or not step or folder is None or not folder.is_dir():
            return
        for temporary in folder.glob(".*.tmp"):
            remove_path(temporary)
        later = [path for path in step_files(folder) if step_of(path) > step]
        best = folder / BEST
        source = folder / step_name(self.best_step)
        if best.exists() and later and _step_in(best) > step:
            later.append(best)
        for path in later:
            replace_path(path, path.with_suffix(".aside"))
        if source.exists():  # the run may have ended after saving and before linking
            link_path(source, best)


def _had_first_windows(trainer: Trainer, checkpoint: dict[str, Any]) -> bool:
    """Whether a checkpoint of an earlier version validated a part of the text: its first windows."""
    if not isinstance(getattr(trainer, "datamodule", None), TokenDataModule):
        return False
    states = checkpoint["callbacks"].values()
    options = next((state["options"] for state in states if isinstance(state, dict) and state.get("options")), None)
    return not is_whole(asked_limit(trainer) if options is None else options.get(LIMIT))


def refuse_names_of_ours(other: ModelCheckpoint) -> None:
    """Reject a ModelCheckpoint whose files would have the names of the run's own, which are deleted again.

    Raises:
        ValueError: They would, in the same folder.
    """
    name = Path(other.format_checkpoint_name({"step": torch.tensor(7)})).name
    if name in (BEST, step_name(7)) and other.dirpath is None:
        raise ValueError(
            f"ModelCheckpoint.filename {other.filename!r} gives its files the names of the run's own checkpoints "
            f"(step-….ckpt, {BEST}): choose another name, or another dirpath"
        )


def _step_in(path: Path) -> int:
    """The step that a checkpoint holds; higher than any other if it cannot be read."""
    try:
        return int(read_outline(path)["global_step"])
    except (ValueError, KeyError):  # KeyError: not written by a run
        return 2**63
