"""The report of an experiment on one screen of the terminal."""

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from lightning_llm.ablate import words
from lightning_llm.io.console import Console, folded, room


def show_report(report: Mapping[str, Any], console: Console) -> None:
    """Print a report on one screen: a table in which only names are folded, and a sentence for each variant."""
    state = "ended" if report["has_ended"] else "has not ended"
    head = f"{report['name']}: {report['metric']} of {report['validation']}, {state}; plan {report['plan'][:12]}"
    sides = "; ".join(f"{name}: {what}" for name, what in words.compared(report).items())
    for line in (head, sides, *words.design_lines(report)):
        console.print(line, soft_wrap=True, highlight=False)
    titles = ("pairs", "difference", f"{words.percent(report['interval']['each'])} interval", "p adj.", "verdict")
    columns = [Column(title, no_wrap=True) for title in titles]
    table = Table(Column("variant", overflow="fold"), *columns, box=SIMPLE_HEAD, pad_edge=False)
    rows = [(name, *words.cells(row)) for name, row in words.labeled(report)]
    left = room(console.width, zip(titles, *(cells for _, *cells in rows), strict=True))
    for name, *cells in rows:
        table.add_row(folded(name, left), *cells)
    console.print(table)
    share = words.together(report)
    all_hold = [f"All intervals hold together with a probability of {share}."] if share else []
    about = (*all_hold, *words.noise_lines(report), *words.tuning_lines(report), *words.cost_lines(report), "")
    for line in (*about, *words.verdict_lines(report)):  # what was found comes last, where the eye is
        console.print(line, soft_wrap=True, highlight=False)
