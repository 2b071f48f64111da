"""Comparisons before the first step: all ranks run the same, and a resumed run shows what differs from its checkpoint.

A host with yesterday's checkout, another config or another text would train: gradients of the same shapes are summed
whatever they mean. So all ranks exchange what they run.

On resume, Lightning restores the optimizer's and the schedule's hyperparameters with their state, over those in the
options. Here the checkpoint holds the options. If the resumed run has the same ones, the restored state is used to the
bit. If they differ, the moments stay, and learning rate, weight decay and schedule are those of the new options.
"""

import inspect
import json
import socket
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_llm.checkpoints.reading import EXECUTION
from lightning_llm.checkpoints.schema import FORMAT
from lightning_llm.runs.options import flat
from lightning_llm.training.distributed import host_group
from lightning_llm.training.environment import changes_since, code_digest

SHOWN = 3  # differences of a rank; one wrong config file makes dozens
Facts = dict[str, Any]

# Options for where a run takes place and what it shows, which change no result; the store's content is compared
# elsewhere, and so is the precision that `auto` resolves to (training.execution).
UNCOMPARED = (
    *("config", "ckpt_path", "weights_only", "keep_freed_memory"),
    *("data.corpus", "data.path", "data.store", "data.num_workers", "data.predict_prompts"),
    *("trainer.callbacks", "trainer.default_root_dir", "trainer.enable_", "trainer.logger"),
    *("trainer.precision", "trainer.profiler"),
)
OPTIMIZER = "model.optimizer.class_path"


class RankConsistencyCheck(Callback):
    """Compares options, data, code and versions of all ranks with those of rank 0.

    Args:
        options: Of this run, nested, plain values only.
        checkpoint: The file that the run resumes from.
    """

    def __init__(self, options: Mapping[str, Any] | None = None, checkpoint: Path | None = None) -> None:
        self.options, self.checkpoint = flat(options or {}), checkpoint

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Compare, on every rank at once.

        Raises:
            ValueError: On all ranks, with the ranks that differ from rank 0 and their differences.
        """
        if (group := host_group(trainer.strategy)) is not None:
            differences = differences_of(gather(self.facts(getattr(trainer, "datamodule", None)), group))
            if differences:
                raise ValueError(f"the processes differ: {'; '.join(differences)}")

    def facts(self, data: Any) -> Facts:
        """What this rank runs, by name."""
        return {
            **{f"option {name}": value for name, value in self.options.items()},
            "data": data.state_dict().get("store") if hasattr(data, "state_dict") else None,
            "checkpoint": None if self.checkpoint is None else self.checkpoint.name,
            "code of lightning_llm": code_digest(),
            "version of torch": torch.__version__,
            "version of lightning": lightning.__version__,
            "host": socket.gethostname(),
        }


def differences_of(all_facts: list[Facts]) -> list[str]:
    """One line per rank that differs from rank 0, with at most three differences and the number of others."""
    first, *others = all_facts
    lines = []
    for rank, facts in enumerate(others, start=1):
        names = sorted((first.keys() | facts.keys()) - {"host"})
        pairs = [(name, facts.get(name), first.get(name)) for name in names]
        if found := [f"{name} is {own} there and {zero} in process 0" for name, own, zero in pairs if own != zero]:
            more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
            lines.append(f"process {rank} on {facts.get('host')}: {', '.join(found[:SHOWN])}{more}")
    return lines


def gather(facts: Facts, group: Any) -> list[Facts]:
    """The facts of all ranks, in order. As JSON, since torch's own way to gather objects unpickles them."""
    own = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(own)]), group=group)
    padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
    padded[: len(own)] = own
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded, group=group)
    return [json.loads(bytes(one[: int(size)].tolist())) for one, size in zip(found, sizes, strict=True)]


class ResumeDiff(Callback):
    """Prints and applies the options in which a run differs from the checkpoint that it resumes from.

    Args:
        options: The options of this run, nested, plain values only.

    Attributes:
        changes: A line for each option, and for each value of the checkpoint's record of how it was executed (such as
            the precision), that was changed on a resume up to now: the step, the old and the new value.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = flat(options)
        self.changes: list[str] = []
        self._changed = False

    def state_dict(self) -> dict[str, Any]:
        """The options and their changes, for runs that resume from here."""
        return {"options": self.options, "changes": self.changes}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Print what differs.

        Raises:
            ValueError: The optimizer has another class, or ``max_steps`` is below the step of the checkpoint.
        """
        if trainer.state.fn != "fit":
            return
        step = checkpoint["global_step"]
        if 0 < trainer.max_steps < step:
            raise ValueError(
                f"trainer.max_steps {trainer.max_steps} is below step {step} of the checkpoint: give more steps"
            )
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
            if not follows_metric or any(line.startswith("model.") for line in differences):
                self._changed = True
                checkpoint["lr_schedulers"] = []  # advanced to this step in on_train_start
            if trainer.is_global_zero:
                print("Changed since the checkpoint:", *differences, sep="\n  ")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """If options differ, apply the new hyperparameters of optimizer and schedule, at this step."""
        if not self._changed:
            return
        configured: Any = pl_module.configure_optimizers()
        optimizer = configured["optimizer"]
        known = inspect.signature(type(optimizer)).parameters.values()
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known)
        # a schedule-free optimizer counts its steps in its groups
        progress = set() if takes_any else optimizer.defaults.keys() - {parameter.name for parameter in known}
        for group, asked in zip(trainer.optimizers[0].param_groups, optimizer.param_groups, strict=True):
            group.update({name: value for name, value in asked.items() if name not in {"params", *progress}})
        for config in trainer.lr_scheduler_configs:
            _advance(config.scheduler, trainer.global_step)


def option_differences(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """One line ``name: old -> new`` for each option that differs and may change the result.

    Args:
        saved: Options by their dotted names; a missing one counts as null.
        wanted: Likewise.
    """
    return [
        f"{name}: {saved.get(name)} -> {wanted.get(name)}"
        for name in sorted(saved.keys() | wanted.keys())
        if saved.get(name) != wanted.get(name) and not name.startswith(UNCOMPARED)
    ]


def _advance(scheduler: Any, steps: int) -> None:
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        return  # it starts afresh from the new learning rate
    if isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):  # in closed form: one step is enough
        scheduler.last_epoch, steps = max(0, steps - 1), min(1, steps)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the optimizer has not stepped in between
        for _ in range(steps):
            scheduler.step()


HonestResume, SameEverywhere = ResumeDiff, RankConsistencyCheck  # their names in 0.1, for one more version
