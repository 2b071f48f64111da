"""Optimizers and schedules with a state of their own: schedule-free ones, and those that follow a metric.

A schedule-free optimizer (Defazio et al. 2024, "The Road Less Scheduled", arXiv:2405.15682) trains at one point and is
evaluated at an average of others. Its methods ``train()`` and ``eval()`` put the one or the other into the parameters;
both do nothing if that is done already, as in the package ``schedulefree``. Validation, samples and checkpoints have
the average.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_llm.training.metrics import VAL_LOSS


def switch_weights(optimizers: Iterable[Optimizer], mode: Literal["train", "eval"]) -> None:
    """Put the weights to train, or those to evaluate, into the parameters of schedule-free optimizers."""
    for optimizer in optimizers:
        if hasattr(optimizer, mode):  # no optimizer of torch has these methods
            getattr(optimizer, mode)()


@contextmanager
def evaluated(trainer: Trainer, *, exactly: bool = False) -> Iterator[None]:
    """The weights to evaluate, in the middle of training; does nothing elsewhere.

    Args:
        trainer: With the optimizer.
        exactly: Restore the bits of the weights to train, at the cost of a copy: the optimizer rounds on the way there
            and back. A resumed run rounds in the same way as the run that has saved.
    """
    averaging = [optimizer for optimizer in trainer.optimizers if trainer.training and hasattr(optimizer, "eval")]
    held = [param for optimizer in averaging for group in optimizer.param_groups for param in group["params"]]
    copies = [param.detach().clone() for param in held] if exactly else []
    switch_weights(averaging, "eval")
    try:
        yield
    finally:
        switch_weights(averaging, "train")
        with torch.no_grad():
            for param, copy in zip(held, copies, strict=False):
                param.copy_(copy)


def follow_metrics(trainer: Trainer, metrics: Mapping[str, float]) -> None:
    """Step a schedule that follows a metric, once for each validation of a fit and before it is saved.

    Lightning's own step would come after the checkpoint, so that a resumed run would lack it.

    Args:
        trainer: With the schedule: ``ReduceLROnPlateau`` of torch, or of ``lightning.pytorch.cli``, which has
            ``monitor``.
        metrics: Of the validation.

    Raises:
        ValueError: The validation has no such metric.
    """
    if trainer.state.fn != "fit" or trainer.sanity_checking:
        return
    for scheduler in (config.scheduler for config in trainer.lr_scheduler_configs):
        if isinstance(scheduler, ReduceLROnPlateau):
            monitor = getattr(scheduler, "monitor", VAL_LOSS)
            if monitor not in metrics:
                raise ValueError(f"model.schedule monitors {monitor!r}: choose one of {', '.join(metrics)}")
            scheduler.step(metrics[monitor])


def check_validated(scheduler: Any, trainer: Trainer) -> None:
    """Refuse a schedule that follows a metric in a run without validation.

    Raises:
        ValueError: The learning rate would never change.
    """
    if isinstance(scheduler, ReduceLROnPlateau) and not trainer.enable_validation:
        name = type(scheduler).__name__
        raise ValueError(f"model.schedule {name} follows the validation, and this run has none: set limit_val_batches")
