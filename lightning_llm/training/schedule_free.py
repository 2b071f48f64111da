"""Schedule-free optimizers: the weights to train and the weights to evaluate.

A schedule-free optimizer (Defazio et al. 2024, "The Road Less Scheduled", arXiv:2405.15682) trains at one point and is
evaluated at an average of others. Its methods ``train()`` and ``eval()`` put the one or the other into the parameters;
both do nothing if that is done already, as in the package ``schedulefree``. Validation, samples and checkpoints have
the average.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from lightning.pytorch import Trainer
from torch.optim import Optimizer


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
