"""Where a run stands, in optimiser steps."""

from lightning.pytorch import Trainer


def step_is_complete(trainer: Trainer) -> bool:
    """Whether the micro-batch at hand is the last of its optimiser step."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready % trainer.accumulate_grad_batches == 0


def is_log_step(trainer: Trainer) -> bool:
    """Whether ``trainer.log_every_n_steps`` asks for an entry after this optimiser step."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector, unseen by mypy
    return every > 0 and trainer.global_step % every == 0
