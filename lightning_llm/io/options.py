"""Options of dataclasses that say what they accept, and errors that list all that is wrong."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, get_args, get_origin

from lightning_llm.io.untrusted import is_number, shown


def option(default: Any, expected: str, fits: Callable[[Any], bool]) -> Any:
    """A field with what it accepts, in words, and whether it accepts a value. ``MISSING``: it has no default."""
    return dataclasses.field(default=default, metadata={"fits": fits, "expected": expected})


def number(default: float, expected: str, fits: Callable[[float], bool]) -> Any:
    """Option like :func:`option`, for a number."""
    return option(default, expected, lambda value: is_number(value) and fits(value))


def option_problems(options: Any) -> Iterator[str]:
    """A line for each option of a dataclass with a value that it does not accept."""
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        choices = get_args(field.type)
        if get_origin(field.type) is Literal and value not in choices:
            yield f"{field.name} {shown(value)} is unknown: choose one of {', '.join(choices)}"
        elif "fits" in field.metadata and not field.metadata["fits"](value):
            yield f"{field.name} must be {field.metadata['expected']}, got {shown(value)}"


def check_options(options: Any) -> None:
    """Raises a ValueError that lists all of :func:`option_problems`."""
    raise_all(option_problems(options))


def raise_all(problems: Iterable[str]) -> None:
    """Raise a ValueError that lists all problems, each of them once, if there are any."""
    if listed := list(dict.fromkeys(problems)):
        raise ValueError("; ".join(listed))
