"""The figures of a report: differences, values during training, tuning, cost, sizes, and the baseline of a stream.

Each function takes a row of axes and a report, so that one can be drawn on a page, in a notebook, or for a paper.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_llm.ablate.names import ADOPTED, REJECTED, STOPPED
from lightning_llm.ablate.report.record import ReportRecord, Row
from lightning_llm.io.charts import COLORS, GRAY, legend
from lightning_llm.io.units import MIB
from lightning_llm.io.untrusted import printable

MARKERS = "os^D"  # more variants than colors differ in these
_OF_VERDICT = {ADOPTED: COLORS[2], REJECTED: GRAY, STOPPED: COLORS[4]}


def colors_of(report: ReportRecord) -> dict[str, str]:
    """A color for each variant; gray for the baseline."""
    others = [name for name in report.variants if name != report.baseline]
    return {report.baseline: GRAY} | {name: COLORS[n % len(COLORS)] for n, name in enumerate(others)}


def metric_in_words(report: ReportRecord) -> str:
    """The metric with its unit; one of another program is its own unit."""
    return printable(", ".join(dict.fromkeys((report.metric, report.unit))))


def better_sign(report: ReportRecord) -> str:
    """Which sign of a difference is an improvement."""
    return "positive" if report.higher_is_better else "negative"


def differences(axes: Sequence[Any], report: ReportRecord) -> None:
    """The differences with their intervals, on one line per variant."""
    rows = [row for row in report.results if row.metric == report.metric and row.size is None]
    draw_differences(axes[0], rows, colors_of(report), report.delta)
    zone = "" if report.delta is None else f"; shaded: ±{report.delta:g}"
    dots = "; dots: pairs" if any(row.by_seed for row in rows) else ""
    better = f"({better_sign(report)} is better{dots})"
    axes[0].set_xlabel(f"difference of {metric_in_words(report)} {better}{zone}")


def effects(axes: Sequence[Any], report: ReportRecord) -> None:
    """The effects of combined factors with their intervals; of interactions and the sum, no sign is an improvement."""
    rows = report.effects
    colors = {"main": COLORS[0], "interaction": COLORS[1], "together": COLORS[2], "sum": COLORS[3]}
    of_rows = [dataclasses.replace(row, by_seed=[]) for row in rows]
    draw_differences(axes[0], of_rows, {row.variant: colors[row.kind] for row in rows}, report.delta)
    zone = "" if report.delta is None else f"; shaded: ±{report.delta:g}"
    less = "negative" if report.higher_is_better else "positive"
    meaning = f"effects: {better_sign(report)} is better; × and the sum: {less} is less together than apart"
    axes[0].set_xlabel(f"contrast of {metric_in_words(report)}{zone}\n{meaning}")


def draw_differences(axis: Any, rows: Sequence[Row], colors: dict[str, str], delta: float | None) -> None:
    """The differences of rows on one axis, each with its label."""
    if delta is not None:
        axis.axvspan(-delta, delta, color=GRAY, alpha=0.2, lw=0)
    # the line at 0 has a gap for the words above each interval that contains 0, and for the long ones of a batch
    has_gap = (row.e_value is not None or (row.interval and math.prod(row.interval) < 0) for row in rows)
    crossing = [y for y, is_crossed in enumerate(has_gap) if is_crossed]
    edges = [-0.8, *(y + gap for y in crossing for gap in (-0.46, -0.14)), len(rows) - 0.4]
    axis.vlines([0] * (len(edges) // 2), edges[::2], edges[1::2], color=axis.xaxis.label.get_color(), lw=0.8)
    for y, row in enumerate(rows):
        if row.difference is None:
            text = printable(row.note or row.verdict)
            axis.annotate(text, (0, y), (6, 0), textcoords="offset points", va="center")
            continue
        low, high = row.interval or (row.difference, row.difference)
        ends = [[row.difference - low], [high - row.difference]]
        style = {"color": colors.get(row.variant, COLORS[0])}
        style |= {"mfc": "none"} if row.kind == "tuned" else {}
        axis.errorbar(row.difference, y, xerr=ends, fmt="o", ms=7, capsize=4, **style)
        dots = [pair.difference for pair in row.by_seed if pair.difference is not None]
        axis.plot(dots, [y + 0.22] * len(dots), "o", ms=4.5, alpha=0.7, color=style["color"], mew=0)
        at = (row.difference, y)
        axis.annotate(row.sentence, at, (0, 9), textcoords="offset points", ha="center", fontsize=8.5)
    axis.set_yticks(range(len(rows)), [printable(row.label) for row in rows])
    axis.set(ylim=(len(rows) - 0.4, -0.8))
    axis.grid(axis="x")


def curves(axes: Sequence[Any], report: ReportRecord) -> None:
    """The metric of all variants during training, and their paired differences from the baseline's."""
    colors = colors_of(report)
    for name, curve in report.curves.items():
        style = {"color": colors[name], "lw": 1.5, "marker": "." if len(curve.steps) < 20 else ""}
        mean, sd = np.array(curve.mean), np.array(curve.sd)
        axes[0].plot(curve.steps, mean, label=printable(name), **style)
        axes[0].fill_between(curve.steps, mean - sd, mean + sd, color=colors[name], alpha=0.2, lw=0)
        if curve.difference:
            middle, half = np.array(curve.difference), np.array(curve.half_width)
            axes[1].plot(curve.shares, middle, **style)
            if curve.pairs > 1:
                axes[1].fill_between(curve.shares, middle - half, middle + half, color=colors[name], alpha=0.2, lw=0)
    is_command = bool(report.design and report.design.command)
    what = printable(report.metric) if is_command else "validation loss, nats/token"
    axes[0].set(xlabel="step", ylabel=what)
    axes[1].axhline(0, color=GRAY, lw=1)
    axes[1].set(xlabel="step of the baseline", ylabel="difference" if is_command else "difference, nats/token")
    for axis in axes:
        axis.grid()
    legend(axes[0])


def tuning(axes: Sequence[Any], report: ReportRecord) -> None:
    """The mean of each variant by the value of the tuned option."""
    axis = axes[0]
    colors = colors_of(report)
    assert report.tuning is not None
    for name, variant in report.tuning.variants.items():
        points = [point for point in zip(variant.values, variant.losses, strict=True) if point[1] is not None]
        if points:
            axis.plot(*zip(*points, strict=True), "o-", color=colors[name], label=printable(name))
        if variant.best is not None:
            axis.axvline(variant.best, color=colors[name], ls=":", lw=1.2)
    axis.set(xscale="log", ylabel=f"mean {metric_in_words(report)}")
    values = sorted({value for variant in report.tuning.variants.values() for value in variant.values})
    axis.set_xticks(values, [f"{value:g}" for value in values])
    axis.minorticks_off()
    axis.set_xlabel(f"{report.tuning.option} (dotted: the tuned value)")
    axis.grid()
    legend(axis)


def costs(axes: Sequence[Any], report: ReportRecord) -> None:
    """The metric against training time and peak memory."""
    colors = colors_of(report)
    for name, variant in report.variants.items():
        mean = report.mean_of(name)
        step = variant.step
        if mean is None or step is None:
            continue
        own = variant.means.get(report.metric)
        style = {"fmt": "o", "ms": 7, "capsize": 3, "color": colors[name], "label": printable(name)}
        spread = None if own is None else own.sd
        steps = variant.steps or 0
        ends = [[steps * (step.step_s - step.step_p20_s)], [steps * (step.step_p80_s - step.step_s)]]
        axes[0].errorbar(steps * step.step_s, mean, yerr=spread, xerr=ends, **style)
        if step.peak_bytes is not None:
            axes[1].errorbar(step.peak_bytes / MIB, mean, yerr=spread, **style)
    axes[0].set_xlabel("training time alone, s (20th to 80th percentile)")
    axes[1].set_xlabel("peak memory of a step, MiB")
    for axis in axes:
        axis.set_ylabel(metric_in_words(report))
        axis.grid()
    legend(axes[0])


def sizes(axes: Sequence[Any], report: ReportRecord) -> None:
    """Differences over compute with their intervals; at the target, the interval of the mean and of the next mean."""
    axis = axes[0]
    facts = report.sizes
    assert facts is not None
    if report.delta is not None:
        axis.axhspan(-report.delta, report.delta, color=GRAY, alpha=0.2, lw=0)
    axis.axhline(0, color=axis.xaxis.label.get_color(), lw=0.8)
    names = [name for name in report.variants if name != report.baseline]
    for index, name in enumerate(names):
        color = COLORS[index % len(COLORS)]
        shift = 1.04 ** (index - (len(names) - 1) / 2)
        rows = [row for row in report.of_kind("result") if row.variant == name and row.difference is not None]
        marker = MARKERS[index // len(COLORS) % len(MARKERS)]
        draw_over_compute(axis, rows, color, printable(name), shift=shift, marker=marker)
        predicted = facts.predicted.get(name)
        if facts.target_compute is not None and predicted is not None:
            at = facts.target_compute * shift
            axis.vlines(at, *predicted.prediction_interval, color=color, lw=1)
            axis.vlines(at, *predicted.interval, color=color, lw=6, alpha=0.5)
            axis.plot(at, predicted.difference, "o", mfc="none", color=color)
    over_compute(axis)
    axis.set_ylabel(f"difference of {metric_in_words(report)}")
    legend(axis)


def over_compute(axis: Any) -> None:
    """Make the horizontal axis one of compute; names have no mathematics, so its labels have none either."""
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:.0e}".replace("e+", "e"))
    axis.set_xlabel("counted FLOPs of a run")
    axis.grid()


def draw_over_compute(
    axis: Any, rows: Sequence[Row], color: str, label: str, *, shift: float = 1.0, marker: str = "o"
) -> None:
    """Draw one line: the differences of a variant over the compute of its sizes.

    Args:
        axis: Where to.
        rows: Of the variant, with a difference.
        color: Of the line.
        label: In the legend.
        shift: Factor of the compute, so that the intervals of several variants stay apart.
        marker: Of a point.
    """
    x = [(row.compute or math.nan) * shift for row in rows]
    y = [row.difference or 0.0 for row in rows]
    ends = [row.interval or (row.difference, row.difference) for row in rows]
    halves = abs(np.reshape(np.array(ends, dtype=np.float64), (-1, 2)).T - y)
    axis.errorbar(x, y, yerr=halves, fmt=f"{marker}-", ms=5, capsize=3, lw=1, color=color, label=label)


def staircase(axes: Sequence[Any], report: ReportRecord) -> None:
    """The baseline of a stream, and each idea's difference from the baseline that it met."""
    axis = axes[0]
    level = 0.0
    levels = [level]
    confirmed = {row.idea.place: row for row in report.of_kind("confirmation") if row.idea is not None}
    ideas = [row for row in report.of_kind("result") if row.idea is not None]
    for row in ideas:
        place = row.idea.place if row.idea else 0
        if row.difference is not None:
            low, high = row.interval or (row.difference, row.difference)
            ends = [[row.difference - low], [high - row.difference]]
            color = _OF_VERDICT.get(row.verdict, GRAY)
            axis.errorbar(place, level + row.difference, yerr=ends, fmt="o", ms=4, capsize=2, lw=1, color=color)
        if row.verdict == ADOPTED and place in confirmed:
            level += confirmed[place].difference or 0.0
        levels.append(level)
    edges = [row.idea.place - 0.5 for row in ideas if row.idea] + [len(ideas) + 0.5, len(ideas) + 1]
    axis.step(edges, [*levels, level], where="post", color=COLORS[0], lw=1.5)
    for verdict in dict.fromkeys(row.verdict for row in ideas):
        axis.plot([], [], "o", ms=4, color=_OF_VERDICT.get(verdict, GRAY), label=verdict)
    axis.plot([], [], color=COLORS[0], label="baseline")
    axis.set(xlabel="place in the stream", ylabel=f"change of {metric_in_words(report)}")
    axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axis.grid(axis="y")
    legend(axis)
