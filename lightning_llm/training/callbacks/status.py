"""Keeps ``status.json`` up to date: a run that failed or was killed is not taken for one that still trains."""

from contextlib import suppress
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_llm.checkpoints.run_directory import run_dir_of
from lightning_llm.checkpoints.run_status import FAILED, INTERRUPTED, RUNNING, write_status
from lightning_llm.training.callbacks.signals import Interrupted


class StatusFile(Callback):
    """Writes how the run stands at its start, after each validation, and where an exception ends it."""

    def __init__(self) -> None:
        self._run: Path | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """It has begun."""
        run = run_dir_of(trainer)  # a broadcast: every process must ask
        self._run = run if trainer.is_global_zero else None
        self._write(trainer, RUNNING)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The newest loss."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._write(trainer, RUNNING)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """How it ended."""
        is_signal = isinstance(exception, Interrupted | KeyboardInterrupt)
        words = " ".join(str(exception).split()) or type(exception).__name__
        with suppress(OSError):  # a full disk, say: the exception itself says so
            self._write(trainer, INTERRUPTED if is_signal else FAILED, words)

    def _write(self, trainer: Trainer, status: str, reason: str = "") -> None:
        if self._run is not None:
            loss = trainer.callback_metrics.get("val_loss")
            value = None if loss is None else float(loss)
            write_status(self._run, status, step=trainer.global_step, val_loss=value, reason=reason)
