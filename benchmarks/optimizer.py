"""``python -m benchmarks optimizer``: one step of each optimizer over the parameters of a model, in milliseconds.

Variants: torch's AdamW in its three forms, ours in two and with its state in bfloat16, torch's Muon with its fused
AdamW for all but hidden matrices, and ``MuonAdamW``. Each has its own parameters and gradients; they are interleaved.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from benchmarks.charts import LOWER, Measure, bar_plot
from benchmarks.harness import Bench, Request, timed_rows
from benchmarks.rows import Row, columns
from benchmarks.workloads import HEAD_DIM, model_config
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.transformer import Transformer
from lightning_llm.optim.adamw import AdamW
from lightning_llm.optim.groups import HIDDEN_MATRICES, param_groups
from lightning_llm.optim.muon import MuonAdamW

LR = 1e-3


def _torch_muon_adamw(model: nn.Module) -> Any:
    """Torch's two optimizers, as one has to combine them."""
    groups = param_groups(model)
    hidden = [group for group in groups if group["name"] == HIDDEN_MATRICES]
    others = [group for group in groups if group["name"] != HIDDEN_MATRICES]
    both: list[Any] = [torch.optim.Muon(hidden, lr=LR), torch.optim.AdamW(others, lr=LR, fused=True)]
    return SimpleNamespace(step=lambda: [optimizer.step() for optimizer in both])


VARIANTS: dict[str, Callable[[nn.Module], Any]] = {
    "torch AdamW, fused": lambda model: torch.optim.AdamW(param_groups(model), lr=LR, fused=True),
    "torch AdamW, foreach": lambda model: torch.optim.AdamW(param_groups(model), lr=LR, foreach=True),
    "torch AdamW, loop": lambda model: torch.optim.AdamW(param_groups(model), lr=LR, foreach=False),
    "AdamW": lambda model: AdamW(param_groups(model), lr=LR),
    "AdamW, foreach": lambda model: AdamW(param_groups(model), lr=LR, fused=False),
    "AdamW, bf16 state": lambda model: AdamW(param_groups(model), lr=LR, state_dtype="bfloat16"),
    "torch Muon + AdamW": _torch_muon_adamw,
    "MuonAdamW": lambda model: MuonAdamW(param_groups(model), lr=LR),
}


def run(request: Request) -> Iterator[Row]:
    """A row for each variant; the dtype is that of the parameters, ``ratio`` is to the first variant."""
    if request.sizes["hidden"] % HEAD_DIM:
        raise ValueError(f"shapes {request.shape!r}: hidden must be a multiple of {HEAD_DIM}, the width of a head")
    config, dtype = model_config(request.sizes), getattr(torch, request.dtype)
    steps = {name: _ready(VARIANTS[name], config, dtype, request.device).step for name in request.chosen(VARIANTS)}
    yield from timed_rows(steps, request, warmup=2)


def _ready(make: Callable[[nn.Module], Any], config: ModelConfig, dtype: torch.dtype, device: str) -> Any:
    """The optimizer over a model of its own, with gradients."""
    torch.manual_seed(0)
    model = Transformer(config).to(device, dtype)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return make(model)


BENCH = Bench(
    run=run,
    shapes=["4x128x65", "6x256x65", "6x384x65"],
    sizes=("layers", "hidden", "vocab"),
    named_shapes={"124m": ["12x768x50304"]},
    columns=columns("ms", "p20", "p80", "ratio"),
    draw=bar_plot(Measure("total_s", 1e3, f"ms per optimizer step{LOWER}"), log=True),
    files=("lightning_llm/optim",),
)
