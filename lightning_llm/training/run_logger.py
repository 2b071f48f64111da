"""TensorBoard in the run directory, which the Trainer decides on."""

import time
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger

from lightning_llm.checkpoints.run_directory import RunDirectory, is_first_process, put_events_before


class RunLogger(TensorBoardLogger):
    """Lightning's logger for TensorBoard, whose folder is the run's.

    Args:
        run: The folder.
    """

    def __init__(self, run: RunDirectory) -> None:
        super().__init__(run.root, name="", default_hp_metric=False)
        self._run = run
        self._goes_on = False

    def go_on_after(self, step: int) -> None:
        """What was logged beyond this step, before a kill, is going to be logged again: hide the first."""
        self._kwargs["purge_step"] = step + 1
        self._goes_on = True

    @property
    def log_dir(self) -> str:
        """The run directory."""
        return str(self._run.path)

    @property
    def root_dir(self) -> str:
        """The folder for runs of one kind."""
        return str(self._run.path.parent)

    @property
    def save_dir(self) -> str:
        """As :attr:`root_dir`: with the name and the version this gives the run directory."""
        return self.root_dir

    @property
    def version(self) -> str:
        """Name of the run directory."""
        return self._run.path.name

    @property
    def experiment(self) -> Any:
        """The ``SummaryWriter``."""
        if self._goes_on and self._experiment is None and is_first_process():
            put_events_before(self._run.path, int(time.time()))
        return super().experiment
