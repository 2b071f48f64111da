"""The plots of an experiment's report: differences, losses during training, tuning, and cost."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lightning_llm.ablate.curves import Curves
from lightning_llm.ablate.names import BASELINE
from lightning_llm.ablate.words import difference_of, labeled, mean_loss
from lightning_llm.io.charts import COLORS, GRAY, legend
from lightning_llm.io.units import MIB
from lightning_llm.io.untrusted import printable
from lightning_llm.statistics.estimates import student


def _colors(report: Mapping[str, Any]) -> dict[str, str]:
    return {BASELINE: GRAY} | {name: COLORS[n % len(COLORS)] for n, name in enumerate(report["variants"])}


def forest(axes: Sequence[Any], report: Mapping[str, Any]) -> None:
    """The differences, with their intervals, on one line per variant."""
    axis = axes[0]
    colors = _colors(report)
    rows = labeled(report)
    if report["delta"] is not None:
        axis.axvspan(-report["delta"], report["delta"], color=GRAY, alpha=0.2, lw=0)
    # the line at 0 has a gap for the words above each interval that contains 0
    crossing = [y for y, (_, row) in enumerate(rows) if row["interval"] and math.prod(row["interval"]) < 0]
    edges = [-0.8, *(y + gap for y in crossing for gap in (-0.46, -0.14)), len(rows) - 0.4]
    axis.vlines([0] * (len(edges) // 2), edges[::2], edges[1::2], color=axis.xaxis.label.get_color(), lw=0.8)
    for y, (name, row) in enumerate(rows):
        if row["difference"] is None:
            text = row["note"] or row["verdict"]
            axis.annotate(text, (0, y), (6, 0), textcoords="offset points", va="center")
            continue
        low, high = row["interval"] or [row["difference"]] * 2
        ends = [[row["difference"] - low], [high - row["difference"]]]
        is_tuned = name not in colors
        style = {"color": colors[name.removesuffix(", tuned") if is_tuned else name]}
        style |= {"mfc": "none"} if is_tuned else {}
        axis.errorbar(row["difference"], y, xerr=ends, fmt="o", ms=7, capsize=4, **style)
        dots = [difference for pair in row["by_seed"] if (difference := difference_of(pair)) is not None]
        axis.plot(dots, [y + 0.22] * len(dots), "o", ms=4.5, alpha=0.7, color=style["color"], mew=0)
        at = (row["difference"], y)
        axis.annotate(row["sentence"], at, (0, 9), textcoords="offset points", ha="center", fontsize=8.5)
    axis.set_yticks(range(len(rows)), [printable(name) for name, _ in rows])
    axis.set(ylim=(len(rows) - 0.4, -0.8))
    zone = "" if report["delta"] is None else f"; shaded: ±{report['delta']:g}"
    names = dict.fromkeys((report["metric"], report["unit"]))  # a metric of another program is its own unit
    metric = printable(", ".join(names))
    dots_are = "; dots: pairs" if any(row["by_seed"] for _, row in rows) else ""
    axis.set_xlabel(f"difference of {metric} (negative is better{dots_are}){zone}")
    axis.grid(axis="x")


def loss_curves(axes: Sequence[Any], report: Mapping[str, Any], curves: Curves) -> None:
    """Validation losses of all variants, and their paired differences from the baseline's."""
    common = set.intersection(*(set(curves.seeds[name]) for name in _colors(report) if name in curves.seeds))
    for name, color in _colors(report).items():
        if name not in curves.steps:
            continue
        steps = curves.steps[name]
        seeds = curves.seeds[name]
        losses = curves.losses[name][[n for n, seed in enumerate(seeds) if seed in common or not common]]
        middle = losses.mean(axis=0)
        spread = losses.std(axis=0, ddof=1) if len(losses) > 1 else 0.0
        axes[0].plot(steps, middle, color=color, lw=1.5, label=printable(name), marker="." if len(steps) < 20 else "")
        axes[0].fill_between(steps, middle - spread, middle + spread, color=color, alpha=0.2, lw=0)
        if name != BASELINE:
            _difference(axes[1], *curves.differences(name), color)
    is_loss = "command" not in report
    axes[0].set(xlabel="step", ylabel="validation loss, nats/token" if is_loss else printable(report["metric"]))
    axes[1].axhline(0, color=GRAY, lw=1)
    axes[1].set(xlabel="step of the baseline", ylabel="difference, nats/token" if is_loss else "difference")
    for axis in axes:
        axis.grid()
    legend(axes[0])


def _difference(axis: Any, steps: Sequence[int], differences: Any, color: str) -> None:
    if not len(differences):
        return
    middle = differences.mean(axis=0)
    axis.plot(steps, middle, color=color, lw=1.5, marker="." if len(steps) < 20 else "")
    if (pairs := len(differences)) > 1:
        half = student(0.05, pairs - 1) * differences.std(axis=0, ddof=1) / np.sqrt(pairs)
        axis.fill_between(steps, middle - half, middle + half, color=color, alpha=0.2, lw=0)


def tuning_curves(axes: Sequence[Any], report: Mapping[str, Any]) -> None:
    """The mean loss of each variant by the value of the tuned option."""
    axis = axes[0]
    colors = _colors(report)
    for name, variant in report["tuning"]["variants"].items():
        points = [point for point in zip(variant["values"], variant["losses"], strict=True) if point[1] is not None]
        axis.plot(*zip(*points, strict=True), "o-", color=colors[name], label=printable(name)) if points else None
        if variant["best"] is not None:
            axis.axvline(variant["best"], color=colors[name], ls=":", lw=1.2)
    axis.set(xscale="log", ylabel=f"mean {report['metric']}, {report['unit']}")
    values = sorted({value for variant in report["tuning"]["variants"].values() for value in variant["values"]})
    axis.set_xticks(values, [f"{value:g}" for value in values])
    axis.minorticks_off()
    axis.set_xlabel(f"{report['tuning']['option']} (dotted: the tuned value)")
    axis.grid()
    legend(axis)


def costs(axes: Sequence[Any], report: Mapping[str, Any]) -> None:
    """The metric against training time and peak memory."""
    colors = _colors(report)
    rows = {BASELINE: report["baseline"], **report["variants"]}
    for name, variant in report["cost"]["variants"].items():
        row = rows[name]
        loss = mean_loss(report, name)
        style = {"fmt": "o", "ms": 7, "capsize": 3, "color": colors[name]}
        ends = [variant["step_s"] - variant["step_p20_s"], variant["step_p80_s"] - variant["step_s"]]
        values: list[Any] = [(variant["training_s"], [[row["steps"] * end] for end in ends])]
        values += [] if variant["peak_bytes"] is None else [(variant["peak_bytes"] / MIB, None)]
        for axis, (x, spread) in zip(axes, values if loss is not None else (), strict=False):
            axis.errorbar(x, loss, yerr=row["sd_over_seeds"], xerr=spread, label=printable(name), **style)
    axes[0].set_xlabel("training time alone, s (20th to 80th percentile)")
    axes[1].set_xlabel("peak memory of a step, MiB")
    for axis in axes:
        axis.set_ylabel(f"{report['metric']}, {report['unit']}")
        axis.grid()
    legend(axes[0])
