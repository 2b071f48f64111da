"""The CPU time of a run, in all and from its first step to its last, and when its first step ended."""

import atexit
import json
import os
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

CPU = "cpu.json"


class CpuClock(Callback):
    """Writes ``cpu.json`` to the run's folder, in seconds."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The first step follows."""
        self._start, self._file = time.process_time(), Path(trainer.run_dir, CPU)  # type: ignore[attr-defined]
        self._first_step_s: float | None = None

    def on_train_batch_end(self, *args: Any) -> None:
        """Only the first step counts: until then it takes set-up and step, by the clock on the wall."""
        if self._first_step_s is None:
            self._first_step_s = age_of_process()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The last step and its validation have ended."""
        atexit.register(self._write, time.process_time() - self._start)

    def _write(self, training_s: float) -> None:
        facts = {"training": training_s, "total": time.process_time(), "first_step": self._first_step_s}
        self._file.write_text(json.dumps(facts), encoding="utf-8")


def age_of_process() -> float:
    """Seconds since this process began, by Linux; a forked one begins with its fork. To 0.01 s."""
    began = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began / os.sysconf("SC_CLK_TCK")
