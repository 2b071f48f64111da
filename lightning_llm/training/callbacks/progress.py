"""One line of progress, counted in optimiser steps like everything else.

On a terminal a bar that is redrawn at log steps only (no thread of its own beside the training); in a file or a pipe a
plain line per validation.
"""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as TimeLeftColumn

from lightning_llm.checkpoints.loop_state import is_log_step
from lightning_llm.io.console import Console
from lightning_llm.training.schedule import total_steps

SHOWN = {
    "train_loss": "loss {:.3f}",
    "val_loss": "val {:.4f}",
    "learning_rate": "lr {:.1e}",
    "grad_norm": "|g| {:.2f}",
    "throughput/tokens_per_second": "{:,.0f} tokens/s",
}


class StepProgressBar(ProgressBar):
    """Steps, time left, and the newest loss, validation loss, learning rate, gradient norm and tokens per second."""

    def __init__(self) -> None:
        super().__init__()
        self.console = Console(stderr=True)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._enabled = True

    def disable(self) -> None:
        """Called on every process but the first."""
        self._enabled = False

    def enable(self) -> None:
        """Undo :meth:`disable`."""
        self._enabled = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the empty bar."""
        if not self._enabled or not self.console.is_terminal:
            return
        self._progress = Progress(
            TextColumn("step"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeLeftColumn(),
            TextColumn("{task.description}"),
            console=self.console,
            auto_refresh=False,
        )
        self._task = self._progress.add_task("", total=total_steps(trainer), completed=trainer.global_step)
        self._progress.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Redraw at log steps."""
        if self._progress is not None and is_log_step(trainer):
            self._draw(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Redraw; where there is no terminal, print a line."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        if self._progress is not None:
            self._draw(trainer)
        elif self._enabled:
            self.console.print(f"step {trainer.global_step}  {describe(trainer)}", soft_wrap=True, highlight=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the full bar standing."""
        if self._progress is not None:
            self._draw(trainer)
            self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the terminal back."""
        self._close()

    def _draw(self, trainer: Trainer) -> None:
        assert self._progress is not None
        assert self._task is not None
        self._progress.update(self._task, completed=trainer.global_step, description=describe(trainer), refresh=True)

    def _close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def describe(trainer: Trainer) -> str:
    """The newest metrics in words."""
    metrics = trainer.callback_metrics
    return "  ".join(text.format(float(metrics[name])) for name, text in SHOWN.items() if name in metrics)
