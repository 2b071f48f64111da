"""How callbacks reach TensorBoard for what is no scalar: text, pictures, histograms, the layout."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger


def tensorboard_writers(trainer: Trainer) -> list[Any]:
    """The ``SummaryWriter`` of each TensorBoard logger; none on processes other than the first."""
    if not trainer.is_global_zero:
        return []
    return [logger.experiment for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
