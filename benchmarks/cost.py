"""``python -m benchmarks cost``: how time and memory of a step grow, and how soon `fit` has done its first one.

One size of a small Llama-style model at a time is doubled, the others stay: context length, width, depth, vocabulary,
rows. Ours and transformers' ``LlamaForCausalLM`` (where it is installed) are interleaved; a step is forward, loss,
backward, clipping, AdamW. Per token, time and peak follow a power of the size, whose exponent is the slope of a line
through the logarithms: 0 where the cost per token stays, 1 where it grows in proportion.
"""

import gc
import importlib.util
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import start_up
from benchmarks.charts import LOWER, lines, panels
from benchmarks.harness import Bench, Request, step_peak_bytes, timed_rows
from benchmarks.parts import doubled
from benchmarks.rows import MIB, Row
from benchmarks.steps import plain_step
from benchmarks.workloads import HEAD_DIM, llama, model_config
from lightning_llm.io.charts import chart, legend
from lightning_llm.training.module import LanguageModel

BASE = {"context": 256, "width": 256, "depth": 4, "vocab": 4096, "batch": 2}  # what is not doubled
STARTUP, COMPILE = "startup", "compile"  # the start of the command, and the same with compiled blocks
VARIANTS = ("ours", "transformers")


def _part(part: str, row: Row) -> Any:
    return row.parts_s and row.parts_s[part]


def run(request: Request) -> Iterator[Row]:
    """A row for each value and variant of an axis; of ``startup`` one without and one with a token store.

    ``axis`` is the size that is varied, ``value`` the size, ``time_slope`` the exponent of time per token along the
    axis, ``memory_slope`` likewise of peak bytes per token. ``parts_s`` are the seconds of the parts of a start.
    """
    variants = request.chosen(name for name in VARIANTS if name == "ours" or importlib.util.find_spec(name))
    if request.sizes is not None:
        axis, values = request.sizes
        yield from _along(axis, values, variants, request)
    elif request.dtype == request.options.dtype[0]:  # a start has the dtype of its config
        for variant, parts in start_up.measure(request, compiled=request.shape == COMPILE):
            facts: dict[str, Any] = {"total_s": sum(parts.values()), "parts_s": parts, "axis": request.shape}
            yield request.row(variant, dtype="as configured", **facts)


def parse(text: str) -> tuple[str, list[int]] | None:
    """``context=256-2048`` as the name of a size and its values, each twice the one before; ``None`` for a start."""
    if text in (STARTUP, COMPILE):
        return None
    axis, values = doubled(text)
    wanted = f"one of {', '.join(BASE)} with two sizes, the second at least twice the first, such as context=256-2048"
    if axis not in BASE or len(values) < 2:
        raise ValueError(f"shapes {text!r} must be {wanted}; or {STARTUP}, or {COMPILE}")
    if axis == "width" and values[0] % HEAD_DIM:
        raise ValueError(f"shapes {text!r}: a width must be a multiple of {HEAD_DIM}, the width of a head")
    return axis, values


def slope(values: Sequence[float], costs: Sequence[float]) -> float:
    """The exponent b of ``cost = a · value^b``: least squares through the logarithms."""
    x, y = ([math.log(number) for number in numbers] for numbers in (values, costs))
    return statistics.linear_regression(x, y).slope


def time_per_token(row: Row) -> Any:
    """Seconds; ``None`` of a start."""
    return 1 / row.tokens_per_s if row.tokens_per_s else None


def memory_per_token(row: Row) -> Any:
    """Peak bytes; ``None`` of a start."""
    return row.peak_bytes / (row.tokens_per_s * row.total_s) if row.peak_bytes and row.tokens_per_s else None


def _along(axis: str, values: list[int], variants: Sequence[str], request: Request) -> Iterator[Row]:
    rows: list[Row] = []
    for value in values:
        sizes = {**BASE, axis: value}
        steps = {name: _Step(name, sizes, request.device, request.dtype) for name in variants}
        for row in timed_rows(steps, request, warmup=2, tokens=sizes["batch"] * sizes["context"]):
            step, row.axis, row.value = steps[row.variant], axis, value
            row.peak_bytes = step_peak_bytes(step, step.model, step.optimizer, step.batch)
            rows.append(row)
        del steps, step
        gc.collect()  # a module and its hooks may hold each other
    for name in variants:
        own = [row for row in rows if row.variant == name]
        for row in own:
            row.time_slope = slope(values, [time_per_token(row) for row in own])
            row.memory_slope = slope(values, [memory_per_token(row) for row in own])
        yield from own


class _Step:
    """A whole training step of one side; called again and again."""

    def __init__(self, variant: str, sizes: dict[str, int], device: str, dtype: str) -> None:
        torch.manual_seed(0)
        self.device, self.dtype = device, dtype
        intermediate = 64 * math.ceil(sizes["width"] / 24)
        named = {"hidden": sizes["width"], "layers": sizes["depth"], "intermediate": intermediate}
        config = model_config({**sizes, **named})
        windows = torch.randint(sizes["vocab"], (sizes["batch"], sizes["context"] + 1)).to(device)
        self.batch = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        self.loss: Callable[[Tensor, Tensor], Any]
        if variant == "ours":
            self.model = model = LanguageModel(config)
            model.configure_model()
            self.loss = lambda ids, targets: model.loss({"input_ids": ids, "targets": targets})
        else:
            self.model = theirs = llama(config, use_cache=False)
            self.loss = lambda ids, targets: theirs(input_ids=ids, shift_labels=targets, labels=targets).loss
        self.model.to(device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def __call__(self) -> None:
        loss = partial(self.loss, *self.batch)
        plain_step(loss, self.model, self.optimizer, device=self.device, dtype=self.dtype)
        self.optimizer.zero_grad()


def draw(rows: Sequence[Row], path: Path, title: str, **options: Any) -> None:
    """Time and memory per token along each size, of both sides; below them the parts of each start as bars."""
    starts = [row for row in rows if row.parts_s]
    sizes = panels((row for row in rows if not row.parts_s), ["axis", "dtype"])
    costs = {"time, µs/token": (1e6, time_per_token), "peak, KiB/token": (2**-10, memory_per_token)}
    grid: dict[str, Any] = {"rows": 2 * bool(sizes) + bool(starts), "columns": len(sizes) or 1}
    with chart(path, title, height=2.3 * grid["rows"], sharey="row", **grid, **options) as axes:
        for place, group in enumerate(sizes.values()):
            for line, (label, (scale, cost)) in zip(axes, costs.items(), strict=False):
                series = defaultdict(list)
                for row in group:
                    series[row.variant].append((row.value, scale * cost(row)))
                lines(line[place], series, group[0].axis, "" if place else f"{label}\n{LOWER.strip()}")
        if sizes:
            legend(axes[0, 0], fontsize=9)
        if starts:
            whole_row, figure = axes[-1, 0].get_gridspec()[-1, :], axes[-1, 0].figure
            for unused in axes[-1]:
                unused.remove()
            _draw_starts(figure.add_subplot(whole_row), starts)


def _draw_starts(axis: Any, rows: Sequence[Row]) -> None:
    names, ends = [f"{row.axis}: {row.variant}" for row in rows], [0.0] * len(rows)
    for part, shade in zip(start_up.PARTS, ("#d5443a", "#d08200", "#3b82c4", "#8c8c8c"), strict=True):
        seconds = [row.parts_s[part] for row in rows]
        axis.barh(names, seconds, left=ends, label=part, color=shade)
        ends = [end + more for end, more in zip(ends, seconds, strict=True)]
    axis.axvline(start_up.BAR_S, color="black", linestyle=":", label="most that startup may take")
    axis.invert_yaxis()
    axis.set_xlabel(f"seconds until the first step is done{LOWER}")
    axis.legend(fontsize=8)


BENCH = Bench(
    run=run,
    shapes=[*("context=256-2048", "width=128-1024", "depth=1-8", "vocab=1024-16384", "batch=1-16"), STARTUP, COMPILE],
    parse=parse,
    dtypes=("float32", "bfloat16"),  # the second by autocast
    columns={
        "size": ("value", 1, "d"),
        "s to the first step": (lambda row: row.total_s if row.parts_s else None, 1, ".2f"),
        **{part: (partial(_part, part), 1, ".2f") for part in start_up.PARTS},
        "ms": (lambda row: None if row.parts_s else row.total_s, 1e3, ".1f"),
        "µs/token": (lambda row: time_per_token(row), 1e6, ".1f"),
        "time slope": ("time_slope", 1, ".2f"),
        "peak MiB": ("peak_bytes", 1 / MIB, ".0f"),
        "KiB/token": (lambda row: memory_per_token(row), 2**-10, ".1f"),
        "memory slope": ("memory_slope", 1, ".2f"),
    },
    notes=lambda rows: ["what is not varied: " + ", ".join(f"{name} {value}" for name, value in BASE.items())],
    draw=draw,
    files=("lightning_llm/model", "lightning_llm/ops", "lightning_llm/optim"),
)
