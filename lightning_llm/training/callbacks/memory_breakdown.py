"""A metered step as plain values, as a table and as a plot; and where the steps of several runs differ.

The plot has stacked timelines, by category above and by module below, one column for each step.
"""

import colorsys
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Column, Table

from lightning_llm.io.charts import canvas
from lightning_llm.io.units import GIB, MIB, short_mib
from lightning_llm.io.untrusted import number_in, read_json
from lightning_llm.measure.timeline import CATEGORIES, MemorySample, Timeline

FOLDER = "memory"  # of a run, with the files of the steps that were sampled
LARGEST = 1 << 30  # bytes of such a file
MOST_MODULES = 20  # that differ between runs, in a table
POINTS = {"peak": "At the peak of step {}", "saved": "Saved by forward when the last backward of step {} begins"}
REST = "all others"
LABEL_WIDTH, LABEL_HEIGHT = 0.13, 0.03  # of a label of a phase, as shares of the width of the plot
NAMES = {"optimizer_state": "optimizer state", "activations": "saved activations"}
COLORS = {
    **{"parameters": "#4c566a", "gradients": "#8f6fb0", "optimizer_state": "#9aa5b8", "inputs": "#2f9e8f"},
    **{"activations": "#e07b39", "temporary": "#f2c14e", "other": "#d0d0d0"},
}
GROUPINGS = {"by_kind": "by category", "by_module": "by module"}  # the keys of a report, in words
# A hue for each part of a layer, lighter from layer to layer; other modules have one of the other hues.
HUES = {"mlp": 0.06, "self_attn": 0.58, "input_layernorm": 0.33, "post_attention_layernorm": 0.42}
OTHER_HUES = (0.93, 0.75, 0.14, 0.50, 0.84, 0.25)
Breakdown = dict[str, Any]


def step_breakdown(timeline: Timeline, top: int) -> Breakdown:
    """Peak, what forward saved, phases and timeline of the ``top`` modules that hold most at the peak; in bytes."""
    peak, saved = timeline.peak, timeline.saved
    names = list(peak.by_module())[:top]
    samples = []
    for point in timeline.samples():
        sizes = point.by_module()
        shown = {name: sizes.get(name, 0) for name in names}
        shown[REST] = point.total_bytes - sum(shown.values())
        samples.append({"operator": point.operator, "by_kind": point.by_category(), "by_module": shown})
    return {
        "peak": point_breakdown(peak),
        "saved": saved and point_breakdown(saved),
        "phases": timeline.phases(),
        "timeline": {"marks": timeline.marks, "operators": timeline.operators, "samples": samples},
    }


def table_of(point: Mapping[str, Any], title: str, top: int) -> Table:
    """Categories across, modules down, in MiB; the ``top`` modules that hold most have a row of their own."""
    cells = {(row["module"], row["kind"]): row["bytes"] for row in point["table"]}
    categories = [category for category in CATEGORIES if point["by_kind"].get(category)]
    modules = list(point["by_module"])
    table = Table(Column("MiB", no_wrap=True), title=title)
    for column in (*categories, "all"):
        table.add_column(NAMES.get(column, column), justify="right")
    rows = {name: [name] for name in modules[:top]} | ({REST: modules[top:]} if len(modules) > top else {})
    for title, names in (rows | {"all": modules}).items():
        if title == "all":
            table.add_section()
        sizes = [sum(cells.get((name, category), 0) for name in names) for category in categories]
        table.add_row(title, *(short_mib(size) for size in [*sizes, sum(sizes)]))
    return table


def point_breakdown(point: MemorySample) -> Breakdown:
    """Live bytes at a point in the step: total, by category, by module, and as a table."""
    return {
        "bytes": point.total_bytes,
        "phase": point.phase,
        "operator": point.operator,
        "by_kind": point.by_category(),
        "by_module": point.by_module(),
        "table": [{"kind": kind, "module": name, "bytes": n} for (kind, name), n in Counter(point.table).most_common()],
    }


def last_breakdowns(runs: Sequence[Path]) -> tuple[int, dict[Path, Breakdown]]:
    """The step that most runs sampled, the last one of several, and its report by run, of the first process.

    Runs of compiled code have none: the meter does not see it.
    """
    files = {run: _files_of(run) for run in runs}
    counts = Counter(step for of_run in files.values() for step in of_run)
    step = max(counts, key=lambda step: (counts[step], step), default=0)
    reports = {run: read_json(of_run[step], LARGEST) for run, of_run in files.items() if step in of_run}
    return step, {run: report for run, report in reports.items() if report.get("peak") and report.get("saved")}


def _files_of(run: Path) -> dict[int, Path]:
    found = [*(run / FOLDER).glob("step-*.json"), *(run / FOLDER / "rank-0").glob("step-*.json")]
    numbers = {path: number_in(path.stem.removeprefix("step-")) for path in found}
    return {number: path for path, number in numbers.items() if number is not None}


def difference(points: Mapping[str, Breakdown]) -> tuple[list[str], list[list[str]]]:
    """Titles and rows of a table: categories, then modules that differ, most first, with differences from the first.

    Args:
        points: Live bytes at a point of the step, by the name of what is compared.
    """
    first, *others = points
    head = ["MiB", first]
    for name in others:
        head += [name, "difference" if len(others) == 1 else f"{name} - {first}"]
    rows = []
    for category in CATEGORIES:
        sizes = [one["by_kind"].get(category, 0) for one in points.values()]
        if any(sizes):
            rows.append([NAMES.get(category, category), *_with_differences(sizes)])
    modules = dict.fromkeys(name for one in points.values() for name in one["by_module"])
    sizes_of = {name: [one["by_module"].get(name, 0) for one in points.values()] for name in modules}
    ordered = sorted(sizes_of, key=lambda name: (-_spread(sizes_of[name]), name))
    shown = [name for name in ordered if _spread(sizes_of[name])][:MOST_MODULES]
    rows += [[name, *_with_differences(sizes_of[name])] for name in shown]
    rest = [sum(sizes_of[name][place] for name in ordered[len(shown) :]) for place in range(len(points))]
    rows.append([REST, *_with_differences(rest)])
    rows.append(["all", *_with_differences([one["bytes"] for one in points.values()])])
    return head, rows


def _with_differences(sizes: Sequence[int]) -> list[str]:
    cells = [short_mib(sizes[0]) or "0"]
    for size in sizes[1:]:
        change = size - sizes[0]
        cells += [short_mib(size) or "0", f"+{short_mib(change)}" if change > 0 else short_mib(change) or "="]
    return cells


def _spread(sizes: Sequence[int]) -> int:
    return max(sizes) - min(sizes)


def draw(reports: Mapping[str, Breakdown], title: str) -> Any:
    """A ``matplotlib.figure.Figure`` with a canvas of its own, and a column for each report, by its title."""
    highest = max(report["peak"]["bytes"] for report in reports.values())
    unit, name = (GIB, "GiB") if highest >= GIB else (MIB, "MiB")
    samples = [sample for report in reports.values() for sample in report["timeline"]["samples"]]
    modules = [REST, *sorted({name for sample in samples for name in sample["by_module"]} - {REST}, key=_order)]
    colors = {**COLORS, **_module_colors(modules)}
    shown = {
        grouping: [key for key in keys if key == REST or any(sample[grouping].get(key) for sample in samples)]
        for grouping, keys in zip(GROUPINGS, (CATEGORIES, modules), strict=True)
    }
    size: dict[str, Any] = {"nrows": 2, "ncols": len(reports), "sharex": "col", "sharey": True}
    with canvas(max(9.5, 8 * len(reports)), 8.5, dpi=110, **size) as axes:
        for column, (label, report) in enumerate(reports.items()):
            peak = report["peak"]
            for axis, (grouping, keys) in zip(axes[:, column], shown.items(), strict=True):
                _stack(axis, report, grouping, keys, colors, unit)
                _mark_phases(axis, report["timeline"], highest / unit)
                if column == 0:
                    axis.set_ylabel(f"live {GROUPINGS[grouping]}, {name} (lower is better)")
                if column == len(reports) - 1:
                    handles, labels = axis.get_legend_handles_labels()
                    axis.legend(handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.0, 1.0))
            title_of_column = f"{label}\npeak of all tensors {peak['bytes'] / unit:,.1f} {name}, in {peak['phase']}"
            axes[0, column].set_title(title_of_column)
            axes[1, column].set_xlabel("operators run since the step began")
        axes[0, 0].set_ylim(0, 1.12 * highest / unit)
        axes[0, 0].figure.suptitle(title)
    return axes[0, 0].figure


def pixels(figure: Any) -> Any:
    """(height, width, 3), uint8: what TensorBoard takes as an image."""
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())[..., :3].copy()


def _stack(
    axis: Any, report: Breakdown, grouping: str, keys: Sequence[str], colors: Mapping[str, Any], unit: int
) -> None:
    samples = sorted(report["timeline"]["samples"], key=lambda one: (one["operator"], sum(one[grouping].values())))
    highest = {sample["operator"]: sample for sample in samples}  # of several within one operator
    x = [*highest, report["timeline"]["operators"]]
    rows = [[sample[grouping].get(key, 0) / unit for sample in [*highest.values(), samples[-1]]] for key in keys]
    labels = [NAMES.get(key, key) for key in keys]
    shades = [colors[key] for key in keys]
    axis.stackplot(x, *rows, labels=labels, colors=shades, step="mid")  # each is the peak of the operators around it
    operator = report["peak"]["operator"]
    height = report["peak"]["bytes"] / unit
    axis.plot([operator], [height], marker=7, color="black", markersize=7, clip_on=False)  # its tip is there
    axis.set_xlim(0, x[-1])


def _mark_phases(axis: Any, timeline: Mapping[str, Any], highest: float) -> None:
    """A line where each phase begins, with its name: upright in a narrow phase, and none in a narrower one."""
    begins = [operator for operator, _ in timeline["marks"]]
    ends = [*begins[1:], timeline["operators"]]
    for (begin, phase), end in zip(timeline["marks"], ends, strict=True):
        axis.axvline(begin, color="black", linewidth=0.7, alpha=0.6)
        share = (end - begin) / timeline["operators"]
        is_last = end == timeline["operators"]
        if share > LABEL_HEIGHT or is_last:
            upright = {"rotation": 90} if share < LABEL_WIDTH else {}
            axis.text(begin, 1.11 * highest, f" {phase} ", fontsize=8, va="top", ha="left", **upright)


def _order(name: str) -> tuple[str, list[int], str]:
    parts = name.split(".")
    numbers = [number for number in map(number_in, parts) if number is not None]
    return parts[-1] if len(parts) > 1 else f"~{name}", numbers, name


def _module_colors(modules: Sequence[str]) -> dict[str, Any]:
    groups: dict[str, list[str]] = {}
    for name in modules:
        groups.setdefault(name.rpartition(".")[2], []).append(name)
    others = itertools.cycle(OTHER_HUES)
    colors = {}
    for part, names in groups.items():
        hue = HUES.get(part) or next(others)
        for place, name in enumerate(names):
            colors[name] = colorsys.hls_to_rgb(hue, 0.42 + 0.38 * place / max(1, len(names) - 1), 0.65)
    return {**colors, REST: "#d0d0d0"}
