"""What several benchmarks time, and what ran: the code, the kernel of attention.

Timed are the step of a plain loop, the seconds of a call, and processes that step together.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters, get_compilation_metrics

from benchmarks.harness import describe_machine
from benchmarks.workloads import ShapeSizes, model_config
from lightning_llm.accounting.counts import step_flops
from lightning_llm.accounting.hardware import find_device
from lightning_llm.measure.timer import now
from lightning_llm.model.attention import attention_kernel
from lightning_llm.model.config import ModelConfig
from lightning_llm.training.distributed import leave_groups

Clip = Callable[[Iterable[Tensor], float], object]
CLIP: Clip = nn.utils.clip_grad_norm_


def plain_step(
    loss: Callable[[], Any],
    model: nn.Module,
    optimizer: Any,
    *,
    device: str,
    dtype: str = "float32",
    clip: Clip | None = CLIP,
) -> None:
    """Forward under autocast, backward, clipping at 1, and the optimizer; the gradients are still there afterwards.

    There is no autocast to ``float32``, and no clipping if ``clip`` is ``None``.
    """
    with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
        value = loss()
    torch.autograd.backward(value)
    if clip is not None:
        clip(model.parameters(), 1.0)
    optimizer.step()


class LossModule(nn.Module):
    """What DDP wraps: its forward is a loss of the model."""

    def __init__(self, loss: Callable[..., Tensor], model: nn.Module) -> None:
        super().__init__()
        self.loss, self.model = loss, model

    def forward(self, *batch: Any) -> Tensor:
        return self.loss(*batch)


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


def what_ran(sizes: ShapeSizes, dtype: str, device: str) -> dict[str, Any]:
    """What ``torch.compile`` made in this process, and the kernel that torch chooses for causal attention."""
    recompiles = sum(one.recompile_reason is not None for one in get_compilation_metrics())
    breaks = sum(counters["graph_break"].values())
    compiled = {"graphs": counters["stats"]["unique_graphs"], "graph_breaks": breaks, "recompiles": recompiles}
    chosen = attention_kernel(model_config(sizes), sizes["context"], getattr(torch, dtype), torch.device(device))
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return {**compiled, "attention": chosen, "cudnn": cudnn}


def utilization(config: ModelConfig, context: int, tokens_per_s: float, device: str, dtype: str) -> float | None:
    """The share of a device's dense peak that the model's FLOPs take; ``None`` if the peak is not known, as of CPUs."""
    try:
        peak = find_device(describe_machine(device)).flops[dtype]
    except (ValueError, KeyError):
        return None
    return step_flops(config, tokens=1, context_length=context).model * tokens_per_s / peak
