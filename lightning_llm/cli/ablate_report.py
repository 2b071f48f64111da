"""The report of an experiment on one screen of the terminal."""

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from lightning_llm.ablate.words import (
    bounds,
    compared,
    cost_lines,
    design_lines,
    is_tested,
    labeled,
    noise_lines,
    percent,
    signed,
    together,
    tuning_lines,
    verdict_lines,
)
from lightning_llm.io.console import Console, folded, room


def show_report(report: Mapping[str, Any], console: Console) -> None:
    """Print a report on one screen: a table in which only names are folded, and a sentence for each variant."""
    state = "ended" if report["has_ended"] else "has not ended"
    head = f"{report['name']}: {report['metric']} of {report['validation']}, {state}; plan {report['plan'][:12]}"
    sides = "; ".join(f"{name}: {what}" for name, what in compared(report).items())
    for line in (head, sides, *design_lines(report)):
        console.print(line, soft_wrap=True, highlight=False)
    titles = ("pairs", "difference", f"{percent(report['interval']['each'])} interval", "p adj.", "verdict")
    columns = [Column(title, no_wrap=True) for title in titles]
    table, rows = Table(Column("variant", overflow="fold"), *columns, box=SIMPLE_HEAD, pad_edge=False), []
    for name, row in labeled(report):
        p = "–" if row["p_adjusted"] is None else "<0.0001" if row["p_adjusted"] < 1e-4 else f"{row['p_adjusted']:.4f}"
        pairs, verdict = (str(row["pairs"]), row["verdict"]) if is_tested(row) else ("–", "–")
        rows.append((name, pairs, signed(row["difference"]), bounds(row["interval"]), p, verdict))
    left = room(console.width, zip(titles, *(cells for _, *cells in rows), strict=True))
    for name, *cells in rows:
        table.add_row(folded(name, left), *cells)
    console.print(table)
    share = together(report)
    all_hold = [f"All intervals hold together with a probability of {share}."] if share else []
    about = (*all_hold, *noise_lines(report), *tuning_lines(report), *cost_lines(report), "")
    for line in (*about, *verdict_lines(report)):  # what was found comes last, where the eye is
        console.print(line, soft_wrap=True, highlight=False)
