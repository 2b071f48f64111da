"""``python -m benchmarks memory-scaling``: the MLP's peak memory against the number of tokens; one metered step each.

The tiled op's buffers have a fixed size, so its peak may grow only by input, output and their gradients.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import swiglu
from benchmarks.charts import LOWER, lines, panels
from benchmarks.harness import Bench, Request, measure_memory
from benchmarks.rows import MIB, Row
from lightning_llm.io.charts import chart, legend

VARIANTS = ("standard", "checkpoint", "ours 0", "ours 1")


def run(request: Request) -> Iterator[Row]:
    """A row for each variant. Nothing is timed."""
    cases = swiglu.cases(request.sizes, getattr(torch, request.dtype), request.device)
    for variant in request.chosen(cases) if request.variants else VARIANTS:
        saved, peak = measure_memory(cases[variant], request.device)
        cases[variant].clear()
        yield request.row(variant, peak_bytes=peak, saved_bytes=saved)


def draw(rows: Sequence[Row], path: Path, title: str, **options: Any) -> None:
    """Peak memory against tokens: a line for each variant, axes for each dtype."""
    dtypes = panels((row for row in rows if row.peak_bytes is not None), ["dtype"])
    with chart(path, title, height=3.2, columns=len(dtypes), sharey=True, **options) as [axes]:
        for axis, (dtype, group) in zip(axes, dtypes.items(), strict=True):
            series: dict[str, list[tuple[int, float]]] = {}
            for row in group:
                batch, seq, *_ = map(int, row.shape.split("x"))
                series.setdefault(row.variant, []).append((batch * seq, row.peak_bytes / MIB))
            lines(axis, series, "tokens", f"peak memory, MiB{LOWER}" if axis is axes[0] else "")
            axis.set_title(dtype)
        legend(axes[0], fontsize=9)


BENCH = Bench(
    run=run,
    shapes=["1k-64k"],
    sizes=swiglu.BENCH.sizes,
    named_shapes={"1k-64k": [f"{n}x1024x1024x4096x1" for n in (1, 2, 4, 8, 16, 32, 64)]},
    draw=draw,
    files=("lightning_llm/ops/swiglu.py", "lightning_llm/ops/swiglu_tiles.py", "lightning_llm/ops/sizes.py"),
)
