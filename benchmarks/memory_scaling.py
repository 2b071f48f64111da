"""``python -m benchmarks memory-scaling``: the MLP's peak memory against the number of tokens; one metered step each.

The tiled op's buffers have a fixed size, so its peak may grow only by input, output and their gradients.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from lightning_llm.bench import swiglu
from lightning_llm.bench.harness import MIB, Request, Row, measure_memory
from lightning_llm.bench.plots import chart, lines

NAMES = swiglu.NAMES
SHAPES = {"1k-64k": [f"{n}x1024x1024x4096x1" for n in (1, 2, 4, 8, 16, 32, 64)]}
FILES = ("lightning_llm/ops/swiglu.py", "lightning_llm/ops/swiglu_tiles.py")
DEFAULT_SHAPES = ["1k-64k"]
VARIANTS = ("standard", "checkpoint", "ours 0", "ours 1")


def run(asked: Request) -> Iterator[Row]:
    """A row for each variant. Nothing is timed."""
    cases = swiglu.cases(asked.sizes, getattr(torch, asked.dtype), asked.device)
    batch, seq, *_ = asked.sizes.values()
    for variant in asked.chosen(cases) if asked.variants else VARIANTS:
        saved, peak = measure_memory(cases[variant], asked.device)
        cases[variant].clear()
        yield asked.row(variant, peak_bytes=peak, saved_bytes=saved, _tokens=batch * seq)


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Peak memory against tokens: a line for each variant, axes for each dtype."""
    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    with chart(path, title, columns=len(dtypes)) as [axes]:
        for axis, dtype in zip(axes, dtypes, strict=True):
            series: dict[str, list[tuple[float, float]]] = {}
            for row in (row for row in rows if row.dtype == dtype and row.peak_bytes is not None):
                series.setdefault(row.variant, []).append((row._tokens, row.peak_bytes / MIB))
            lines(axis, series, "tokens", "peak memory, MiB")
            axis.set_title(dtype)
