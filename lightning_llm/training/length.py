"""How many optimizer steps a run has: one answer for the schedule, the checks, the summary and the progress bar.

Lightning's ``estimated_stepping_batches`` is not used: before training it loads the data, and a stateful loader of a
resumed run then starts from its first batch. Here the loader is asked only after Lightning has loaded it. The length of
a ``TokenDataModule`` follows from its options, so it is known before.
"""

import math
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Timer

from lightning_llm.data.batches import limited_batches
from lightning_llm.data.datamodule import TokenDataModule

LIGHTNINGS_EPOCHS = 1000  # of a run without any limit


def total_steps(trainer: Trainer, data: Any = None, accumulation: int | None = None) -> int | None:
    """Optimizer steps of the whole run: the least that ``max_steps`` and ``max_epochs`` allow.

    ``max_time`` does not count: how many steps fit into a time is not known beforehand.

    Args:
        trainer: The trainer; its ``limit_train_batches`` shortens each epoch.
        data: The data module, where the trainer does not have it yet.
        accumulation: Micro-batches of a step, where the trainer does not know them yet.

    Returns:
        ``None`` if neither limit is set, or if an epoch's length is not known (yet).
    """
    limits = [trainer.max_steps] if trainer.max_steps >= 0 else []
    epochs = _epochs(trainer)
    if epochs is not None:
        per_epoch = _steps_of_an_epoch(trainer, data, accumulation or trainer.accumulate_grad_batches)
        if per_epoch is not None:
            limits.append(per_epoch * epochs)
    return min(limits, default=None)


def is_waiting_for_data(trainer: Trainer) -> bool:
    """Whether :func:`total_steps` will know more once Lightning has loaded the training data."""
    data = getattr(trainer, "datamodule", None)
    is_known = trainer.train_dataloader is not None or isinstance(data, TokenDataModule)
    return _epochs(trainer) is not None and not is_known


def is_limited_by_time(trainer: Trainer) -> bool:
    """Whether ``max_time``, or a ``Timer`` of the user's, ends the run."""
    return any(isinstance(callback, Timer) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def _epochs(trainer: Trainer) -> int | None:
    """``max_epochs`` as Lightning reads it when training begins; ``None``: no limit."""
    if trainer.max_epochs is None:
        return None if trainer.max_steps != -1 or is_limited_by_time(trainer) else LIGHTNINGS_EPOCHS
    return trainer.max_epochs if trainer.max_epochs >= 0 else None


def _steps_of_an_epoch(trainer: Trainer, data: Any, accumulation: int) -> int | None:
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
