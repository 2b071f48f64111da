"""TensorBoard: the names of all curves, the logger that writes into the run directory, and its writers.

The names are here for everything that writes, draws, compares or tests them. TensorBoard groups them by the part before
the slash.
"""

import time
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_llm.checkpoints.run_directory import RunDirectory, is_first_process, put_events_before

TRAIN_LOSS = "train_loss"  # mean over the steps since the last entry, nats per token
VAL_LOSS = "val_loss"
TRAIN_LOSS_EVAL = "train_loss_eval"  # the training text, read like the validation text
VAL_PERPLEXITY = "val_perplexity"
VAL_BITS_PER_BYTE = "val_bits_per_byte"
VAL_LOSS_OF_SOURCE = "val_loss/"  # and the name of the source
LEARNING_RATE = "learning_rate"
GRAD_NORM = "grad_norm"

THROUGHPUT = "throughput/"
TOKENS_PER_SECOND = "throughput/tokens_per_second"
STEP_SECONDS = "throughput/step_s"
DATA_STALL = "throughput/data_stall_percent"
MFU, HFU = "throughput/mfu_percent", "throughput/hfu_percent"
TIME_OF_PHASE = "time/"  # time/forward_s and so on

MEMORY = "memory/"  # memory/forward_peak_gib and so on
PEAK, LIVE = "_peak_gib", "_live_gib"
MEMORY_AT_PEAK = "memory/at_peak/"  # and the category: parameters_gib and so on

SAMPLES = "samples"  # text
WEIGHTS, GRADIENTS = "weights/", "gradients/"  # histograms, and the name of the parameter


class RunLogger(TensorBoardLogger):
    """Lightning's logger for TensorBoard, in the run directory that the Trainer chooses.

    Args:
        run: The folder.
    """

    def __init__(self, run: RunDirectory) -> None:
        super().__init__(run.root, name="", default_hp_metric=False)
        self._run = run
        self._resumes = False

    def resume_after(self, step: int) -> None:
        """Hide what was logged after this step before the run was killed: it will be logged again."""
        self._kwargs["purge_step"] = step + 1
        self._resumes = True

    @property
    def log_dir(self) -> str:
        """The run directory."""
        return str(self._run.path)

    @property
    def root_dir(self) -> str:
        """The folder for runs of one kind."""
        return str(self._run.path.parent)

    save_dir = root_dir  # with the name and the version, the run directory

    @property
    def version(self) -> str:
        """Name of the run directory."""
        return self._run.path.name

    @property
    def experiment(self) -> Any:
        """The ``SummaryWriter``."""
        if self._resumes and self._experiment is None and is_first_process():
            put_events_before(self._run.path, int(time.time()))
        return super().experiment


def tensorboard_writers(trainer: Trainer) -> list[Any]:
    """The ``SummaryWriter`` of each TensorBoard logger, for text, images and histograms; none on other processes."""
    if not trainer.is_global_zero:
        return []
    return [logger.experiment for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
