"""What ran, to be written beside a figure: compiled graphs, the kernel of attention, the state of the GPU."""

import contextlib
from typing import Any

import torch
from torch._dynamo.utils import counters, get_compilation_metrics

from lightning_llm.bench.workloads import Sizes, model_config
from lightning_llm.model.attention import attention_kernel


def compiled_code() -> dict[str, int]:
    """What ``torch.compile`` made in this process: graphs, graph breaks, and recompiles of the same code."""
    recompiles = sum(one.recompile_reason is not None for one in get_compilation_metrics())
    breaks = sum(counters["graph_break"].values())
    return {"graphs": counters["stats"]["unique_graphs"], "graph_breaks": breaks, "recompiles": recompiles}


def attention(sizes: Sizes, dtype: str, device: str) -> dict[str, Any]:
    """The kernel that torch chooses for causal attention of this shape, and the version of cuDNN."""
    chosen = attention_kernel(model_config(sizes), sizes["context"], getattr(torch, dtype), torch.device(device))
    return {"attention": chosen, "cudnn": torch.backends.cudnn.version()}  # type: ignore[no-untyped-call]


def state_of_gpu() -> dict[str, float]:
    """Clock of the multiprocessors, power and temperature now; what the driver does not tell is left out."""
    readings = {"sm_mhz": (torch.cuda.clock_rate, 1), "watts": (torch.cuda.power_draw, 1e-3)}
    state = {}
    for name, (read, factor) in {**readings, "celsius": (torch.cuda.temperature, 1)}.items():
        with contextlib.suppress(Exception):  # nvidia-ml-py is not installed, or the driver refuses: no reason to end
            state[name] = read() * factor
    return state
