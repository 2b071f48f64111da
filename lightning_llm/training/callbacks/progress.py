"""How far a run is, counted in optimizer steps: a progress bar for the user, ``status.json`` for other commands.

On a terminal, the bar is redrawn at log steps only and needs no thread; in a file or a pipe, each validation prints a
line. ``status.json`` lets ``compare`` tell a run that failed or was killed from one that still trains.
"""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as TimeLeftColumn

from lightning_llm.checkpoints.loop_state import is_log_step
from lightning_llm.io.console import Console
from lightning_llm.runs.directory import run_dir_of
from lightning_llm.runs.status import DIVERGED, FAILED, INTERRUPTED, RUNNING, write_status
from lightning_llm.training import metrics
from lightning_llm.training.callbacks.non_finite import NonFinite
from lightning_llm.training.callbacks.signals import Interrupted
from lightning_llm.training.run_length import total_steps

SHOWN = {
    metrics.TRAIN_LOSS: "loss {:.3f}",
    metrics.VAL_LOSS: "val {:.4f}",
    metrics.LEARNING_RATE: "lr {:.1e}",
    metrics.GRAD_NORM: "|g| {:.2f}",
    metrics.TOKENS_PER_SECOND: "{:,.0f} tokens/s",
}


class StepProgressBar(ProgressBar):
    """Steps, time left, and the newest loss, validation loss, learning rate, gradient norm and tokens per second."""

    def __init__(self) -> None:
        super().__init__()
        self.console = Console(stderr=True)
        self._progress: Progress | None = None
        self._enabled = True

    def disable(self) -> None:
        """Called on every process but the first."""
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._enabled or not self.console.is_terminal:
            return
        columns = (TextColumn("step"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeLeftColumn())
        self._progress = Progress(*columns, TextColumn("{task.description}"), console=self.console, auto_refresh=False)
        self._progress.add_task("", total=total_steps(trainer), completed=trainer.global_step)
        self._progress.start()

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if self._progress is not None and is_log_step(trainer):
            self._draw(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Redraw; without a terminal, print a line."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        self._draw(trainer)
        if self._progress is None and self._enabled:
            self.console.print_lines(f"step {trainer.global_step}  {describe(trainer)}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draw(trainer)
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def _draw(self, trainer: Trainer) -> None:
        if self._progress is not None:
            task = self._progress.task_ids[0]
            self._progress.update(task, completed=trainer.global_step, description=describe(trainer), refresh=True)

    def _close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def describe(trainer: Trainer) -> str:
    """The newest metrics in words."""
    newest = trainer.callback_metrics
    return "  ".join(text.format(float(newest[name])) for name, text in SHOWN.items() if name in newest)


class StatusFile(Callback):
    """Writes ``status.json`` at the start of a run, after each validation, and when an exception ends it.

    Attributes:
        seconds: How long the steps up to now took, with those before each checkpoint that the run resumed from.
        validated_step: That of the last validation; -1: there was none.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._earlier_s = 0.0
        self.validated_step = -1
        self._started: float | None = None

    @property
    def state_key(self) -> str:
        """One for ``fit`` and for runs that Python starts: either can resume the other."""
        return StatusFile.__qualname__

    @property
    def seconds(self) -> float:
        """From the first step, with validations, to the last one."""
        return self._earlier_s + (0.0 if self._started is None else time.perf_counter() - self._started)

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        seconds = state_dict.get("seconds")
        self._earlier_s = seconds if isinstance(seconds, float) and 0 <= seconds < float("inf") else 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = time.perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The last step is over; a Trainer may train again."""
        self._earlier_s = self.seconds
        self._started = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._folder = self.folder_of(trainer)
        self._write(trainer, RUNNING)

    def folder_of(self, trainer: Trainer) -> Path | None:
        """Where the files go; ``None``: there are none. A broadcast: every process must ask."""
        return run_dir_of(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.validated_step = trainer.global_step
            self._write(trainer, RUNNING)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        is_signal = isinstance(exception, Interrupted | KeyboardInterrupt)
        failed = DIVERGED if isinstance(exception, NonFinite) else FAILED
        words = " ".join(str(exception).split()) or type(exception).__name__
        with suppress(OSError):  # the exception itself reports a full disk
            self._write(trainer, INTERRUPTED if is_signal else failed, words)

    def _write(self, trainer: Trainer, status: str, reason: str = "") -> None:
        if self._folder is not None and trainer.is_global_zero:
            loss = trainer.callback_metrics.get(metrics.VAL_LOSS)
            value = None if loss is None else float(loss)
            write_status(self._folder, status, step=trainer.global_step, val_loss=value, reason=reason)
