"""``lightning-llm bench cost``: how time and memory of a step grow, and how soon `fit` has done its first one.

One size of a small Llama-style model at a time is doubled, the others stay: context length, width, depth, vocabulary,
rows. Ours and transformers' ``LlamaForCausalLM`` (where it is installed) take turns; a step is forward, loss, backward,
clipping, AdamW. Per token, time and peak follow a power of the size, whose exponent is the slope of a line through the
logarithms: 0 where the cost per token stays, 1 where it grows in proportion.
"""

import dataclasses
import gc
import importlib.util
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

from benchmarks import start_up
from lightning_llm.bench.harness import MIB, Request, Row, chosen_names, describe_machine, timed_rows
from lightning_llm.measure.meter import MemoryMeter
from lightning_llm.model.config import ModelConfig
from lightning_llm.training.module import LanguageModel

BASE = {"context": 256, "width": 256, "depth": 4, "vocab": 4096, "batch": 2}  # what is not doubled
HEAD_DIM = 64
SHAPES: dict[str, list[str]] = {}
DEFAULT_SHAPES = [
    "context=256-2048",
    "width=128-1024",
    "depth=1-8",
    "vocab=1024-16384",
    "batch=1-16",
    "startup",
    "compile",
]
STARTUP, COMPILE = "startup", "compile"  # the start of the command, and the same with compiled blocks
VARIANTS = ("ours", "transformers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost(Row):
    """A row of one size, or of one start.

    Attributes:
        axis: Which size is varied; or ``startup``, or ``compile``.
        value: Of that size.
        time_slope: Exponent of time per token along the axis; the same in all rows of an axis and variant.
        memory_slope: Likewise of peak bytes per token.
        parts_s: For ``startup``: seconds of ``imports``, ``data``, ``model`` and ``rest``.
    """

    axis: str
    value: int | None = None
    time_slope: float | None = None
    memory_slope: float | None = None
    parts_s: dict[str, float] | None = None


def run(asked: Request) -> Iterator[Row]:
    """A row for each value, variant and dtype of each axis; of ``startup`` one without and one with a token store."""
    here = [name for name in VARIANTS if name == "ours" or importlib.util.find_spec(name)]
    variants = chosen_names(here, asked.variants)
    if wrong := [str(dtype) for dtype in asked.dtypes if dtype not in (torch.float32, torch.bfloat16)]:
        raise ValueError(f"dtype {', '.join(wrong)}: cost is measured in float32 and in bfloat16 (autocast)")
    axes = [(text, None if text in (STARTUP, COMPILE) else parse_axis(text)) for text in asked.shapes]
    for text, axis in axes:
        if axis is None:
            yield from _startup(text, asked)
            continue
        for dtype in asked.dtypes:
            yield from _along(text, *axis, variants, dtype, asked)


def parse_axis(text: str) -> tuple[str, list[int]]:
    """``context=256-2048`` as the name of a size and its values, each twice the one before.

    Raises:
        ValueError: It is none.
    """
    found = re.fullmatch(r"(\w+)=([1-9]\d*)-([1-9]\d*)", text)
    wanted = f"one of {', '.join(BASE)} with two sizes, the second at least twice the first, such as context=256-2048"
    if found is None or found[1] not in BASE or int(found[3]) < 2 * int(found[2]):
        raise ValueError(f"shapes {text!r} must be {wanted}; or {STARTUP}, or {COMPILE}")
    first, last = int(found[2]), int(found[3])
    if found[1] == "width" and first % HEAD_DIM:
        raise ValueError(f"shapes {text!r}: a width must be a multiple of {HEAD_DIM}, the width of a head")
    return found[1], [first * 2**power for power in range((last // first).bit_length())]


def slope(values: Sequence[float], costs: Sequence[float]) -> float:
    """The exponent b of ``cost = a · value^b``: least squares through the logarithms."""
    points = [(math.log(value), math.log(cost)) for value, cost in zip(values, costs, strict=True)]
    x_mean, y_mean = (sum(numbers) / len(points) for numbers in zip(*points, strict=True))
    return float(sum((x - x_mean) * (y - y_mean) for x, y in points) / sum((x - x_mean) ** 2 for x, _ in points))


def _along(
    text: str, axis: str, values: list[int], variants: Sequence[str], dtype: torch.dtype, asked: Request
) -> Iterator[Cost]:
    rows: list[Cost] = []
    for value in values:
        sizes = {**BASE, axis: value}
        steps = {name: _Step(name, sizes, asked.device, dtype) for name in variants}
        tokens = sizes["batch"] * sizes["context"]
        for row in timed_rows("cost", steps, asked, shape=text, dtype=dtype, warmup=2, tokens=tokens):
            known = {**dataclasses.asdict(row), "peak_bytes": steps[row.variant].peak_bytes()}
            rows.append(Cost(**known, axis=axis, value=value))
        del steps
        gc.collect()  # a module and its hooks may hold each other
    for name in variants:
        own = [row for row in rows if row.variant == name]
        times = [1 / (row.tokens_per_s or 1) for row in own]
        sizes_of = [(row.peak_bytes or 1) / ((row.tokens_per_s or 1) * (row.total_s or 1)) for row in own]
        by_time, by_memory = slope(values, times), slope(values, sizes_of)
        yield from (dataclasses.replace(row, time_slope=by_time, memory_slope=by_memory) for row in own)


class _Step:
    """A whole training step of one side; called again and again."""

    def __init__(self, variant: str, sizes: dict[str, int], device: str, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.device, self.dtype = device, dtype
        fields: dict[str, Any] = {
            "vocab_size": sizes["vocab"],
            "hidden_size": sizes["width"],
            "intermediate_size": 64 * math.ceil(sizes["width"] / 24),
            "num_hidden_layers": sizes["depth"],
            "num_attention_heads": max(1, sizes["width"] // HEAD_DIM),
            "max_position_embeddings": sizes["context"],
        }
        windows = torch.randint(sizes["vocab"], (sizes["batch"], sizes["context"] + 1)).to(device)
        self.ids, self.targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        self.model, self.loss = _ours(fields) if variant == "ours" else _transformers(fields)
        self.model.to(device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def __call__(self) -> None:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            loss = self.loss(self.ids, self.targets)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def peak_bytes(self) -> int:
        """The most that a step holds beyond weights, optimiser state and batch."""
        if self.device == "cuda":
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self()
            return int(torch.cuda.max_memory_allocated() - before)
        state = [item for entry in self.optimizer.state.values() for item in entry.values() if torch.is_tensor(item)]
        with MemoryMeter(exclude=[self.model, self.ids, self.targets, *state]) as meter:
            self()
        return int(meter.peak_bytes)


LossOf = Callable[[Tensor, Tensor], Tensor]


def _ours(fields: dict[str, Any]) -> tuple[torch.nn.Module, LossOf]:
    model = LanguageModel(ModelConfig(**fields))
    model.configure_model()
    return model, lambda ids, targets: model.loss({"input_ids": ids, "targets": targets})


def _transformers(fields: dict[str, Any]) -> tuple[torch.nn.Module, LossOf]:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**fields, use_cache=False))

    def loss(ids: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = model(input_ids=ids, shift_labels=targets, labels=targets).loss
        return found

    return model, loss


def _startup(text: str, asked: Request) -> Iterator[Cost]:
    for variant, parts in start_up.measure(asked.device, asked.rounds, compiled=text == COMPILE):
        yield Cost(
            bench="cost",
            variant=variant,
            shape=text,
            dtype="as configured",
            device=asked.device,
            machine=describe_machine(asked.device),
            total_s=sum(parts.values()),
            axis=text,
            parts_s=parts,
        )


def print_table(rows: Sequence[Cost], console: Console) -> None:
    """A table for each axis and dtype, with the slopes, and one of the start."""
    for key in dict.fromkeys((row.shape, row.dtype) for row in rows):
        group = [row for row in rows if (row.shape, row.dtype) == key]
        table = Table(Column(group[0].axis, no_wrap=True), title=" ".join(key), box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
        if group[0].parts_s is not None:
            parts = list(group[0].parts_s or ())
            for column in ("s to the first step", *parts):
                table.add_column(column, justify="right")
            for row in group:
                table.add_row(row.variant, f"{row.total_s:.2f}", *(f"{s:.2f}" for s in (row.parts_s or {}).values()))
        else:
            for column in ("side", "ms", "µs a token", "slope", "peak MiB", "KiB a token", "slope"):
                table.add_column(column, justify="right")
            for row in group:
                slopes = [f"{found:.2f}" for found in (row.time_slope, row.memory_slope) if found is not None]
                time, memory = per_token(row)
                table.add_row(
                    str(row.value),
                    row.variant,
                    f"{1000 * (row.total_s or 0):.1f}",
                    f"{1e6 * time:.1f}",
                    slopes[0],
                    f"{(row.peak_bytes or 0) / MIB:.0f}",
                    f"{memory / 1024:.1f}",
                    slopes[1],
                )
        console.print(table)
    fixed = ", ".join(f"{name} {value}" for name, value in BASE.items())
    console.print(f"what is not varied: {fixed}")


def per_token(row: Cost) -> tuple[float, float]:
    """Seconds and peak bytes per token of a row."""
    assert row.tokens_per_s is not None
    assert row.total_s is not None
    return 1 / row.tokens_per_s, (row.peak_bytes or 0) / (row.tokens_per_s * row.total_s)


def draw(rows: Sequence[Cost], path: Path, title: str) -> None:
    """Time and memory per token along each axis, with both sides; the start's parts as a bar."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    axes_of = list(dict.fromkeys((row.shape, row.dtype) for row in rows))
    figure, axes = pyplot.subplots(
        2, len(axes_of), figsize=(3.6 * len(axes_of) + 1, 6.5), squeeze=False, layout="constrained"
    )
    for (upper, lower), key in zip(axes.T, axes_of, strict=True):
        group = [row for row in rows if (row.shape, row.dtype) == key]
        if group[0].parts_s is not None:
            _draw_start(upper, group)
            lower.axis("off")
            continue
        for name, colour in (("ours", "tab:red"), ("transformers", "tab:gray")):
            own = [row for row in group if row.variant == name]
            if not own:
                continue
            values = [row.value for row in own]
            for axis, scale, place, found in (
                (upper, 1e6, 0, own[0].time_slope),
                (lower, 2**-10, 1, own[0].memory_slope),
            ):
                costs = [scale * per_token(row)[place] for row in own]
                axis.plot(values, costs, "o-", color=colour, label=f"{name}, slope {found:.2f}")
        for axis, label in ((upper, "µs a token"), (lower, "peak KiB a token")):
            axis.set(xlabel=group[0].axis, ylabel=label, yscale="log")
            axis.set_xscale("log", base=2)
            axis.grid(alpha=0.3)
            axis.legend(fontsize=8)
        upper.set_title(f"{group[0].axis}, {key[1]}")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_start(axis: Any, group: Sequence[Cost]) -> None:
    names = [row.variant for row in group]
    left = [0.0] * len(group)
    for part in group[0].parts_s or ():
        seconds = [(row.parts_s or {})[part] for row in group]
        axis.bar(names, seconds, bottom=left, label=part)
        left = [done + more for done, more in zip(left, seconds, strict=True)]
    if group[0].axis == STARTUP:
        axis.axhline(start_up.BAR_S, color="black", linestyle=":", label=f"bar: {start_up.BAR_S:g} s")
    axis.set(ylabel="s from the command to its first step", title=group[0].axis)
    axis.legend(fontsize=8)
