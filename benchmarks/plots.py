"""The plots of the documentation: ``python -m benchmarks.tables --plots`` draws them.

They show the rows in ``docs/benchmarks`` and the reports in ``docs/experiments``.

The description of each PNG is the :func:`fingerprint` of its rows, which tells whether it still shows them.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import baselines, cost, memory_scaling, mup, race, techniques
from benchmarks.charts import draw_points
from benchmarks.rows import Row, read_rows
from lightning_llm.ablate.report.figures import draw_differences, draw_over_compute, over_compute
from lightning_llm.ablate.report.report import Report
from lightning_llm.io.charts import COLORS, GRAY, chart, legend

DOCS = Path(__file__).parents[1] / "docs"


class Plot(NamedTuple):
    """What draws it, its sources in ``docs/benchmarks`` or ``docs/experiments``, and its title."""

    draw: Callable[..., None]
    sources: str  # separated by spaces; several are drawn as a list
    title: str


def draw_frontier(rows: Sequence[Row], path: Path, title: str, **options: Any) -> None:
    """Memory against time; without level 2, whose operator includes the norm that the others do not have."""
    labels = {"checkpoint": "checkpoint (torch.utils)"}
    shown = [Row(**{**vars(row), "variant": labels.get(row.variant, row.variant)}) for row in rows]
    draw_points([row for row in shown if row.variant != "ours 2"], path, title, is_relative=True, **options)


def draw_verdicts(report: Report, path: Path, title: str, names: Mapping[str, str], **options: Any) -> None:
    """The differences of an experiment's variants, from the top those of ``names``, each with its label."""
    rows = [dataclasses.replace(report.row(name), variant=label) for name, label in names.items()]
    colors = {row.variant: COLORS[place % len(COLORS)] for place, row in enumerate(rows)}
    with chart(path, title, height=0.6 * len(names) + 0.5, **options) as axes:
        draw_differences(axes[0, 0], rows, colors, report.delta)
        dots = f"dots: pairs; shaded: ±{report.delta:g}"
        axes[0, 0].set_xlabel(f"difference from SwiGLU, nats per character (negative is better; {dots})")


def draw_ladders(
    reports: Sequence[Report], path: Path, title: str, *, names: Mapping[str, str], **options: Any
) -> None:
    """The difference of the first variant of several ladders over their sizes; each has its line by its label."""
    with chart(path, title, height=3.4, **options) as axes:
        axis = axes[0, 0]
        delta = reports[0].delta
        if delta is not None:
            axis.axhspan(-delta, delta, color=GRAY, alpha=0.2, lw=0)
        axis.axhline(0, color=axis.xaxis.label.get_color(), lw=0.8)
        for place, report in enumerate(reports):
            name = next(name for name in report.variants if name != report.baseline)
            rows = [row for row in report.of_kind("result") if row.variant == name and row.difference is not None]
            shift = 1.04 ** (place - (len(reports) - 1) / 2)
            draw_over_compute(axis, rows, COLORS[place % len(COLORS)], names[report.name], shift=shift)
        over_compute(axis)
        axis.set_ylabel("difference, nats (negative is better)")
        legend(axis)


_VERDICTS = Plot(
    partial(draw_verdicts, names={"geglu": "GEGLU", "relu2": "ReLU²", "relu": "ReLU", "gelu": "GELU"}),
    "experiments/which-mlp-confirm",
    "Validation loss with another MLP: 222,144 parameters each, every MLP at its best learning rate",
)
_FRONTIER = Plot(
    draw_frontier,
    "benchmarks/swiglu-kept-cpu",
    "Three SwiGLU MLPs, forward and backward: 1,024 wide, 4,096 hidden units, 4,096 tokens, 2 CPU cores",
)
_LADDERS = {
    "swiglu-relu2-muonadamw-2": "MuonAdamW, 2 tokens",
    "swiglu-relu2-muonadamw-20": "MuonAdamW, 20 tokens",
    "swiglu-relu2-adamw-2": "AdamW, 2 tokens",
    "swiglu-relu2-adamw-20": "AdamW, 20 tokens",
}
_RELU2 = Plot(
    partial(draw_ladders, names=_LADDERS),
    " ".join(f"experiments/{name}" for name in _LADDERS),
    "ReLU² instead of SwiGLU, 2 or 20 tokens per parameter: 8 pairs at each size, 95% intervals",
)
_BENCHES = (
    (memory_scaling.BENCH, "Peak memory of one SwiGLU MLP, forward and backward: 1,024 wide, 4,096 hidden units"),
    (baselines.BENCH, "Whole training steps: 6 layers, 384 wide, 64 rows of 256 characters, 2 CPU cores"),
    (techniques.BENCH, "Each technique added to those above it: 4 layers, 256 wide, 2 CPU cores"),
    (cost.BENCH, "A training step as one size grows: from 256 wide, 4 layers, context 256, 2 rows"),
    (mup.BENCH, "A learning rate for all widths: without mup and with it"),
)
PLOTS = {
    "images/verdicts.png": _VERDICTS,
    "images/verdicts-dark.png": _VERDICTS._replace(draw=partial(_VERDICTS.draw, dark=True)),
    "images/relu2.png": _RELU2,
    "images/frontier.png": _FRONTIER,
    "images/frontier-dark.png": _FRONTIER._replace(draw=partial(_FRONTIER.draw, dark=True)),
    "benchmarks/race-endless-cpu.png": Plot(
        race.draw,
        "benchmarks/race-endless-cpu",
        "What five loops claim to gain from 1,000 runs, and what they gain",
    ),
    **{
        f"benchmarks/{bench.name}-cpu.png": Plot(bench.draw, f"benchmarks/{bench.name}-cpu", title)
        for bench, title in _BENCHES
    },
}


def sources_of(plot: Plot) -> list[Path]:
    """The files that it shows."""
    return [DOCS / f"{source}.json" for source in plot.sources.split()]


def draw_all(folder: Path = DOCS) -> Iterator[Path]:
    """Draw all plots; yields where each was written."""
    for name, plot in PLOTS.items():
        first, *others = contents = [content_of(source) for source in sources_of(plot)]
        metadata = {"Description": fingerprint(*sources_of(plot))}
        plot.draw(contents if others else first, folder / name, plot.title, metadata=metadata)
        yield folder / name


def content_of(source: Path) -> Any:
    """A report, or rows."""
    return Report.read(source) if source.parent.name == "experiments" else read_rows(source)


def fingerprint(*paths: Path) -> str:
    """Of the content of files."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()
