"""The report of an experiment: one screen in the terminal, ``report.json`` and ``report.html`` in its folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from lightning_llm.ablate.page import (
    bounds,
    cost_lines,
    labeled,
    noise_lines,
    page_of,
    signed,
    tuning_lines,
    verdict_in_words,
)
from lightning_llm.ablate.report import curves_of, report_of
from lightning_llm.ablate.results import Loaded
from lightning_llm.io.atomic import write_json, write_text
from lightning_llm.io.console import Console

JSON, PAGE = "report.json", "report.html"


def write_report(loaded: Loaded) -> tuple[dict[str, Any], Path]:
    """Write both files; the report, and where the page is."""
    report, page = report_of(loaded), loaded.plan.out / PAGE
    write_json(loaded.plan.out / JSON, report)
    write_text(page, page_of(report, curves_of(loaded)))
    return report, page


def show_report(report: Mapping[str, Any], console: Console) -> None:
    """Print a report on one screen."""
    state = "ended" if report["has_ended"] else "has not ended"
    head = f"{report['name']}: {report['metric']} of {report['validation']}, {state}; plan {report['plan'][:12]}"
    console.print(head, soft_wrap=True, highlight=False)
    table = Table("variant", "pairs", "difference", Column("interval", no_wrap=True), "p adjusted", "verdict")
    for name, row in labeled(report):
        p = "–" if row["p_adjusted"] is None else f"{row['p_adjusted']:.4f}"
        numbers = str(row["pairs"]), signed(row["difference"]), bounds(row["interval"]), p
        table.add_row(name, *numbers, verdict_in_words(row))
    console.print(table)
    for line in (*noise_lines(report), *tuning_lines(report), *cost_lines(report)):
        console.print(line, soft_wrap=True, highlight=False)
