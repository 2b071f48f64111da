"""A metered step as plain values, for JSON, and as a table."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from lightning_llm.measure.timeline import KINDS, Moment, Timeline

MIB = 2**20
REST = "all others"
NAMES = {"optimizer_state": "optimiser state", "activations": "kept activations"}

Report = dict[str, Any]


def step_report(timeline: Timeline, top: int) -> Report:
    """Peak, what forward kept, phases and timeline; bytes throughout.

    Args:
        timeline: The metered step.
        top: How many modules the timeline tells apart, those that hold most at the peak.
    """
    peak, kept = timeline.peak, timeline.kept
    names = list(peak.by_module())[:top]
    samples = [
        {"operator": moment.operator, "by_kind": moment.by_kind(), "by_module": _of(moment, names)}
        for moment in timeline.samples()
    ]
    return {
        "peak": _moment(peak),
        "kept": None if kept is None else _moment(kept),
        "phases": timeline.phases(),
        "timeline": {"marks": timeline.marks, "operators": timeline.operators, "samples": samples},
    }


def table_of(moment: Mapping[str, Any], title: str, top: int) -> Table:
    """Kinds across, modules down, in MiB.

    Args:
        moment: A moment of a report.
        title: Of the table.
        top: So many modules have a row of their own, those that hold most.
    """
    cells = {(row["module"], row["kind"]): row["bytes"] for row in moment["table"]}
    kinds = [kind for kind in KINDS if moment["by_kind"].get(kind)]
    modules = list(moment["by_module"])
    table = Table(title=title)
    table.add_column("MiB", no_wrap=True)
    for kind in kinds:
        table.add_column(NAMES.get(kind, kind), justify="right")
    table.add_column("all", justify="right")
    for name in modules[:top]:
        table.add_row(name, *_cells([cells.get((name, kind), 0) for kind in kinds]))
    if len(modules) > top:
        rest = [sum(cells.get((name, kind), 0) for name in modules[top:]) for kind in kinds]
        table.add_row(REST, *_cells(rest))
    table.add_section()
    table.add_row("all", *_cells([moment["by_kind"][kind] for kind in kinds]))
    return table


def mib(size: float) -> str:
    """``12.3``; a decimal more for small ones, nothing for zero."""
    if not size:
        return ""
    digits = 1 if abs(size) >= MIB else min(4, 1 - math.floor(math.log10(abs(size) / MIB)))
    return f"{size / MIB:,.{digits}f}"


def _cells(sizes: list[int]) -> Iterator[str]:
    yield from (mib(size) for size in [*sizes, sum(sizes)])


def _moment(moment: Moment) -> Report:
    return {
        "bytes": moment.total_bytes,
        "phase": moment.phase,
        "operator": moment.operator,
        "by_kind": moment.by_kind(),
        "by_module": moment.by_module(),
        "table": [
            {"kind": kind, "module": module, "bytes": size}
            for (kind, module), size in sorted(moment.table.items(), key=lambda item: -item[1])
        ],
    }


def _of(moment: Moment, names: list[str]) -> dict[str, int]:
    sizes = moment.by_module()
    found = {name: sizes.get(name, 0) for name in names}
    return {**found, REST: moment.total_bytes - sum(found.values())}
