"""Rows of measurements: written and read as JSON, shown as tables. Loads no torch."""

from collections.abc import Callable, Iterable, Sequence
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from lightning_llm.io.atomic import write_json
from lightning_llm.io.console import Console
from lightning_llm.io.units import MIB as MIB
from lightning_llm.io.untrusted import read_json
from lightning_llm.runs.code import commit_of_package

MEASURED = (  # the fields of every row
    *("forward_s", "backward_s", "total_s", "total_p20_s", "total_p80_s", "ratio", "ratio_p20", "ratio_p80"),
    *("peak_bytes", "saved_bytes", "resident_bytes", "tokens_per_s", "bytes_per_s", "wire_bytes"),
)
# By heading: a field of a row, or a function of it; what it is multiplied by; its format.
Columns = dict[str, tuple[str | Callable[["Row"], Any], float, str]]
KNOWN: Columns = {
    **{f"{part} ms": (f"{part}_s", 1e3, ".1f") for part in ("forward", "backward", "total")},
    **{"p20": ("total_p20_s", 1e3, ".2f"), "p80": ("total_p80_s", 1e3, ".2f"), "ms": ("total_s", 1e3, ".2f")},
    **{"least": ("total_p20_s", 1e3, ".2f"), "most": ("total_p80_s", 1e3, ".2f"), "s": ("total_s", 1, ".2f")},
    **{"ratio": ("ratio", 1, ".2f"), "peak ratio": ("peak_ratio", 1, ".2f"), "tokens/s": ("tokens_per_s", 1, ",.0f")},
    **{f"{kind} MiB": (f"{kind}_bytes", 1 / MIB, ",.0f") for kind in ("saved", "peak", "resident")},
}


def columns(*names: str) -> Columns:
    """Columns that several benches have."""
    return {name: KNOWN[name] for name in names}


COLUMNS = columns("forward ms", "backward ms", "total ms", "ratio", "saved MiB", "peak MiB", "peak ratio")


class Row(SimpleNamespace):
    """One measurement, in seconds and bytes; what does not apply is ``None``.

    Fields with a leading underscore are for table and plot alone, and not written.
    """

    def __getattr__(self, name: str) -> Any:
        """``None``: the row has no field of that name."""
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def ratios(samples: Sequence[float], first: Sequence[float]) -> dict[str, float]:
    """Median, 20th and 80th percentile of the ratios within each round, as fields of a row."""
    quantiles = np.quantile(np.divide(samples, first), (0.5, 0.2, 0.8))
    return dict(zip(("ratio", "ratio_p20", "ratio_p80"), map(float, quantiles), strict=True))


def write_rows(
    rows: Iterable[Row], path: Path, command: str, files: Sequence[str] = (), commit: str | None = None
) -> None:
    """Write rows with their origin, as JSON.

    Args:
        rows: What was measured.
        path: Of the file.
        command: That measured it.
        files: The code that it measured, from the root of a clone; by default all of the package.
        commit: Of the code, where git cannot tell: in a copy of a clone, or on a machine without git.
    """
    commit = (commit_of_package() or "").removesuffix("-dirty") or commit
    record = {"command": command, "date": date.today().isoformat(), "commit": commit}
    written = [{k: v for k, v in vars(row).items() if not k.startswith("_")} for row in rows]
    write_json(path, {**record, "files": list(files) or ["lightning_llm"], "rows": written}, indent=1)


def read_rows(path: Path) -> list[Row]:
    """The rows of a file."""
    return [Row(**row) for row in read_json(path, 1 << 30, nan_is_null=True)["rows"]]


def groups(rows: Iterable[Row], title: Callable[[Row], str] = lambda row: row._group) -> dict[str, list[Row]]:
    """The rows of each title; by default those of each shape and dtype that were asked for."""
    by_title: dict[str, list[Row]] = {}
    for row in rows:
        by_title.setdefault(title(row), []).append(row)
    return by_title


def print_table(rows: Iterable[Row], console: Console, shown: Columns) -> None:
    """A table for each shape and dtype; a column without any value is left out."""
    for title, group in groups(rows).items():
        table = Table(Column("variant", no_wrap=True), title=title, box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
        cells = {heading: [_cell(row, *column) for row in group] for heading, column in shown.items()}
        filled = {heading: texts for heading, texts in cells.items() if set(texts) != {"–"}}
        for heading in filled:
            table.add_column(heading, justify="right")
        for row, texts in zip(group, zip(*filled.values(), strict=True), strict=True):
            table.add_row(row.variant, *texts)
        console.print(table)


def _cell(row: Row, what: str | Callable[[Row], Any], factor: float, spec: str) -> str:
    value = what(row) if callable(what) else getattr(row, what)
    return "–" if value is None else format(value * factor, spec)
