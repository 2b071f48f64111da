"""What a resumed run is told to do wins over what its checkpoint did; the difference is said before training.

Lightning restores the optimiser's and the schedule's numbers with their state, over whatever the options say. Here the
options are kept in the checkpoint. Where those of the run that goes on are the same, the restored state stands, to the
bit. Where they differ, the moments stay and the numbers (learning rate, weight decay, schedule) are those asked for.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_llm.training.run_options import flat

# Where a run is done and what is shown of it, not what is learnt; the store is compared by its content, elsewhere.
UNCOMPARED = (
    "config",
    "ckpt_path",
    "weights_only",
    "keep_freed_memory",
    "data.corpus",
    "data.path",
    "data.store",
    "data.num_workers",
    "data.predict_prompts",
    "trainer.callbacks",
    "trainer.default_root_dir",
    "trainer.enable_",
    "trainer.logger",
    "trainer.precision",  # as it was resolved, in training.execution
    "trainer.profiler",
)
OPTIMIZER = "model.optimizer.class_path"


class ResumeDiff(Callback):
    """Compares the options of a run with those in the checkpoint that it goes on from.

    Args:
        options: The options of this run, nested, plain values only.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = flat(options)
        self._changed = False

    def state_dict(self) -> dict[str, Any]:
        """The options, for whoever goes on from here."""
        return {"options": self.options}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """State what differs.

        Raises:
            ValueError: The optimiser is of another class, or the run's last step lies behind.
        """
        if trainer.state.fn != "fit":
            return
        step = checkpoint["global_step"]
        if 0 < trainer.max_steps < step:
            raise ValueError(
                f"trainer.max_steps {trainer.max_steps} lies before step {step} of the checkpoint: give more steps"
            )
        saved = checkpoint["callbacks"].get(self.state_key, {}).get("options", {})
        if not saved:
            return
        ours, theirs = self.options.get(OPTIMIZER), saved.get(OPTIMIZER)
        if ours != theirs:
            raise ValueError(
                f"{OPTIMIZER} is {theirs} in the checkpoint and {ours} here: one optimiser cannot go on with "
                "another's state; take the same one, or start afresh"
            )
        differences = option_differences(saved, self.options)
        self._changed = bool(differences)
        if differences:
            checkpoint["lr_schedulers"] = []  # made anew, at this step: see on_train_start
            if trainer.is_global_zero:
                print("Changed since the checkpoint:")
                print("\n".join(f"  {line}" for line in differences))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Where options differ: the optimiser's numbers and the schedule's as asked for, at this step."""
        if not self._changed:
            return
        configured: Any = pl_module.configure_optimizers()
        for group, asked in zip(trainer.optimizers[0].param_groups, configured["optimizer"].param_groups, strict=True):
            group.update({name: value for name, value in asked.items() if name != "params"})
        for config in trainer.lr_scheduler_configs:
            _advance(config.scheduler, trainer.global_step)


def option_differences(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """A line ``name: old -> new`` for each option that differs and that changes what is learnt or how.

    Args:
        saved: Options by their dotted names; one that is missing counts as null.
        wanted: Likewise.
    """
    return [
        f"{name}: {saved.get(name)} -> {wanted.get(name)}"
        for name in sorted(saved.keys() | wanted.keys())
        if saved.get(name) != wanted.get(name) and not name.startswith(UNCOMPARED)
    ]


def _advance(scheduler: Any, steps: int) -> None:
    if isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):  # in closed form: one step is enough
        scheduler.last_epoch, steps = max(0, steps - 1), min(1, steps)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch minds that the optimiser has not stepped in between
        for _ in range(steps):
            scheduler.step()
