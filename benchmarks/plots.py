"""The plots of the documentation: ``python -m benchmarks.tables --plots`` draws them.

They show the rows in ``docs/benchmarks`` and the reports in ``docs/experiments``.

The description of each PNG is the :func:`fingerprint` of its rows, which tells whether it still shows them.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import baselines, cost, memory_scaling, mup, techniques
from lightning_llm.ablate.plots import forest
from lightning_llm.bench.plots import draw_points
from lightning_llm.bench.rows import Row, read_rows
from lightning_llm.io.charts import chart

DOCS = Path(__file__).parents[1] / "docs"


class Plot(NamedTuple):
    """What draws it, its source in ``docs/benchmarks`` or ``docs/experiments``, and its title."""

    draw: Callable[..., None]
    source: str
    title: str


def draw_frontier(rows: Sequence[Row], path: Path, title: str, **options: Any) -> None:
    """Memory against time; without level 2, whose operator includes the norm that the others do not have."""
    labels = {"checkpoint": "checkpoint (torch.utils)"}
    shown = [Row(**{**vars(row), "variant": labels.get(row.variant, row.variant)}) for row in rows]
    draw_points([row for row in shown if row.variant != "ours 2"], path, title, is_relative=True, **options)


def draw_verdicts(report: Mapping[str, Any], path: Path, title: str, names: Mapping[str, str], **options: Any) -> None:
    """The differences of an experiment's variants, from the top those of ``names``, each with its label."""
    variants = {label: report["variants"][name] for name, label in names.items()}
    with chart(path, title, height=0.6 * len(names) + 0.5, **options) as axes:
        forest(axes[0], {**report, "variants": variants})
        dots = f"dots: pairs; shaded: ±{report['delta']:g}"
        axes[0, 0].set_xlabel(f"difference from SwiGLU, nats per character (negative is better; {dots})")


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
    "images/frontier.png": _FRONTIER,
    "images/frontier-dark.png": _FRONTIER._replace(draw=partial(_FRONTIER.draw, dark=True)),
    **{
        f"benchmarks/{bench.name}-cpu.png": Plot(bench.draw, f"benchmarks/{bench.name}-cpu", title)
        for bench, title in _BENCHES
    },
}


def source_of(plot: Plot) -> Path:
    """The file that it shows."""
    return DOCS / f"{plot.source}.json"


def draw_all(folder: Path = DOCS) -> Iterator[Path]:
    """Draw all plots; yields where each was written."""
    for name, plot in PLOTS.items():
        source = source_of(plot)
        is_report = source.parent.name == "experiments"
        content = json.loads(source.read_text(encoding="utf-8")) if is_report else read_rows(source)
        plot.draw(content, folder / name, plot.title, metadata={"Description": fingerprint(source)})
        yield folder / name


def fingerprint(path: Path) -> str:
    """Of the content of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
