"""Options of the Trainer that cannot be honored, found before anything starts. Lightning checks most of them itself."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler

# the least that an option may be, and what that means
LEAST: dict[str, tuple[int, str]] = {
    "check_val_every_n_epoch": (1, "for no validation set trainer.limit_val_batches to 0"),
    "log_every_n_steps": (0, "0 logs nothing"),
    "num_sanity_val_steps": (-1, "0 tries none, -1 all"),
    "accumulate_grad_batches": (1, "with token stores it follows from data.global_batch_size"),
    "gradient_clip_val": (0, "0 clips nothing"),
    "min_steps": (0, "0 asks for none"),
    "min_epochs": (0, "0 asks for none"),
}


def check_options(options: Mapping[str, Any], callbacks: Sequence[Callback]) -> None:
    """Refuse values that would fail in the middle of a run, or do something else than they say.

    Args:
        options: As given to the Trainer, by name.
        callbacks: The user's.

    Raises:
        ValueError: With every fault.
    """
    faults = [
        f"trainer.{name} must be at least {least}, got {options[name]}: {meaning}"
        for name, (least, meaning) in LEAST.items()
        if isinstance(options.get(name), int | float) and options[name] < least
    ]
    if options.get("val_check_interval") == 0:
        faults.append(
            "trainer.val_check_interval must be a number of steps above 0 or a fraction above 0, at most 1.0, got 0: "
            "for no validation set trainer.limit_val_batches to 0"
        )
    faults += accumulation_faults(callbacks)
    if faults:
        raise ValueError("; ".join(faults))


def accumulation_faults(callbacks: Sequence[Any]) -> list[str]:
    """A callback that changes how many micro-batches are a step."""
    if not any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks):
        return []
    return [
        "trainer.callbacks: GradientAccumulationScheduler would change the micro-batches of a step, and with them "
        "the batch size and every interval in steps: leave it out and set data.global_batch_size"
    ]


def check_nodes(environment: ClusterEnvironment, num_nodes: int) -> None:
    """Refuse several nodes that have no way to find each other, instead of waiting for them.

    Raises:
        ValueError: Neither a launcher nor the variables of the environment say where process 0 is.
    """
    if num_nodes == 1 or type(environment) is not LightningEnvironment:  # a launcher's, or the user's own
        return
    names = {"MASTER_ADDR": ("MASTER_ADDR",), "MASTER_PORT": ("MASTER_PORT",), "NODE_RANK": ("NODE_RANK", "GROUP_RANK")}
    missing = [name for name, accepted in names.items() if not any(os.environ.get(one) for one in accepted)]
    if missing:
        raise ValueError(
            f"trainer.num_nodes {num_nodes}: the other nodes cannot find this process, which would wait in vain: "
            f"{', '.join(missing)} not set. Start the command on every node with torchrun or SLURM "
            "(docs/distributed.md), or set these variables there"
        )
