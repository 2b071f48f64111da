"""The plots of the documentation, drawn from the rows in ``docs/benchmarks``: ``python -m benchmarks.tables --plots``.

The description of each PNG is the :func:`fingerprint` of its rows, which tells whether it still shows them.
"""

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks import baselines, cost, memory_scaling, mup, techniques
from lightning_llm.bench.plots import draw_points
from lightning_llm.bench.rows import read_rows

DOCS = Path(__file__).parents[1] / "docs"


class Plot(NamedTuple):
    """What draws it, the name of its rows in ``docs/benchmarks``, and its title."""

    draw: Callable[..., None]
    rows: str
    title: str


_FRONTIER = Plot(
    partial(draw_points, is_relative=True),
    "swiglu-kept-cpu",
    "Three SwiGLU MLPs, forward and backward: 1,024 → 4,096, 8 × 512 tokens, 2 CPU cores, freed memory kept",
)
PLOTS = {
    "images/frontier.png": _FRONTIER,
    "images/frontier-dark.png": _FRONTIER._replace(draw=partial(_FRONTIER.draw, dark=True)),
    "benchmarks/memory-scaling-cpu.png": Plot(
        memory_scaling.draw, "memory-scaling-cpu", "Peak memory of one SwiGLU MLP, 1,024 → 4,096, forward and backward"
    ),
    "benchmarks/baselines-cpu.png": Plot(
        baselines.draw,
        "baselines-cpu",
        "Whole training steps: 6 layers, 384 wide, 64 rows of 256, 2 CPU cores; ours keeps freed memory",
    ),
    "benchmarks/techniques-cpu.png": Plot(
        techniques.draw, "techniques-cpu", "Each technique added to those above it: 4 layers, 256 wide, 2 CPU cores"
    ),
    "benchmarks/cost-cpu.png": Plot(
        cost.draw, "cost-cpu", "A training step as one size grows: from 256 wide, 4 layers, context 256, 2 rows"
    ),
    "benchmarks/mup-cpu.png": Plot(mup.draw, "mup-cpu", "A learning rate for all widths: without mup and with it"),
}


def rows_of(plot: Plot) -> Path:
    """The file of its rows."""
    return DOCS / "benchmarks" / f"{plot.rows}.json"


def draw_all(folder: Path = DOCS) -> Iterator[Path]:
    """Draw all plots; yields where each was written."""
    for name, plot in PLOTS.items():
        source = rows_of(plot)
        plot.draw(read_rows(source), folder / name, plot.title, metadata={"Description": fingerprint(source)})
        yield folder / name


def fingerprint(path: Path) -> str:
    """Of the content of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
