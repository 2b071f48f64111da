"""``lightning-llm bench optimizer``: one step of each optimiser over the parameters of a model, in milliseconds.

Variants: torch's AdamW in its three forms, ours in two and with its state in bfloat16, torch's Muon beside its fused
AdamW for what is no hidden matrix, and ``MuonAdamW``. Each has parameters and gradients of its own; they take turns.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.table import Column, Table
from torch import nn
from torch.optim import Optimizer

from lightning_llm.bench.harness import Request, Row, chosen_names, draw_bars, timed_rows
from lightning_llm.io.console import Console
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.transformer import Transformer
from lightning_llm.optim.adamw import AdamW
from lightning_llm.optim.groups import HIDDEN_MATRICES, param_groups
from lightning_llm.optim.muon import MuonAdamW

SHAPES = {"124m": ["12x768x50304"]}  # layers x hidden x vocab
DEFAULT_SHAPES = ["4x128x65", "6x256x65", "6x384x65"]
LR = 1e-3
HEAD_DIM = 64


class _TorchMuonAdamW:
    """torch's two optimisers, as one has to combine them."""

    def __init__(self, model: nn.Module) -> None:
        groups = param_groups(model)
        hidden = [group for group in groups if group["name"] == HIDDEN_MATRICES]
        others = [group for group in groups if group["name"] != HIDDEN_MATRICES]
        self.both = (torch.optim.Muon(hidden, lr=LR), torch.optim.AdamW(others, lr=LR, fused=True))

    def step(self) -> None:
        for optimizer in self.both:
            optimizer.step()  # type: ignore[no-untyped-call]


VARIANTS: dict[str, Callable[[nn.Module], Optimizer | _TorchMuonAdamW]] = {
    "torch AdamW, fused": lambda model: torch.optim.AdamW(param_groups(model), lr=LR, fused=True),
    "torch AdamW, foreach": lambda model: torch.optim.AdamW(param_groups(model), lr=LR, foreach=True),
    "torch AdamW, loop": lambda model: torch.optim.AdamW(param_groups(model), lr=LR, foreach=False),
    "AdamW": lambda model: AdamW(param_groups(model), lr=LR),
    "AdamW, foreach": lambda model: AdamW(param_groups(model), lr=LR, fused=False),
    "AdamW, bf16 state": lambda model: AdamW(param_groups(model), lr=LR, state_dtype="bfloat16"),
    "torch Muon + AdamW": _TorchMuonAdamW,
    "MuonAdamW": lambda model: MuonAdamW(param_groups(model), lr=LR),
}


def run(asked: Request) -> Iterator[Row]:
    """A row for each shape, dtype of the parameters and variant; ``ratio`` is to the first variant."""
    names = chosen_names(list(VARIANTS), asked.variants)
    for shape in asked.shapes:
        config = model_config(shape)
        for dtype in asked.dtypes:
            steps = {name: _ready(VARIANTS[name], config, dtype, asked.device).step for name in names}
            yield from timed_rows("optimizer", steps, asked, shape=shape, dtype=dtype, warmup=2)


def model_config(text: str) -> ModelConfig:
    """``6x384x65``: layers, hidden size, vocabulary.

    Raises:
        ValueError: It is none.
    """
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdigit() and int(part) for part in parts) or int(parts[1]) % HEAD_DIM:
        raise ValueError(
            f"shapes {text!r} is not LAYERSxHIDDENxVOCAB with HIDDEN a multiple of {HEAD_DIM}, such as "
            f"{DEFAULT_SHAPES[0]}, nor one of {', '.join(SHAPES)}"
        )
    layers, hidden, vocab = map(int, parts)
    return ModelConfig(
        vocab_size=vocab, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=hidden // HEAD_DIM
    )


def _ready(make: Callable[[nn.Module], Any], config: ModelConfig, dtype: torch.dtype, device: str) -> Any:
    """The optimiser over a model of its own, with gradients."""
    torch.manual_seed(0)
    model = Transformer(config).to(device, dtype)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return make(model)


def print_table(rows: list[Row], console: Console) -> None:
    """Milliseconds of a step for each shape and dtype."""
    for key in dict.fromkeys((row.shape, row.dtype) for row in rows):
        table = Table(Column("optimizer", no_wrap=True), title=" ".join(key))
        for column in ("ms", "20 %", "80 %", "ratio"):
            table.add_column(column, justify="right")
        for row in rows:
            if (row.shape, row.dtype) == key:
                times = (row.total_s, row.total_p20_s, row.total_p80_s)
                table.add_row(row.variant, *(f"{1000 * (t or 0):.2f}" for t in times), f"{row.ratio:.2f}")
        console.print(table)


def draw(rows: list[Row], path: Any, title: str) -> None:
    """A bar for each variant and shape."""
    values = {f"{row.variant}, {row.shape}": 1000 * (row.total_s or 0) for row in rows}
    draw_bars(values, path, title, unit="ms per optimiser step", log=True)
