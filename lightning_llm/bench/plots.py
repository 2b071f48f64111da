"""The plots of all benches: points with their frontier, bars and lines, in one style."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_llm.bench.harness import MIB, Row, groups

# By the beginning of a variant's name; the longest that fits counts.
COLORS = {
    **dict.fromkeys(("ours", "fit", "cached", "measured"), "tab:red"),
    **{"ours 0": "tab:orange", "checkpoint": "tab:blue", "transformers": "tab:purple", "litgpt": "tab:olive"},
    "": "tab:gray",
}
STYLES = {"checkpoint": "o--", "predicted": "--", "in proportion": ":"}  # of lines; it may lie on another


def color(variant: str) -> str:
    """That of a variant in every plot."""
    return COLORS[max((name for name in COLORS if variant.startswith(name)), key=len)]


@contextlib.contextmanager
def chart(
    path: Path, title: str, *, rows: int = 1, columns: int = 1, size: tuple[float, float] = (6.5, 4.5), **options: Any
) -> Iterator[Any]:
    """Axes, in ``rows`` and ``columns``, of a plot that is written as PNG at the end.

    Args:
        path: Where it is written.
        title: Above the plot.
        rows: Of axes.
        columns: Of axes.
        size: Of one axis, in inches.
        options: ``metadata`` of the PNG; the rest is for ``Figure.subplots``.
    """
    from matplotlib.figure import Figure

    metadata = options.pop("metadata", None)
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    yield figure.subplots(rows, columns, squeeze=False, **options)
    figure.suptitle(title, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata=metadata)


def draw_points(rows: Sequence[Row], path: Path, title: str) -> None:
    """Peak memory against time for each shape and dtype, with the frontier: what nothing else beats in both."""
    shapes = groups(rows)
    with chart(path, title, columns=len(shapes)) as [axes]:
        for axis, (name, group) in zip(axes, shapes.items(), strict=True):
            measured = [(row.total_s, row.peak_bytes, row.variant) for row in group]
            found = [(1e3 * s, peak / MIB, of) for s, peak, of in measured if s is not None and peak is not None]
            for time, memory, variant in found:
                axis.scatter(time, memory, s=55, color=color(variant), zorder=3)
                axis.annotate(variant, (time, memory), textcoords="offset points", xytext=(6, 4), fontsize=8)
            edge = frontier([(time, memory) for time, memory, _ in found])
            axis.plot(*zip(*edge, strict=True), color=color("ours"), alpha=0.4, zorder=2, label="frontier")
            axis.set(xlabel="forward and backward, ms (median)", ylabel="peak memory, MiB", title=name)
            axis.set_ylim(bottom=0)
            axis.margins(x=0.2)
            axis.legend()


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other point beats in both coordinates, by the first one."""
    edge: list[tuple[float, float]] = []
    for time, memory in sorted(points):
        if not edge or memory < edge[-1][1]:
            edge.append((time, memory))
    return edge


def bar_plot(field: str, factor: float, unit: str, *, log: bool = False) -> Callable[[Sequence[Row], Path, str], None]:
    """What draws a bar of one field of every row that has it."""

    def draw(rows: Sequence[Row], path: Path, title: str) -> None:
        shown = {f"{row.variant}, {row.shape} {row.dtype}": row for row in rows if getattr(row, field) is not None}
        with chart(path, title, size=(8, 1.5 + 0.3 * len(shown))) as [[axis]]:
            values = [factor * getattr(row, field) for row in shown.values()]
            bars(axis, list(shown), {unit: values}, unit, colors=[color(row.variant) for row in shown.values()])
            axis.set(xscale="log" if log else "linear")

    return draw


def bars(
    axis: Any,
    names: Sequence[str],
    series: Mapping[str, Sequence[float]],
    unit: str,
    *,
    labels: Sequence[str] = (),
    colors: Sequence[str] | None = None,
    stacked: bool = False,
) -> None:
    """Horizontal bars for each name, one for each of the series; ``labels`` are written behind the first."""
    height, left = 0.8 / (1 if stacked else len(series)), [0.0] * len(names)
    for place, (label, values) in enumerate(series.items()):
        shift = 0 if stacked else height * (place - (len(series) - 1) / 2)
        places = [at + shift for at in range(len(names))]
        drawn = axis.barh(places, values, height=height, left=left, label=label, color=colors)
        left = [at + value if stacked else 0.0 for at, value in zip(left, values, strict=True)]
        if labels and not place:
            axis.bar_label(drawn, labels, padding=4)
            axis.margins(x=0.6)
    axis.set_yticks(range(len(names)), names)
    axis.set(xlabel=unit, ylim=(len(names) - 0.5, -0.5))
    if len(series) > 1:
        axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(series), fontsize=8, frameon=False)


def lines(axis: Any, series: Mapping[str, Iterable[tuple[float, float]]], x: str, y: str) -> None:
    """A line through the points of each of the series, both axes logarithmic."""
    for label, points in series.items():
        axis.plot(*zip(*sorted(points), strict=True), STYLES.get(label, "o-"), color=color(label), label=label)
    axis.set(xlabel=x, ylabel=y, yscale="log")
    axis.set_xscale("log", base=2)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
