"""Benchmarks of several parts: a shape is the name of one, and its rows say what should not be."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from lightning_llm.bench.rows import Row

Part = TypeVar("Part")


def named(parts: Mapping[str, Part]) -> Callable[[str], Part]:
    """A reader of shapes for a ``Bench``: it returns the part of that name, and raises ``ValueError`` for another."""

    def parse(text: str) -> Part:
        if text not in parts:
            raise ValueError(f"shapes {text!r}: there are {', '.join(parts)}")
        return parts[text]

    return parse


def check(rows: Sequence[Row]) -> None:
    """Fail with the ``problems`` of all rows, if there are any."""
    if problems := [problem for row in rows for problem in row.problems or ()]:
        raise RuntimeError("; ".join(problems))
