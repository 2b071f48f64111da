"""The learning-rate schedule of a run: which scheduler, when it begins, and what steps it."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from lightning_llm.data.datamodule import TokenDataModule
from lightning_llm.optim.schedules import Constant, Schedule, WarmupCosine
from lightning_llm.training.metrics import VAL_LOSS
from lightning_llm.training.run_length import epochs, total_steps

DEFAULT_WARMUP = 100  # steps


def scheduler_of(schedule: Any, optimizer: Optimizer, trainer: Trainer) -> Any:
    """The scheduler of a schedule. Until the length of the run is known, the factor of one of ours is 0.

    Args:
        schedule: ``None``: ``WarmupCosine`` over the run, or ``Constant`` after a warmup if the run has no known end.
            A scheduler of torch is its own.
        optimizer: Its learning rates are multiplied by the factor.
        trainer: The trainer, which knows the length of the run.

    Raises:
        ValueError: The schedule follows the validation, and there is none.
    """
    if not isinstance(schedule, Schedule | None):
        if isinstance(schedule, ReduceLROnPlateau) and not trainer.enable_validation:
            name = type(schedule).__name__
            text = f"model.schedule {name} follows the validation, and this run has none: set limit_val_batches"
            raise ValueError(text)  # the learning rate would never change
        return schedule
    data = getattr(trainer, "datamodule", None)
    is_known = trainer.train_dataloader is not None or isinstance(data, TokenDataModule)
    if epochs(trainer) is not None and not is_known:
        return LambdaLR(optimizer, _length_unknown)
    return LambdaLR(optimizer, _factor_of_step(schedule, trainer))


def make_deferred_schedulers(schedule: Schedule | None, trainer: Trainer) -> None:
    """Replace schedulers that waited for the user's own data loader; the length of the run is known now."""
    for config in trainer.lr_scheduler_configs:
        waiting = config.scheduler
        if isinstance(waiting, LambdaLR) and waiting.lr_lambdas[0] is _length_unknown:
            position = waiting.last_epoch - 1  # making a scheduler takes its first step
            config.scheduler = LambdaLR(waiting.optimizer, _factor_of_step(schedule, trainer), position)


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


def _length_unknown(step: int) -> float:
    """Until the length of the run is known; no step is taken with it."""
    return 0.0


def _factor_of_step(schedule: Schedule | None, trainer: Trainer) -> partial[float]:
    """The factor of the optimizer's learning rate, by the number of steps already taken."""
    total = total_steps(trainer)
    if schedule is None:
        warmup = DEFAULT_WARMUP if total is None else min(DEFAULT_WARMUP, total // 10)
        schedule = Constant(warmup_steps=warmup) if total is None else WarmupCosine(warmup_steps=warmup)
    return partial(_factor, schedule, None if total is None else max(1, total))


def _factor(schedule: Schedule, total_steps: int | None, step: int) -> float:
    # factor(0) is 0 if there is a warmup: counting from 1, every update changes the weights
    return schedule.factor(step + 1, total_steps)
