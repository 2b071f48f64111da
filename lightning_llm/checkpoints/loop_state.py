"""Where a run stands, in optimiser steps."""

from lightning.pytorch import Trainer


def step_is_complete(trainer: Trainer) -> bool:
    """Whether the micro-batch at hand is the last of its optimiser step."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready % trainer.accumulate_grad_batches == 0


def validation_follows(trainer: Trainer) -> bool:
    """Whether Lightning is going to validate after the micro-batch at hand, by the trainer's options on validation."""
    progress, every_epochs = trainer.fit_loop.epoch_loop.batch_progress, trainer.check_val_every_n_epoch
    every = trainer.val_check_batch
    if every is None or every == float("inf") or not trainer.enable_validation:
        return False
    if every_epochs is None:
        return bool(progress.total.ready % every == 0)
    return (trainer.current_epoch + 1) % every_epochs == 0 and bool(progress.current.ready % every == 0)


def is_log_step(trainer: Trainer) -> bool:
    """Whether ``trainer.log_every_n_steps`` asks for an entry after this optimiser step."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector, unseen by mypy
    return every > 0 and trainer.global_step % every == 0
