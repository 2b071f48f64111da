"""Process groups of the callbacks' own, in main memory, beside the one that carries gradients; the end of them all."""

import gc
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


def leave_groups() -> None:
    """End the process groups while Python still runs, and with them gloo's threads.

    A thread that lets go of its last tensor while Python ends asks for Python's lock then, and the process aborts after
    all was done (pytorch#179291; seen twice, with two processes on a loaded machine). Whatever holds a group, a wrapped
    model say, must be out of reach when this is called. Groups of sharded models stay, held by caches of torch; they
    had their last tensor long before.
    """
    if dist.is_initialized():
        gc.collect()  # a group ends with the last object that holds it, which may hold itself: a Trainer
        dist.destroy_process_group()
