"""How many optimizer steps a run has.

The schedule, the checks, the summary and the progress bar all ask :func:`total_steps`. Lightning's
``estimated_stepping_batches`` is not used: before training it loads the data, and a stateful loader of a resumed run
then starts from its first batch. Here the loader is asked only after Lightning has loaded it. The length of a
``TokenDataModule`` follows from its options, so it is known earlier.
"""

import math
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Timer

from lightning_llm.data.batches import limited_batches
from lightning_llm.data.datamodule import TokenDataModule

LIGHTNINGS_EPOCHS = 1000  # of a run without any limit


def total_steps(trainer: Trainer, data: Any = None, accumulation: int | None = None) -> int | None:
    """Optimizer steps of the whole run: the fewest that ``max_steps`` and ``max_epochs`` allow.

    ``max_time`` does not count: nobody knows in advance how many steps fit into it.

    Args:
        trainer: The trainer; its ``limit_train_batches`` shortens each epoch.
        data: The data module, if the trainer does not have it yet.
        accumulation: Micro-batches per step, if the trainer does not know them yet.

    Returns:
        ``None`` if neither limit is set, or if the length of an epoch is not known (yet).
    """
    limits = [trainer.max_steps] if trainer.max_steps >= 0 else []
    if (max_epochs := epochs(trainer)) is not None:
        steps = _steps_per_epoch(trainer, data, accumulation or trainer.accumulate_grad_batches)
        limits += [] if steps is None else [steps * max_epochs]
    return min(limits, default=None)


def epochs(trainer: Trainer) -> int | None:
    """``max_epochs`` as Lightning reads it when training begins; ``None``: no limit."""
    if trainer.max_epochs is None:  # a Timer is max_time's, or the user's
        has_timer = any(isinstance(callback, Timer) for callback in trainer.callbacks)  # type: ignore[attr-defined]
        return None if trainer.max_steps != -1 or has_timer else LIGHTNINGS_EPOCHS
    return trainer.max_epochs if trainer.max_epochs >= 0 else None


def _steps_per_epoch(trainer: Trainer, data: Any, accumulation: int) -> int | None:
    data = data or getattr(trainer, "datamodule", None)
    if trainer.limit_train_batches == 0:
        return 0
    if trainer.train_dataloader is not None:
        batches = trainer.num_training_batches
    elif isinstance(data, TokenDataModule):
        batches = limited_batches(data.steps_per_epoch * accumulation, trainer.limit_train_batches)
    else:
        return None
    return None if math.isinf(batches) else math.ceil(batches / accumulation)
