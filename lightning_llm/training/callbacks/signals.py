"""Ctrl-C and SIGTERM end a run at the next moment at which it can be resumed exactly.

Lightning's own way lets the exception fly from wherever the signal hits, in the middle of a step too. Here the signal
is noted, the optimiser step at hand is finished, and only then :class:`Interrupted` is raised; the checkpoint callback
saves on its way out. A second Ctrl-C does not wait.
"""

import signal
import threading
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_llm.training.position import step_is_complete

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """A signal ended the run after a whole optimiser step.

    Args:
        signal_number: Which signal.
        step: Optimiser steps done.
    """

    def __init__(self, signal_number: int, step: int) -> None:
        self.signal_number, self.step = signal_number, step
        super().__init__(f"interrupted by {signal.Signals(signal_number).name} after step {step}")

    @property
    def exit_status(self) -> int:
        """What a shell reports for a program ended by this signal: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + self.signal_number


class StopOnSignal(Callback):
    """Raises :class:`Interrupted` between two optimiser steps once SIGINT or SIGTERM has come."""

    def __init__(self) -> None:
        self._received: int | None = None
        self._previous: dict[int, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the signals over, before Lightning does, which leaves handlers alone that it finds."""
        if stage == "fit" and threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in SIGNALS}

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the signals back."""
        while self._previous:
            signal.signal(*self._previous.popitem())

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After a whole optimiser step: stop if asked to."""
        if self._received is not None and step_is_complete(trainer):
            self._stop(trainer)

    def on_validation_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Validation lies between two steps: stop at once if asked to."""
        if self._received is not None and trainer.state.fn == "fit":
            self._stop(trainer)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._received = number

    def _stop(self, trainer: Trainer) -> None:
        assert self._received is not None
        raise Interrupted(self._received, trainer.global_step)
