"""The optimizer of a run: its groups, the weights of schedule-free ones, and schedules that follow a metric.

A schedule-free optimizer (Defazio et al. 2024, "The Road Less Scheduled", arXiv:2405.15682) trains at one point and is
evaluated at an average of others. Its methods ``train()`` and ``eval()`` put the one or the other into the parameters;
both do nothing if that is done already, as in the package ``schedulefree``. Validation, samples and checkpoints have
the average.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_llm.model.config import ModelConfig
from lightning_llm.model.weights import lr_factors
from lightning_llm.optim.groups import Group, GroupRule, own_rates, param_groups

MONITORED = "val_loss"


class OptimizedModule(LightningModule):
    """A model that makes its optimizer from groups of its parameters.

    Attributes:
        groups: Rules for some of the parameters.
        make_optimizer: Makes the optimizer from groups.
    """

    architecture: ModelConfig
    groups: Sequence[GroupRule] = ()
    make_optimizer: Callable[..., Optimizer]

    def groups_of(self, module: nn.Module) -> list[Group]:
        """The groups of a module: of this one, or of its transformer.

        Raises:
            ValueError: A rule decides nothing.
        """
        return param_groups(module, rules=self.groups, lr_factors=lr_factors(self.architecture))

    def optimizer_over(self, groups: list[Group]) -> Optimizer:
        """The optimizer, with a learning rate for each group.

        Raises:
            ValueError: An option is out of range; or there is ``architecture.mup``, and it is no kind of Adam.
        """
        optimizer = own_rates(self.make_optimizer(groups))
        name = type(optimizer).__name__
        if self.architecture.mup is not None and not name.startswith("Adam"):
            raise ValueError(f"architecture.mup sets the learning rates of Adam, got {name}: use AdamW, or no mup")
        return optimizer

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """After each optimizer step, unless the schedule follows a metric: see :func:`follow_metrics`."""
        if not isinstance(scheduler, ReduceLROnPlateau):
            super().lr_scheduler_step(scheduler, metric)

    def on_train_start(self) -> None:
        """Put the weights to train into the parameters."""
        _switch(self.trainer.optimizers, "train")

    def on_validation_start(self) -> None:
        """Put the weights to evaluate into the parameters."""
        _switch(self.trainer.optimizers, "eval")

    def on_validation_end(self) -> None:
        """After callbacks have saved them, continue with the weights to train."""
        if self.trainer.state.fn == "fit":
            _switch(self.trainer.optimizers, "train")

    def on_train_end(self) -> None:
        """Leave the weights to evaluate in the parameters."""
        _switch(self.trainer.optimizers, "eval")


def _switch(optimizers: Iterable[Optimizer], mode: Literal["train", "eval"]) -> None:
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
    _switch(averaging, "eval")
    try:
        yield
    finally:
        _switch(averaging, "train")
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
            monitor = getattr(scheduler, "monitor", MONITORED)
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
