"""Schemas: what a value that was read from a file must look like, as functions that yield what is wrong with it.

A ``Schema`` is a function of a value and its name. :func:`check` makes one of a test and words for it; ``record``,
``open_record``, ``list_of``, ``by_name`` and ``maybe`` make one of others. :func:`validate` compares the content of a
file with one. Imports neither torch nor numpy.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import islice
from typing import Any

from lightning_llm.io.untrusted import field_name, shown

Schema = Callable[[Any, str], Iterable[str]]  # value and its name -> what is wrong with it
MOST_LISTED, MOST_CHARACTERS = 5, 600  # problems in one line, and its characters
MOST_CHOICES = 40
LARGEST = 1e100  # number: its square is finite, and so are sums


def refuse(problems: Iterable[str], source: object, advice: str = "") -> None:
    """Raise a ValueError of one line with the first few problems, if there are any."""
    if listed := list(islice(problems, MOST_LISTED)):
        text = " ".join("; ".join(listed).split())[:MOST_CHARACTERS]
        raise ValueError(f"{source}: {text}{advice and f'; {advice}'}")


def validate(content: object, schema: Schema, source: object, advice: str = "") -> None:
    """Compare the content of a file with a schema.

    Args:
        content: What was read.
        schema: The schema.
        source: The file.
        advice: What to do.

    Raises:
        ValueError: They differ. One line lists the first few differences.
    """
    refuse(schema(content, ""), source, advice)


def check(expected: str, fits: Callable[[Any], bool]) -> Schema:
    """A value that passes a test, described in words."""

    def problems(value: Any, name: str) -> Iterable[str]:
        return () if fits(value) else (f"{name or 'the content'} is {shown(value)}, expected {expected}",)

    return problems


def whole(low: int = 0, high: int = 2**53) -> Schema:
    """A whole number within bounds. ``True`` is none."""
    return check(f"a whole number from {low} to {high}", lambda value: type(value) is int and low <= value <= high)


def one_of(*values: object) -> Schema:
    """One of a few values, of the same type."""
    accepted = [(type(value), value) for value in values]
    return check(" or ".join(map(repr, values)), lambda value: (type(value), value) in accepted)


def maybe(schema: Schema) -> Schema:
    """A value of a schema, or null."""
    return lambda value, name: () if value is None else schema(value, name)


def list_of(schema: Schema, max_items: float = math.inf) -> Schema:
    """A list of at most ``max_items`` items."""
    expected = "a list" if max_items == math.inf else f"a list of at most {max_items}"

    def problems(value: Any, name: str) -> Iterable[str]:
        if not isinstance(value, list | tuple) or len(value) > max_items:
            return [f"{name} is {shown(value)}, expected {expected}"]
        return (problem for number, item in enumerate(value) for problem in schema(item, f"{name}[{number}]"))

    return problems


def by_name(schema: Schema, min_fields: int = 1) -> Schema:
    """An object with at least one field, or ``min_fields``, of any name, whose values have one schema."""

    def problems(value: Any, name: str) -> Iterable[str]:
        if not isinstance(value, dict) or len(value) < min_fields or not all(isinstance(k, str) and k for k in value):
            return [f"{name} is {shown(value)}, expected {'at least one' if min_fields else 'options'} by name"]
        return (problem for key, item in value.items() for problem in schema(item, f"{name}.{field_name(key)}"))

    return problems


def record(
    required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None, *, is_open: bool = False
) -> Schema:
    """An object with these fields; an open one may have others too."""
    fields = {**(optional or {}), **required}

    def problems(value: Any, name: str) -> Iterable[str]:
        if not isinstance(value, dict):
            yield f"{name or 'the content'} is {shown(value)}, expected an object with fields by name"
            return
        prefix = f"{name}." if name else ""
        yield from (f"{prefix}{field} is missing" for field in required if field not in value)
        for field, inner in value.items():
            if field in fields:
                yield from fields[field](inner, prefix + field)
            elif not is_open or not isinstance(field, str):
                choice = f": choose one of {', '.join(fields)}" if len(fields) <= MOST_CHOICES else ""
                yield f"{prefix}{field_name(field)} is unknown{choice}"

    return problems


open_record = partial(record, is_open=True)
NUMBER = check("a finite number", lambda value: type(value) in (int, float) and abs(value) <= LARGEST)
POSITIVE = check("a number above 0", lambda value: type(value) in (int, float) and 1 / LARGEST <= value <= LARGEST)
BOOL = check("true or false", lambda value: isinstance(value, bool))
TEXT = check("text", lambda value: isinstance(value, str))
SHA256 = check("64 hex digits", lambda value: isinstance(value, str) and bool(re.fullmatch("[0-9a-f]{64}", value)))
