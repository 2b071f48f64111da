"""The plots of all benches: points, bars with their spread, and lines."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.rows import MIB, Row, groups
from lightning_llm.io.charts import GRAY, chart
from lightning_llm.io.untrusted import number_in

# By the beginning of a variant's name; the longest that fits counts. All can be seen on both pages.
COLORS = {
    **dict.fromkeys(("ours", "fit", "cached", "measured", "AdamW", "MuonAdamW"), "#d5443a"),
    **{"ours 0": "#d08200", "ours 2": "#b84a9c", "checkpoint": "#3b82c4", "notebook": "#a0744b", "liger": "#5a9e3d"},
    **dict.fromkeys(("own operators", "chunked loss", "memory-optimized"), "#d5443a"),  # ours, of the techniques
    **{"transformers": "#8e6fc1", "litgpt": "#2a9d8f", "torch": "#56a4d9"},
    "": GRAY,
}
STYLES: dict[str, dict[str, Any]] = {  # of lines; that of checkpoint may lie on another
    **{"checkpoint": {"ls": (0, (4, 4)), "marker": "x"}, "proportional": {"ls": ":", "marker": ""}}
}
SPREADS = {"total_s": "total_p{}_s", "ratio": "ratio_p{}"}  # the fields of the quantiles
OFFSETS = [(8, 0), (0, 8), (0, -8), (-8, 0), (6, 6), (6, -6), (-6, 6), (-6, -6), (0, 20), (0, -20)]  # of a label
LOWER, HIGHER = " (lower is better)", " (higher is better)"


class Measure(NamedTuple):
    """A field of a row, what it is multiplied by, its axis, and what is written behind a bar (else its value)."""

    field: str
    factor: float
    label: str
    note: Callable[[Row], str] | None = None


def color(variant: str) -> str:
    """That of a variant in every plot."""
    return COLORS[max((name for name in COLORS if variant.startswith(name)), key=len)]


def in_legend(variant: str) -> str:
    """Its name in a plot: a number of ours is its level, and level 2 has the norm in it."""
    name = variant.replace("ours ", "ours, level ") if number_in(variant[5:6]) is not None else variant
    return f"{name} with norm" if variant == "ours 2" else name


def spread(row: Row, field: str) -> tuple[float, float, float] | None:
    """A field's median, 20th and 80th percentile; ``None`` if it was not measured."""
    middle = getattr(row, field)
    if middle is None:
        return None
    if field == "tokens_per_s":
        times = spread(row, "total_s") or (1, 1, 1)
        slow, fast = middle * (times[0] / times[2]), middle * (times[0] / times[1])  # 1 where the times are the same
        return middle, slow, fast
    ends = [getattr(row, SPREADS[field].format(percent)) for percent in (20, 80)] if field in SPREADS else [None]
    return (middle, middle, middle) if None in ends else (middle, *ends)


def panels(rows: Iterable[Row], by: Sequence[str] = ("shape", "dtype")) -> dict[str, list[Row]]:
    """Rows by their values of some fields; the titles have those in which the rows differ."""
    rows = list(rows)
    differ = [field for field in by if len({getattr(row, field) for row in rows}) > 1]
    return groups(rows, lambda row: ", ".join(str(getattr(row, field)) for field in differ))


def draw_points(rows: Sequence[Row], path: Path, title: str, *, is_relative: bool = False, **options: Any) -> None:
    """Peak memory against time for each shape and dtype; both axes begin at zero.

    Args:
        rows: Measured; the first of a shape and dtype is what the others are compared with.
        path: Where the plot is written.
        title: Above it.
        is_relative: Ratios to the first row instead of milliseconds and MiB.
        options: Of ``io.charts.chart``.
    """
    shapes = panels(row for row in rows if row.peak_bytes is not None)
    size: dict[str, Any] = {"rows": math.ceil(len(shapes) / 2), "columns": min(2, len(shapes))}
    field, factor = ("ratio", 1.0) if is_relative else ("total_s", 1e3)
    options |= {"sharex": is_relative, "sharey": is_relative}
    with chart(path, title, height=3.2 * size["rows"], **size, **options) as axes:
        for axis in axes.flat[len(shapes) :]:
            axis.remove()
        drawn = list(zip(axes.flat, shapes.items(), strict=False))
        points: dict[Any, dict[str, tuple[float, float]]] = {axis: {} for axis, _ in drawn}
        most = [0.0]
        for axis, (name, group) in drawn:
            units = [f"× {group[0].variant}"] * 2 if is_relative else ["ms", "MiB"]
            most = most if is_relative else [0.0]
            for row in group:
                x, low, high = (factor * value for value in spread(row, field) or [math.nan] * 3)
                y = row.peak_bytes / (group[0].peak_bytes if is_relative else MIB)
                axis.errorbar(x, y, xerr=[[x - low], [high - x]], fmt="o", ms=8, color=color(row.variant), zorder=3)
                points[axis][row.variant] = x, y
                most.append(high)
            axis.set(title=name, xlabel=f"time, {units[0]}{LOWER}", xlim=(0, 1.4 * max(most)))
            axis.set_ylim(0, 1.2 * max(y for _, y in points[axis].values()))
            if axis.get_subplotspec().is_first_col():
                axis.set_ylabel(f"peak memory, {units[1]}{LOWER}")
        axes[0, 0].figure.draw_without_rendering()  # the layout is known from here on
        for axis in points:
            _label(axis, points[axis])


def _label(axis: Any, points: Mapping[str, tuple[float, float]]) -> None:
    """Write the names of variants next to their points, each where it covers least of points and other names."""
    from matplotlib.transforms import Bbox

    around = [axis.transData.transform(point) for point in points.values()]
    taken = [Bbox([[x - 12, y - 12], [x + 12, y + 12]]) for x, y in around]
    for name, point in points.items():
        note = axis.annotate(in_legend(name), point, (0, 0), textcoords="offset points", fontsize=9, color=color(name))
        note.set_in_layout(False)

        def covers(offset: tuple[int, int], note: Any = note) -> int:
            side, level = ((n > 0) - (n < 0) for n in offset)
            note.set(position=offset, ha=("center", "left", "right")[side], va=("center", "bottom", "top")[level])
            box = note.get_window_extent()
            shared = [both for other in taken if (both := Bbox.intersection(box, other)) is not None]
            inside = Bbox.intersection(box, axis.bbox)
            outside: float = box.width * box.height - (inside.width * inside.height if inside else 0)
            return round(outside + sum(both.width * both.height for both in shared))

        covers(min(OFFSETS, key=covers))
        taken.append(note.get_window_extent())


def bar_plot(*measures: Measure, by: Sequence[str] = ("shape", "dtype"), log: bool = False) -> Callable[..., None]:
    """What draws bars of each measure: a row of axes for each group of rows, which differ in the fields ``by``.

    On a logarithmic axis, where the length of a bar would mean nothing, it draws points.
    """

    def draw(rows: Sequence[Row], path: Path, title: str, **options: Any) -> None:
        grouped = panels((row for row in rows if any(getattr(row, one.field) is not None for one in measures)), by)
        count = [len(group) for group in grouped.values()]
        options |= {"sharex": "col", "sharey": "row", "gridspec_kw": {"height_ratios": [1 + n for n in count]}}
        height = 0.6 * len(count) + 0.25 * sum(count)
        with chart(path, title, height=height, rows=len(count), columns=len(measures), **options) as axes:
            for line, (name, group) in zip(axes, grouped.items(), strict=True):
                line[0].set(ylim=(len(group) - 0.4, -0.6))
                line[0].set_yticks(range(len(group)), [row.variant for row in group])
                for axis, measure in zip(line, measures, strict=True):
                    axis.set_title(name)
                    _bars(axis, group, measure, log=log)
            for axis, measure in zip(axes[-1], measures, strict=True):
                axis.set(xlabel=measure.label, xscale="log" if log else "linear")
                axis.xaxis.set_major_formatter(number)
                low, high = axis.get_xlim()
                axis.set_xlim((low, high**1.25 / low**0.25) if log else (0, 1.2 * high))

    return draw


def _bars(axis: Any, group: Sequence[Row], measure: Measure, *, log: bool) -> None:
    for place, row in enumerate(group):
        if (values := spread(row, measure.field)) is None:
            axis.annotate("not measured", (0, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
            continue
        middle, low, high = (measure.factor * value for value in values)
        if not log:
            axis.barh(place, middle, height=0.7, color=color(row.variant))
        look = {"fmt": "o", "color": color(row.variant)} if log else {"fmt": "none", "ecolor": "#4c566a"}
        axis.errorbar(middle, place, xerr=[[middle - low], [high - middle]], **look)
        note = measure.note(row) if measure.note else number(middle)
        axis.annotate(note, (high, place), (4, 0), textcoords="offset points", va="center", fontsize=8)


def number(value: float, _: object = None) -> str:
    """Three digits, or all of those in front of the point: ``0.0123``, ``1.5``, ``12,345``."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def lines(axis: Any, series: Mapping[str, Iterable[tuple[float, float]]], x: str, y: str) -> None:
    """A line through the points of each of the series, both axes logarithmic, with plain numbers at them."""
    from matplotlib import ticker

    drawn = {label: sorted(points) for label, points in series.items()}
    for label, points in drawn.items():
        look = {"marker": "o", "color": color(label), "label": in_legend(label), "ms": 5, **STYLES.get(label, {})}
        axis.plot(*zip(*points, strict=True), **look)
    axis.set(xlabel=x, ylabel=y, xscale="log", yscale="log")
    places = sorted({place for points in drawn.values() for place, _ in points})
    places = places[:: math.ceil(len(places) / 4)]
    axis.set_xticks(places, [f"{n // 1024}k" if n % 1024 == 0 else number(n) for n in places])
    axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(number)
    axis.minorticks_off()
    axis.grid()
