"""Where a run stands, in optimiser steps."""

from lightning.pytorch import Trainer


def step_is_complete(trainer: Trainer) -> bool:
    """Whether the micro-batch at hand is the last of its optimiser step."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready % trainer.accumulate_grad_batches == 0
