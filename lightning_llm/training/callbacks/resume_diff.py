"""Differences between a resumed run and its checkpoint: they are printed, and applied.

Lightning restores the optimizer's and the schedule's hyperparameters with their state, over those in the options. Here
the checkpoint holds the options. If the resumed run has the same ones, the restored state is used as it is. If they
differ, the moments stay, and learning rate, weight decay and schedule are those of the new options. So with another
``max_steps``, each further step has the rate of the new schedule at that step.
"""

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_llm.checkpoints.schema import EXECUTION, FORMAT
from lightning_llm.runs.options import UNCOMPARED, flat, is_among
from lightning_llm.training.environment import changes_since

OPTIMIZER = "model.optimizer.class_path"
# Options that change no result. Contents of the store and the precision of `auto` are compared elsewhere.
UNCHANGING = (
    *UNCOMPARED,
    *("data.corpus", "data.path", "data.store", "data.num_workers"),
    *("keep_freed_memory", "trainer.callbacks", "trainer.precision"),
)


class ResumeDiff(Callback):
    """Prints and applies the options in which a run differs from the checkpoint that it resumes from.

    Args:
        options: The options of this run, nested, plain values only.

    Attributes:
        changes: A line for each option, and each recorded fact of the execution (such as the precision), that a resume
            has changed up to now: the step, the old and the new value.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = flat(options)
        self.changes: list[str] = []
        self._changed = False

    def state_dict(self) -> dict[str, Any]:
        return {"options": self.options, "changes": self.changes}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Print what differs.

        Raises:
            ValueError: The optimizer has another class, or ``max_steps`` is below the step of the checkpoint.
        """
        if trainer.state.fn != "fit":
            return
        step = checkpoint["global_step"]
        max_steps = trainer.max_steps
        if 0 < max_steps < step:
            raise ValueError(f"trainer.max_steps {max_steps} is below step {step} of the checkpoint: give more steps")
        state = checkpoint["callbacks"].get(self.state_key, {})
        if not (saved := state.get("options")):
            return
        executed = changes_since(checkpoint.get(FORMAT, {}).get(EXECUTION, {}), trainer)
        self.changes = [*state.get("changes", []), *(f"step {step}: {line}" for line in executed)]
        if (ours := self.options.get(OPTIMIZER)) != (theirs := saved.get(OPTIMIZER)):
            raise ValueError(
                f"{OPTIMIZER} is {theirs} in the checkpoint and {ours} here: an optimizer cannot use the state of "
                "another one; use the same one, or start from scratch"
            )
        if differences := option_differences(saved, self.options):
            self.changes += [f"step {step}: {line}" for line in differences]
            follows_metric = any("num_bad_epochs" in schedule for schedule in checkpoint["lr_schedulers"])
            # a plain LightningModule makes optimizers in a form of its own: they continue as they were saved
            is_known = getattr(pl_module, "architecture", None) is not None
            if is_known and (not follows_metric or any(line.startswith("model.") for line in differences)):
                self._changed = True
                checkpoint["lr_schedulers"] = []  # advanced to this step in on_train_start
            if trainer.is_global_zero:
                kept = [] if is_known else [f"{type(pl_module).__qualname__}'s optimizers continue as saved"]
                print("Changed since the checkpoint:", *differences, *kept, sep="\n  ")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """If options differ, apply the new hyperparameters of optimizer and schedule, at this step."""
        if not self._changed:
            return
        configured: Any = pl_module.configure_optimizers()
        optimizer = configured["optimizer"]
        arguments = inspect.signature(type(optimizer)).parameters.values()
        takes_any = any(argument.kind is argument.VAR_KEYWORD for argument in arguments)
        # a schedule-free optimizer counts its steps in its groups
        progress = set() if takes_any else optimizer.defaults.keys() - {argument.name for argument in arguments}
        for group, new in zip(trainer.optimizers[0].param_groups, optimizer.param_groups, strict=True):
            group.update({name: value for name, value in new.items() if name not in {"params", *progress}})
        for config in trainer.lr_scheduler_configs:
            _advance(config.scheduler, trainer.global_step)


def option_differences(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """One line ``name: old -> new`` for each option that differs and may change the result.

    Args:
        saved: Options by their dotted names; a missing one counts as null.
        wanted: Of the resumed run, in the same form.
    """
    return [
        f"{name}: {saved.get(name)} -> {wanted.get(name)}"
        for name in sorted(saved.keys() | wanted.keys())
        if saved.get(name) != wanted.get(name) and not is_among(name, UNCHANGING)
    ]


def _advance(scheduler: Any, steps: int) -> None:
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        return  # it starts afresh from the new learning rate
    if isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):  # in closed form: one step is enough
        scheduler.last_epoch = max(0, steps - 1)
        steps = min(1, steps)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the optimizer has not stepped in between
        for _ in range(steps):
            scheduler.step()
