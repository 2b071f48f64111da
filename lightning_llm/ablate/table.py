"""Tables of losses that other programs have written: CSV, TSV, or JSON lines, with one row per run or per seed.

A *long* table has a column ``variant`` (or ``group``), a column ``seed``, and one column per metric; each row is a run.
A *wide* table has one column per variant and an optional column ``seed``; each row is a seed. Both become the losses of
each variant by seed. A run that failed is ``nan`` or infinite, or ``null`` in JSON; an empty cell is a run that is not
there. Nothing is guessed: what cannot be read is an error that names its line and column. With a minus before the name
of the metric, higher is better, and its numbers are negated.
"""

import csv
import dataclasses
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_llm.ablate.names import NEGATED
from lightning_llm.io.untrusted import MIB, parse_json, read_text, shown

LARGEST = 64 * MIB
VARIANT, SEED, LOSS = ("variant", "group"), "seed", "loss"
LAYOUT = "a table has the columns variant, seed, and a metric, or one column per variant"
JSON_LINES = (".jsonl", ".ndjson")
MOST_NAMES = 12  # in a message

Seed = int | str
BySeed = dict[Seed, float]


@dataclasses.dataclass(frozen=True)
class Losses:
    """The losses of a table.

    Attributes:
        by_variant: The losses of each variant by seed, of which lower is better; NaN: the run failed.
        metric: What they are called. With a minus before it, they are the negated numbers of the table.
        source: Where they are from, for messages.
        has_seeds: Whether the seeds are known; otherwise they are places in the order of the runs.
    """

    by_variant: dict[str, BySeed]
    metric: str
    source: str
    has_seeds: bool


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows under named columns.

    Attributes:
        columns: Their names.
        rows: The cells of each row, one per column; an empty one is ``None`` or blank text.
        source: Where they are from, for messages.
        places: Where each row is, such as ``line 2``.
    """

    columns: list[str]
    rows: list[Sequence[object]]
    source: str
    places: list[str]

    def __post_init__(self) -> None:
        repeated = next((name for n, name in enumerate(self.columns) if name in self.columns[:n]), None)
        if repeated is not None:
            raise ValueError(f"{self.source} has two columns {shown(repeated)}: rename one")
        if not self.rows:
            raise ValueError(f"{self.source} has no rows below its column names")

    def losses(self, metric: str | None = None) -> Losses:
        """The losses of each variant.

        Args:
            metric: The column to read. Of a wide table, only what its numbers are called. ``None``: the only one. With
                a minus before it, higher is better.

        Raises:
            ValueError: The table has another layout, or several metrics, or a cell that is no number; or a run is
                there twice.
        """
        by_word = {name.lower(): place for place, name in reversed(list(enumerate(self.columns)))}
        variant = next((by_word[word] for word in VARIANT if word in by_word), None)
        if variant is None:
            return self._wide(by_word.get(SEED), metric)
        return self._long(variant, by_word.get(SEED), metric)

    def _long(self, variant: int, seed: int | None, metric: str | None) -> Losses:
        others = [name for place, name in enumerate(self.columns) if name and place not in (variant, seed)]
        if not others:
            raise ValueError(f"{self.source} has no column with a metric: {LAYOUT}")
        if metric is None and len(others) > 1:
            advice = f"give metric (--metric) as one of {listed(others)}, with a minus before it if higher is better"
            raise ValueError(f"{self.source} has several columns: {advice}")
        name = others[0] if metric is None else metric.removeprefix(NEGATED)
        if name not in others:
            raise ValueError(f"metric must be one of {listed(others)}: {self.source} has no column {shown(name)}")
        column = self.columns.index(name)
        losses: dict[str, BySeed] = {}
        places: dict[tuple[str, Seed], str] = {}
        for place, row in zip(self.places, self.rows, strict=True):
            own = text_of(row[variant])
            if not own:
                raise ValueError(f"{self.source}, {place}: the {self.columns[variant]} is empty, expected a name")
            of_variant = losses.setdefault(own, {})
            key = len(of_variant) if seed is None else self._seed(row[seed], place)
            if (first := places.setdefault((own, key), place)) is not place:
                run = f"{shown(own)} with seed {key}"
                raise ValueError(f"{self.source}, {place}: {run} is in {first} too; each run has one row, so keep one")
            value = self._number(row[column], place, name)
            if value is None:
                advice = "write nan for a run that failed, or leave the row out"
                raise ValueError(f"{self.source}, {place}: {shown(name)} is empty; {advice}")
            of_variant[key] = value
        return losses_of(losses, metric or name, self.source, has_seeds=seed is not None)

    def _wide(self, seed: int | None, metric: str | None) -> Losses:
        variants = [(place, name) for place, name in enumerate(self.columns) if name and place != seed]
        losses: dict[str, BySeed] = {name: {} for _, name in variants}
        places: dict[Seed, str] = {}
        for number, (place, row) in enumerate(zip(self.places, self.rows, strict=True)):
            key = number if seed is None else self._seed(row[seed], place)
            if (first := places.setdefault(key, place)) is not place:
                raise ValueError(f"{self.source}, {place}: seed {key} is in {first} too; each seed has one row")
            for column, name in variants:
                value = self._number(row[column], place, name, f"; {LAYOUT}" if number == 0 else "")
                if value is not None:
                    losses[name][key] = value
        return losses_of(losses, metric or LOSS, self.source, has_seeds=seed is not None)

    def _seed(self, cell: object, place: str) -> Seed:
        """A whole number, or another label as it is."""
        text = text_of(cell)
        if not text:
            raise ValueError(f"{self.source}, {place}: the seed is empty, expected a number or a name")
        try:
            value = float(text)
        except ValueError:
            return text
        return int(value) if value.is_integer() and abs(value) < 1 << 53 else text

    def _number(self, cell: object, place: str, column: str, more: str = "") -> float | None:
        """The number in a cell; NaN: the run failed; ``None``: the cell is empty."""
        if (isinstance(cell, str) and not cell.strip()) or cell is None:
            return None
        try:
            return number_of(cell)
        except ValueError as error:
            raise ValueError(f"{self.source}, {place}, column {shown(column)}: {error}{more}") from None


def losses_of(numbers: dict[str, BySeed], metric: str, source: str, *, has_seeds: bool) -> Losses:
    """The losses that numbers stand for: those of a metric with a minus before its name are negated."""
    if metric.startswith(NEGATED):
        numbers = {name: {seed: -value for seed, value in runs.items()} for name, runs in numbers.items()}
    return Losses(numbers, metric, source, has_seeds)


def number_of(value: object) -> float:
    """A number of a run: a float; NaN: the run failed.

    Args:
        value: A number, its text, or ``None`` for a run that failed.

    Raises:
        ValueError: It is something else.
    """
    if value is None:
        return math.nan
    try:
        if isinstance(value, bool) or (isinstance(value, str) and "_" in value):
            raise TypeError
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{shown(value)} is not a number; expected one, or nan for a run that failed") from None
    return number if math.isfinite(number) else math.nan


def text_of(cell: object) -> str:
    """The text of a cell in one line."""
    return "" if cell is None else " ".join(str(cell).split())


def listed(names: Iterable[object]) -> str:
    """Names for a message, the first few of many."""
    every = [name if isinstance(name, str) and name.isprintable() else shown(name) for name in names]
    more = f" and {len(every) - MOST_NAMES} more" if len(every) > MOST_NAMES else ""
    return f"{', '.join(every[:MOST_NAMES])}{more}"


# ---- files


def read_table(path: Path) -> Table:
    """Read a file of CSV, TSV, or JSON lines.

    JSON lines are known by the end of the file's name, or by a first character ``{``. Otherwise, the first line has the
    names of the columns, and a tab, comma, or semicolon in it separates the cells of all lines.

    Args:
        path: The file.

    Raises:
        ValueError: It is no such file, or has more than 64 MiB.
        OSError: It cannot be read.
    """
    text = read_text(path, LARGEST).removeprefix("\ufeff")
    if "\0" in text:
        raise ValueError(f"{path} is a binary file, expected CSV, TSV, or JSON lines")
    if not text.strip():
        raise ValueError(f"{path} is empty, expected CSV, TSV, or JSON lines with a row for each run")
    if path.suffix.lower() in JSON_LINES or text.lstrip().startswith("{"):
        return _json_lines(text, str(path))
    if text.lstrip().startswith("["):
        raise ValueError(f"{path} begins with a list, expected JSON lines: one object per line, or CSV or TSV")
    return _separated(text, str(path))


def _separated(text: str, source: str) -> Table:
    """CSV or TSV, as the first line that is not blank says."""
    header = next(line for line in io.StringIO(text) if line.strip())
    separator = next((sign for sign in "\t,;" if sign in header), ",")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    lines = _lines(reader, source)
    _, names = next(lines)
    columns = [text_of(name) for name in names]
    if all(_is_number(name) for name in columns if name):
        raise ValueError(f"{source} has no column names in its first line, but numbers: {LAYOUT}")
    rows: list[Sequence[object]] = []
    places = []
    for number, cells in lines:
        if len(cells) != len(columns):
            found = f"{len(cells)} cells under {len(columns)} column names"
            raise ValueError(f"{source}, line {number} has {found}: cells are separated by {shown(separator)}")
        rows.append(cells)
        places.append(f"line {number}")
    return Table(columns, rows, source, places)


def _lines(reader: Any, source: str) -> Iterator[tuple[int, list[str]]]:
    """Rows that are not blank, with their numbers."""
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                yield reader.line_num, cells
    except csv.Error as error:
        raise ValueError(f"{source}, line {reader.line_num} is not CSV that can be read: {error}") from None


def _json_lines(text: str, source: str) -> Table:
    """One object per line; the columns are the fields of all of them."""
    objects = []
    places = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            found = parse_json(line, f"{source}, line {number}", nan_is_null=True)
            objects.append({text_of(name): value for name, value in found.items()})
            places.append(f"line {number}")
    return table_of(objects, source, places, null=math.nan)


def table_of(
    objects: Sequence[Mapping[str, object]], source: str, places: list[str], null: float | None = None
) -> Table:
    """A table of rows by column name.

    Args:
        objects: The rows; they need not have the same columns.
        source: Where they are from, for messages.
        places: Where each row is.
        null: What ``None`` in a row means; the default: the cell is empty.
    """
    columns = list(dict.fromkeys(name for row in objects for name in row))
    rows = [[null if name in row and row[name] is None else row.get(name) for name in columns] for row in objects]
    return Table(columns, list(rows), source, places)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
