"""What several benchmarks time: the step of a plain loop, the seconds of a call, and processes that step together."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_llm.measure.timer import now
from lightning_llm.training.distributed import leave_groups

Clip = Callable[[Iterable[Tensor], float], object]


def plain_step(
    loss: Callable[[], Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    device: str,
    dtype: str = "float32",
    clip: Clip = nn.utils.clip_grad_norm_,
) -> None:
    """Forward under autocast, backward, clipping at 1, and the optimizer; the gradients are still there afterwards.

    Args:
        loss: Computes the loss of a batch.
        model: Whose gradients are clipped.
        optimizer: Of its parameters.
        device: ``cpu`` or ``cuda``.
        dtype: ``bfloat16`` for autocast, else ``float32``.
        clip: How gradients are clipped.
    """
    with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
        value = loss()
    torch.autograd.backward(value)
    clip(model.parameters(), 1.0)
    optimizer.step()


def seconds_of(function: Callable[[], object], device: str = "cpu") -> float:
    """How long a call takes, until the device has done all that it asked for."""
    before = now(device)
    function()
    return now(device) - before


@contextlib.contextmanager
def process_group(rank: int, world: int, device: str, meeting: str) -> Iterator[None]:
    """One of ``world`` processes, with a GPU or a thread each, which find each other by the file ``meeting``."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    store = dist.FileStore(meeting, world)  # type: ignore[attr-defined]
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(minutes=10))
    yield
    dist.barrier()
    leave_groups()
