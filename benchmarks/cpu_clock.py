"""The CPU time of a run, written when its process ends: in all, and from its first step to its last."""

import atexit
import json
import time
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

CPU = "cpu.json"


class CpuClock(Callback):
    """Writes ``cpu.json`` to the run's folder, in seconds."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The first step follows."""
        self._start, self._file = time.process_time(), Path(trainer.run_dir, CPU)  # type: ignore[attr-defined]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The last step and its validation have ended."""
        atexit.register(self._write, time.process_time() - self._start)

    def _write(self, training_s: float) -> None:
        self._file.write_text(json.dumps({"training": training_s, "total": time.process_time()}), encoding="utf-8")
