"""The report that a user gets: a record that shows itself, in a terminal, in a notebook, and in a paper."""

import argparse
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lightning_llm.ablate.report import render
from lightning_llm.ablate.report.record import VERSION, ReportRecord, Row
from lightning_llm.ablate.report.sections import FIGURES, PAGE, REPORT, document_of
from lightning_llm.io.atomic import write_json
from lightning_llm.io.console import Console
from lightning_llm.io.records import read_record, version_of

COLUMNS = 100  # characters of the text
PLOTS = ("png", "svg", "pdf")
FORMATS = ("text", "json", "markdown", "latex", "csv")


def add_format(parser: argparse.ArgumentParser) -> None:
    """Add the option that chooses how reports are printed."""
    about = f"how to print: {', '.join(FORMATS)} (default: {FORMATS[0]})"
    parser.add_argument("--format", choices=FORMATS, default=FORMATS[0], help=about, metavar="FORMAT")


def print_reports(reports: Sequence["Report"], format: str, console: Console) -> None:
    """Print reports in one of ``FORMATS``; several as JSON in an array."""
    if format == FORMATS[0]:
        for report in reports:
            report.show(console)
    elif format == "json" and len(reports) > 1:
        print(f"[{', '.join(report.to_json() for report in reports)}]")
    else:
        print("\n\n".join(report.to_text(format) for report in reports))


def show_written(report: "Report", format: str = FORMATS[0]) -> None:
    """Write a report to its folder, and print it in one of ``FORMATS``."""
    page = report.write(report.folder)
    console = Console()
    print_reports([report], format, console)
    if format == FORMATS[0]:
        console.print_lines(f"Written: {page}")


class Report(ReportRecord, kw_only=True, omit_defaults=True):
    """A report. Printing it prints tables and sentences; in a notebook, it is shown with figures."""

    @classmethod
    def read(cls, path: str | Path) -> "Report":
        """Read the ``report.json`` of a folder, or a file that holds one.

        Raises:
            ValueError: It is of another version, or no report.
            OSError: It cannot be read.
        """
        path = Path(path)
        path = path / REPORT if path.is_dir() else path
        version = version_of(path)
        if version != VERSION:
            raise ValueError(f"{path} has version {version}, and this lightning-llm reads version {VERSION}")
        return read_record(path, cls)

    def __str__(self) -> str:
        file = io.StringIO()
        self.show(Console(file=file, width=COLUMNS, force_jupyter=False))  # a notebook would show each line
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines())

    __repr__ = __str__

    def __getitem__(self, variant: str) -> Row:
        """The row of a variant in the metric that decides.

        Raises:
            KeyError: There is none.
        """
        return self.row(variant)

    def _repr_html_(self) -> str:
        return render.fragment(self)

    def show(self, console: Console | None = None) -> None:
        """Print it.

        Args:
            console: Where to; ``None``: standard output.
        """
        render.show(self, console or Console(force_jupyter=False))

    def to_text(self, format: str) -> str:
        """The report in one of ``FORMATS``."""
        make: dict[str, Callable[[], str]] = {
            "text": self.__str__,
            "json": self.to_json,
            "markdown": self.to_markdown,
            "latex": self.to_latex,
            "csv": self.to_csv,
        }
        return make[format]()

    def to_dict(self) -> dict[str, Any]:
        """All of it, as JSON takes it: the content of ``report.json``."""
        return dict(msgspec.json.decode(msgspec.json.encode(self)))

    def to_json(self) -> str:
        """The content of ``report.json``."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()

    def to_markdown(self) -> str:
        """Findings in Markdown: the table, and a sentence for each comparison."""
        return render.markdown(self)

    def to_latex(self) -> str:
        """The table in LaTeX; it needs the package booktabs."""
        return render.latex(self)

    def to_csv(self) -> str:
        """All rows with all digits, as CSV."""
        return render.comma_separated(self)

    def plot(self, path: str | Path | None = None, name: str | None = None) -> Any:
        """Plot a figure of the report.

        Args:
            path: Where to write it, as PNG, SVG, or PDF; ``None``: nowhere.
            name: Which one: ``differences``, ``curves``, ``tuning``, ``cost``, ``sizes`` or ``baseline``; ``None``: the
                first.

        Returns:
            A ``matplotlib.figure.Figure``.

        Raises:
            ValueError: The file's name has another ending, or there is no such figure.
        """
        ending = "png" if path is None else Path(path).suffix.removeprefix(".").lower()
        if ending not in PLOTS:
            raise ValueError(f"{path}: a plot must end with {', '.join(f'.{known}' for known in PLOTS)}")
        figures = {figure.name: figure for figure in document_of(self).figures}
        if not figures or (name is not None and name not in figures):
            raise ValueError(f"name must be one of {', '.join(figures) or 'no figure'}, got {name!r}")
        figure = next(iter(figures.values())) if name is None else figures[name]
        return render.draw_figure(figure, None if path is None else Path(path), ending)

    def write(self, folder: str | Path) -> Path:
        """Write ``report.json``, ``report.html``, and each figure as SVG and PNG to a folder; where the page is."""
        folder = Path(folder)
        write_json(folder / REPORT, self.to_dict())
        (folder / FIGURES).mkdir(exist_ok=True)
        render.write_figures(folder / FIGURES, self)
        render.write_page(folder / PAGE, self)
        return folder / PAGE
