"""Benchmarks of several parts: a shape is the name of one, and its rows say what should not be."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks.charts import Measure, bar_plot
from benchmarks.rows import Row

Part = TypeVar("Part")


def named(parts: Mapping[str, Part], text: str) -> Part:
    """The part of that name; raises ``ValueError`` for another one."""
    if text not in parts:
        raise ValueError(f"shapes {text!r}: there are {', '.join(parts)}")
    return parts[text]


def doubled(text: str) -> tuple[str, list[int]]:
    """``width=64-512`` as the name and the sizes, each twice the one before; none if it is no such shape."""
    match = re.fullmatch(r"(\w+)=([1-9]\d*)-([1-9]\d*)", text)
    name, first, last = (match[1], int(match[2]), int(match[3])) if match else ("", 1, 0)
    return name, [first * 2**power for power in range((last // first).bit_length())]


def check(rows: Sequence[Row]) -> None:
    """Fail with the ``problems`` of all rows, if there are any."""
    if problems := [problem for row in rows for problem in row.problems or ()]:
        raise RuntimeError("; ".join(problems))


def draw_bars(measures: Sequence[Measure], rows: Sequence[Row], path: Path, title: str) -> None:
    """Bars of the first of the measures that a row has, a row of axes for each part."""
    shown = next(one for one in measures if any(getattr(row, one.field) is not None for row in rows))
    bar_plot(shown, by=("shape",))(rows, path, title)
