"""The one renderer of reports: terminal, HTML, Markdown, LaTeX, CSV, and files with figures. No torch."""

import csv
import io
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Column
from rich.table import Table as RichTable

from lightning_llm.ablate.report.record import ReportRecord, Row
from lightning_llm.ablate.report.sections import Figure, Table, document_of, verdict_table
from lightning_llm.ablate.report.template import TEMPLATE
from lightning_llm.io.atomic import atomic_file, write_text
from lightning_llm.io.charts import canvas, svg
from lightning_llm.io.console import Console, folded, room
from lightning_llm.io.untrusted import printable

WIDTH = 9.2  # inches of a figure
NARROWEST = 16  # characters of a first column: optional columns give way before it gets fewer
MOST_LINES = 3  # of a name in a first column; longer ones are numbered
FIGURE_FORMATS = ("svg", "png")
CSV_COLUMNS = (
    *("variant", "baseline", "kind", "size", "metric", "unit", "pairs", "baseline_mean", "mean", "difference"),
    *("low", "high", "level", "p_adjusted", "sd", "correlation", "verdict", "direction", "against_delta", "sentence"),
    *("diverged", "baseline_diverged", "steps", "parameters", "step_s", "peak_bytes"),
)


# ---- terminal


def show(report: ReportRecord, console: Console) -> None:
    """Print a report: what was found comes last, where the eye is."""
    document = document_of(report)
    console.print_lines(document.title)
    _print_parts(document.about, console)
    for section in document.sections:
        _print_parts(section.parts, console)
    console.print_lines("")
    _print_parts(document.found.parts, console)


def _print_parts(parts: Sequence[Any], console: Console) -> None:
    for part in parts:
        if isinstance(part, str):
            console.print_lines(part)
        elif isinstance(part, Table) and part.is_text and not part.is_detail:
            console.print_lines(*(f"{name}: {what}" for name, what, *_ in part.rows))
        elif isinstance(part, Table) and not part.is_detail:
            print_table(part, console)


def print_table(table: Table, console: Console) -> None:
    """Print a table in which only the first column is folded, and in a narrow terminal others that may be.

    Names that would take many lines are numbered, and stand below the table.
    """
    places = list(range(len(table.head)))
    rows: Sequence[Sequence[str]] = table.rows
    if _room(table.head, rows, places, console) < NARROWEST:
        places = [place for place in places if table.head[place] not in table.optional]
        can_fold = [title in table.folded for title in table.head]
        rows = [[_broken(cell) if fold else cell for cell, fold in zip(row, can_fold, strict=True)] for row in rows]
    first, *rest = places
    columns = [Column(table.head[place], no_wrap=True) for place in rest]
    printed = RichTable(Column(table.head[first], overflow="fold"), *columns, box=SIMPLE_HEAD, pad_edge=False)
    width = _room(table.head, rows, places, console)
    labels = {row[first]: folded(row[first], width) for row in rows}
    legend = []
    if any(label.count("\n") >= MOST_LINES for label in labels.values()):
        names = table.names or list(labels)
        labels |= {name: str(number) for number, name in enumerate(names, 1)}
        legend = [f"{labels[name]}: {name}" for name in names if any(row[first] == name for row in rows)]
    for row in rows:
        printed.add_row(labels[row[first]], *(row[place] for place in rest))
    console.print(printed)
    console.print_lines(*legend)


def _broken(cell: str) -> str:
    """A cell in lines that end at its commas."""
    return cell.replace(", ", ",\n")


def _room(head: Sequence[str], rows: Sequence[Sequence[str]], places: Sequence[int], console: Console) -> int:
    """Characters that the other columns leave for the first one."""
    columns = []
    for place in places[1:]:
        columns.append([line for cell in (head[place], *(row[place] for row in rows)) for line in cell.split("\n")])
    return room(console.width, columns)


# ---- HTML


def page(report: ReportRecord) -> str:
    """One HTML page: inline SVG and CSS, no script, no network, light and dark."""
    document = document_of(report)
    return str(_template().render(document=document, kind_of=_kind_of, svg=_svg, whole=True))


def fragment(report: ReportRecord) -> str:
    """HTML for a notebook: what was found, and the rest in folds."""
    document = document_of(report)
    return str(_template().render(document=document, kind_of=_kind_of, svg=_svg, whole=False))


@cache
def _template() -> Any:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["printable"] = lambda value: printable(str(value))
    return environment.from_string(TEMPLATE.lstrip())


def _kind_of(part: object) -> str:
    return "paragraph" if isinstance(part, str) else type(part).__name__.lower()


def _svg(figure: Figure) -> Any:
    from markupsafe import Markup

    return Markup(svg(figure.draw, width=WIDTH, height=figure.height, columns=figure.columns))


# ---- text for papers and programs


def markdown(report: ReportRecord) -> str:
    """Findings in Markdown: the table and the sentences."""
    document = document_of(report)
    lines = [f"**{_in_markdown(document.title)}**", ""]
    for part in document.found.parts:
        if isinstance(part, Table):
            rows = [list(part.head), ["---"] * len(part.head), *part.rows]
            lines += ["", *(f"| {' | '.join(map(_in_markdown, row))} |" for row in rows), ""]
        elif isinstance(part, str) and part:
            lines.append(f"- {_in_markdown(part)}")
    return "\n".join(lines).replace("\n\n\n", "\n\n")


def latex(report: ReportRecord) -> str:
    """The table of what was found, in LaTeX; it needs the package booktabs."""
    table = next((part for part in document_of(report).found.parts if isinstance(part, Table)), None)
    table = table or verdict_table(report, [])
    head, *rows = (f"{' & '.join(map(_in_latex, row))} \\\\" for row in (table.head, *table.rows))
    begin = f"\\begin{{tabular}}{{l{'r' * (len(table.head) - 2)}l}}"
    return "\n".join([begin, "\\toprule", head, "\\midrule", *rows, "\\bottomrule", "\\end{tabular}"])


def comma_separated(report: ReportRecord) -> str:
    """All rows with all digits, as CSV."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    writer.writerows([_csv_cells(report, row) for row in report.rows])
    return file.getvalue().removesuffix("\n")


def _csv_cells(report: ReportRecord, row: Row) -> list[Any]:
    variant = report.variants.get(row.variant)
    step = None if variant is None else variant.step
    low, high = row.interval or (None, None)
    known = {
        "low": low,
        "high": high,
        "steps": None if variant is None else variant.steps,
        "parameters": None if variant is None else variant.parameters,
        "step_s": None if step is None else step.step_s,
        "peak_bytes": None if step is None else step.peak_bytes,
    }
    values = [known[name] if name in known else getattr(row, name) for name in CSV_COLUMNS]
    return ["" if value is None else printable(value) if isinstance(value, str) else value for value in values]


_OF_MARKDOWN = {"<": "&lt;", "&": "&amp;"} | {sign: f"\\{sign}" for sign in "\\`*|"}


def _in_markdown(cell: str) -> str:
    return "".join(_OF_MARKDOWN.get(sign, sign) for sign in printable(cell.replace("\n", " ")))


_OF_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--"}
_OF_LATEX |= {sign: f"\\{sign}" for sign in "&%$#_{}"} | {"<": "$<$", ">": "$>$", "×": r"$\times$", "²": "$^2$"}


def _in_latex(cell: str) -> str:
    """Escaped; a minus sign of a number is not a hyphen."""
    text = "".join(_OF_LATEX.get(sign, sign) for sign in printable(cell.replace("\n", " ")))
    return " ".join(f"${word}$" if word[:1] in "+-" and word[1:2].isdecimal() else word for word in text.split(" "))


# ---- files


def write_page(path: Path, report: ReportRecord) -> None:
    """Write the page."""
    write_text(path, page(report))


def write_figures(folder: Path, report: ReportRecord) -> list[Path]:
    """Write each figure as SVG and PNG, for a light page; where they are."""
    written = []
    for figure in document_of(report).figures:
        for kind in FIGURE_FORMATS:
            path = folder / f"{figure.name}.{kind}"
            draw_figure(figure, path, kind)
            written.append(path)
    return written


def draw_figure(figure: Figure, path: Path | None, kind: str) -> Any:
    """Draw a figure, and write it if a path is given: PNG, SVG, or PDF; a ``matplotlib.figure.Figure``."""
    with canvas(WIDTH, figure.height, style={"text.parse_math": False}, ncols=figure.columns) as axes:
        figure.draw(axes[0])
        drawn = axes[0, 0].figure
        if path is not None:
            metadata = {"Date": None} if kind == "svg" else None
            with atomic_file(path) as file:
                drawn.savefig(file, format=kind, metadata=metadata)
    return drawn
