"""Process groups of the callbacks' own: in main memory, beside the one that carries gradients."""

from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer


def host_group(trainer: Trainer) -> Any:
    """A gloo group of all processes, which gives up as soon as the strategy's own group does; all must ask for it.

    A new group of torch waits half an hour for a lost process, whatever the first one was told.

    Returns:
        The group; ``None`` where there is one process alone.
    """
    if trainer.world_size == 1 or not dist.is_initialized():
        return None
    return dist.new_group(backend="gloo", timeout=getattr(trainer.strategy, "_timeout", None))
